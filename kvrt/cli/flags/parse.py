"""Parses the words of a command with absl, and prints its help by groups of flags.

What absl lacks is here. Nothing heavy is imported.
"""

import itertools
import math
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import flags

from kvrt.cli.commands import COMMANDS, RUN, Command
from kvrt.cli.flags import other_names
from kvrt.errors import UsageError
from kvrt.options.option import Flag, Options

_MIN_WIDTH, _MAX_WIDTH = 60, 100
# Groups by their first words; others stand behind them.
_ORDER = "Prompt Files Session Model Context Length Sampling Cache Serving Scheduling".split()
_TEXT, _PLAIN = flags.ArgumentParser(), flags.ArgumentSerializer()


def help_text(width: int | None = None, command: Command = RUN, *, everything: bool = False) -> str:
    """The help, wrapped to the terminal or to `width` columns; without what few need, or all."""
    columns = shutil.get_terminal_size().columns
    width = width or min(max(columns, _MIN_WIDTH), _MAX_WIDTH)
    lines = [f"usage: kvrt {command.usage}", "", *textwrap.wrap(command.about, width)]
    flags = [flag for flag in command.flags() if everything or not flag.advanced]
    n_more = len(command.flags()) - len(flags)
    groups = sorted(dict.fromkeys(flag.group for flag in flags), key=_rank)
    left = max(len(usage(flag)) for flag in flags) + 4
    for group in groups:
        lines += ["", *textwrap.wrap(group, width)]
        for flag in flags:
            if flag.group == group:
                text = textwrap.wrap(_about(flag), width - left)
                lines.append(f"  {usage(flag)}".ljust(left) + text[0])
                lines += [" " * left + more for more in text[1:]]
    if n_more:
        lines += ["", f"{n_more} more flags: kvrt {command.name} --help_all"]
    if command.examples:
        lines += ["", "Examples", *(f"  {example}" for example in command.examples)]
    return "\n".join(lines)


def fields_text() -> str:
    """The field that each flag sets, and whether a line may say it or results depend on it."""
    flags = {x.name: x for c in COMMANDS for x in c.flags() if x.owner}
    lines = [
        "Flags and the fields that they set, of the classes of kvrt.options and",
        "kvrt.policies. l: a line of kvrt batch may say it; r: results of kvrt",
        "batch depend on it.",
        "",
    ]
    for name in sorted(flags):
        x = flags[name]
        marks = ("l" if x.line is not False else "-") + ("r" if x.decides else "-")
        lines.append(f"  --{name:<22}{marks}  {x.owner}")
    return "\n".join(lines) + "\n"


def _rank(group: str) -> int:
    """Where a group of flags stands in the help."""
    word = group.split()[0]
    return _ORDER.index(word) if word in _ORDER else len(_ORDER)


def usage(flag: Flag) -> str:
    """A flag with its short name and its value, as the help's left column has it."""
    if flag.place:
        return flag.value
    short = f"-{flag.short}, " if flag.short else "    "
    if flag.kind is bool:
        return f"{short}--[no]{flag.name}"
    return f"{short}--{flag.name} {flag.value or '|'.join(flag.choices)}"


def _about(flag: Flag) -> str:
    choices = f": {', '.join(flag.choices)}" if flag.choices and flag.value else ""
    default = ""
    if flag.default not in (None, ()) and flag.default is not False:
        default = f" (default {'on' if flag.default is True else flag.default})"
    return flag.help + choices + default


class HelpWanted(Exception):
    """Raised by --help and --help_all, so that no mistake behind them counts.

    Attributes:
      everything: flags that few need are wanted as well.
    """

    def __init__(self, *, everything: bool):
        """Of one of the two."""
        super().__init__()
        self.everything = everything


def parse_flags(args: Sequence[str], command: Command = RUN) -> Any:
    """Options from the words after `kvrt COMMAND`.

    Both `--flag=value` and `--flag value` are understood, one dash or two, and dashes inside a
    name for underscores. After `--` nothing is a flag.

    Raises:
      HelpWanted: help is asked for.
      UsageError: an unknown flag, a value outside its range, or flags that contradict each other.
    """
    values = _define(command, args)
    try:
        words = values(["kvrt", *args])[1:]
        chosen: dict[str, Any] = {name: values[name].value for name in command.given_by_name()}
        chosen = {k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()}
        given = {name for name in chosen if values[name].present}
        named = _places(words, args, command, values)
        given |= named.keys()
        options: Options = command.options(**(chosen | named), given=frozenset(given))
        _check_needed(options, command)
        options.check()
        options = options.settled()
    except flags.UnrecognizedFlagError as error:
        raise UsageError(f"{other_names.unknown_flag(error, command)}; {_see(command)}") from error
    # absl raises ValueError where a switch is given a value after --no.
    except (flags.Error, UsageError, ValueError) as error:
        raise UsageError(f"{error}; {_see(command)}") from error
    return options


def _define(command: Command, args: Sequence[str]) -> flags.FlagValues:
    """The flags of a command, by their names and by what else the arguments call them.

    absl makes a class for each alias, and a command has over a hundred.
    """
    words = {word.lstrip("-").partition("=")[0] for word in args}
    words |= {word.removeprefix("no") for word in words}
    values = _Values()
    values.set_gnu_getopt(True)  # flags may stand behind places
    values["help"], values["help_all"] = _Help("help"), _Help("help_all")
    flags.DEFINE_alias("h", "help", flag_values=values)
    flags.DEFINE_alias("help-all", "help_all", flag_values=values)
    for flag in command.given_by_name().values():
        many = flag.type == tuple[str, ...]
        make = flags.MultiFlag if many else flags.Flag
        switch = flag.kind is bool
        default = list(flag.default) if many else flag.default
        values[flag.name] = make(
            _parser(flag), _PLAIN, flag.name, default, flag.help, boolean=switch
        )
        for name in words & _spellings(flag.names, switch=switch) - {flag.name}:
            flags.DEFINE_alias(name, flag.name, flag_values=values)
    return values


def _spellings(names: Iterable[str], *, switch: bool) -> set[str]:
    """Names with dashes too; of a switch also what follows the "no" of --no-name and --no_name."""
    found = {n for name in names for n in (name, name.replace("_", "-"))}
    return found | {mark + name for name in found for mark in "-_"} if switch else found


class _Values(flags.FlagValues):
    """absl's, but that a prompt which begins with --flagfile is a prompt."""

    def read_flags_from_files(self, argv: Sequence[str], force_gnu: bool = True) -> list[str]:
        """The words as they are."""
        return list(argv)


class _Help(flags.BooleanFlag):
    def __init__(self, name: str) -> None:
        super().__init__(name, False, "this text")

    def parse(self, argument: Any) -> None:
        raise HelpWanted(everything=self.name == "help_all")


class _Parser(flags.ArgumentParser):
    """One of absl's, whose mistakes say what is wanted and what another program's word is here."""

    def __init__(
        self,
        parse: Callable[[Any], Any],
        wanted: str,
        choices: Sequence[str] = (),
        several: bool = False,
    ):
        super().__init__()
        self._parse, self._wanted, self._choices = parse, wanted, choices
        self._several = several

    def parse(self, argument: Any) -> Any:
        """The value; raises ValueError that says what is wanted."""
        if self._several and isinstance(argument, str) and "," in argument:
            return tuple(self.parse(word) for word in argument.split(","))
        try:
            value = self._parse(argument)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError("absl lets NaN through any range")
        except ValueError as error:
            near = other_names.nearest_value(argument, self._choices)
            hint = f"; for {argument} take {near}" if near else ""
            raise ValueError(f"{self._wanted} is wanted{hint}") from error
        return value


def _parser(flag: Flag) -> flags.ArgumentParser:
    """What takes the text of a value to the flag's type and checks its range."""
    low, high = flag.least, flag.high
    if flag.choices:
        parse = flags.EnumParser(flag.choices).parse
        return _Parser(parse, " or ".join(flag.choices), flag.choices, flag.several)
    if flag.kind is bool:
        return _Parser(flags.BooleanParser().parse, "true or false")
    if flag.kind not in (int, float):
        return _TEXT
    bounds = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
    if flag.kind is int:
        return _Parser(flags.IntegerParser(int(low), int(high)).parse, f"a whole number {bounds}")
    return _Parser(flags.FloatParser(low, high).parse, f"a number {bounds}")


def _places(
    words: Sequence[str], args: Sequence[str], command: Command, values: flags.FlagValues
) -> dict[str, str]:
    """The words without a dash, by the names of their places.

    Raises:
      UsageError: there are more of them than places.
    """
    places = [flag for flag in command.flags() if flag.place]
    if len(words) <= len(places):
        return {flag.name: word for flag, word in zip(places, words, strict=False)}
    prompted = not places and "prompt" in values
    remedy = "give a prompt with -p TEXT" if prompted else f"the call is kvrt {command.usage}"
    raise UsageError(
        f"unexpected argument {words[len(places)]!r}{_swallowed(args, values)}; {remedy}"
    )


def _swallowed(args: Sequence[str], values: flags.FlagValues) -> str:
    """Which flag was taken for the value of the one before it, for the middle of a line."""
    for word, value in itertools.pairwise(args):
        names = word.lstrip("-"), value.lstrip("-")
        if word.startswith("-") and value.startswith("-") and all(n in values for n in names):
            if not values[names[0]].boolean:
                return f" ({word} has taken {value} for its value)"
    return ""


def _check_needed(options: Options, command: Command) -> None:
    for flag in command.flags():
        if flag.needed and getattr(options, flag.name) is None:
            wanted = usage(flag).strip()
            raise UsageError(f"{wanted} is wanted: kvrt {command.usage}")


def _see(command: Command) -> str:
    return f"see kvrt {command.name} --help"
