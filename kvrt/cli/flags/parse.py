"""Parses the words of a command with absl, and prints its help. Nothing heavy is imported."""

import difflib
import math
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from kvrt.cli.commands import COMMANDS, RUN, Command
from kvrt.cli.flags import foreign
from kvrt.cli.flags.field import Flag, Options
from kvrt.errors import UsageError


def parse(args: Sequence[str], command: Command = RUN) -> Any:
    """Options from the words after `kvrt COMMAND`; None when help is asked for.

    Both `--flag=value` and `--flag value` are understood, one dash or two, and dashes inside a
    name for underscores. After `--` nothing is a flag.

    Raises:
      UsageError: an unknown flag, a value outside its range, or flags that contradict each other.
    """
    words = list(_Words(command).normalised(args))
    if "--help" in words:
        return None
    values = _definitions(command)
    try:
        values(["kvrt", *words])
        chosen: dict[str, Any] = {f.name: values[f.name].value for f in command.table()}
        chosen = {k: tuple(v) if isinstance(v, list) else v for k, v in chosen.items()}
        given = frozenset(name for name in chosen if values[name].present)
        options: Options = command.options(**chosen, given=given)
        _check_needed(options, command)
        options.check()
        options = options.settled()
    except (flags.Error, UsageError) as error:
        raise UsageError(f"{error}; {_see(command)}") from error
    return options


def help_text(width: int | None = None, command: Command = RUN) -> str:
    """The help, wrapped to the terminal or to `width` columns."""
    width = width or min(max(shutil.get_terminal_size().columns, 60), 100)
    lines = [f"usage: kvrt {command.usage}", "", *textwrap.wrap(command.about, width)]
    table = command.table()
    groups = list(dict.fromkeys(flag.info.group for flag in table))
    left = max(len(_usage(flag)) for flag in table) + 4
    group = ""
    for flag in sorted(table, key=lambda flag: groups.index(flag.info.group)):
        if flag.info.group != group:
            group = flag.info.group
            lines += ["", *textwrap.wrap(group, width)]
        text = textwrap.wrap(_help(flag), width - left)
        first = f"  {_usage(flag)}".ljust(left)
        lines += [first + text[0], *(" " * left + more for more in text[1:])]
    if command.examples:
        lines += ["", "Examples", *(f"  {example}" for example in command.examples)]
    return "\n".join(lines)


def _see(command: Command) -> str:
    return f"see kvrt {command.name} --help"


def _usage(flag: Flag) -> str:
    if flag.info.place:
        return flag.info.value
    short = f"-{flag.info.short}, " if flag.info.short else "    "
    if flag.kind is bool:
        return f"{short}--[no]{flag.name}"
    return f"{short}--{flag.name} {flag.info.value or '|'.join(flag.choices)}"


def _help(flag: Flag) -> str:
    words = f": {', '.join(flag.choices)}" if flag.choices and flag.info.value else ""
    return flag.info.help + words + _default(flag)


def _default(flag: Flag) -> str:
    if flag.default in (None, ()) or flag.default is False:
        return ""
    return f" (default {'on' if flag.default is True else flag.default})"


class _Words:
    """Each flag of a command as one word `--name=value`, so that no value is taken for a flag."""

    def __init__(self, command: Command):
        """Names, short names and aliases of a command's flags."""
        self._see, self._usage = _see(command), f"kvrt {command.usage}"
        self._swallowed = ""  # a flag that stands where the value of another one is wanted
        self._flags = [flag for flag in command.table() if not flag.info.place]
        self._places = [flag for flag in command.table() if flag.info.place]
        self._names = {
            name: flag.name
            for flag in self._flags
            for name in (flag.name, flag.info.short, *flag.info.aliases)
            if name
        }
        self._switches = {flag.name for flag in self._flags if flag.kind is bool}

    def normalised(self, args: Sequence[str]) -> Iterator[str]:
        """The words; ends with --help where that is asked for."""
        rest, places = iter(args), iter(self._places)
        for word in rest:
            if word == "--" and self._places:
                yield from (self._placed(more, places) for more in rest)
            elif not word.startswith("-") or not word.strip("-"):
                yield self._placed(word, places)
            elif word.lstrip("-") in ("help", "h"):
                yield "--help"
                return
            else:
                yield self._flag(word, rest)

    def _placed(self, word: str, places: Iterator[Flag]) -> str:
        flag = next(places, None)
        if flag is None:
            prompted = "prompt" in self._names.values() and not self._places
            remedy = "give a prompt with -p TEXT" if prompted else f"the call is {self._usage}"
            raise UsageError(
                f"unexpected argument {word!r}{self._swallowed}; {remedy}; {self._see}"
            )
        return f"--{flag.name}={word}"

    def _flag(self, word: str, rest: Iterator[str]) -> str:
        given, equals, value = word.partition("=")
        name = given.removeprefix("-").removeprefix("-").replace("-", "_")
        off = self._names.get(name.removeprefix("no").removeprefix("_"), "")
        known = self._names.get(name)
        if known in self._switches:
            return f"--{known}={value if equals else 'true'}"
        if known is None and name.startswith("no") and off in self._switches and not equals:
            return f"--{off}=false"
        if known is None:
            raise UsageError(f"unknown flag {given}{self._near(name)}; {self._see}")
        found = value if equals else next(rest, None)
        if found is None:
            raise UsageError(f"flag {word} needs a value; {self._see}")
        if not equals and found.startswith("-") and found.lstrip("-") in self._names:
            self._swallowed = f" ({given} has taken {found} for its value)"
        return f"--{known}={found}"

    def _near(self, name: str) -> str:
        """What may be meant by a flag that is none, for the middle of a line."""
        found = foreign.counterpart(name)
        if found is not None and found.flag in self._names:
            return self._counterpart(name)
        if name[:1] in self._names and name[1:].isdigit():
            return f" (did you mean -{name[0]} {name[1:]}?)"
        return _elsewhere(name) or self._counterpart(name) or self._close(name)

    def _counterpart(self, name: str) -> str:
        """What stands for a flag of another program, here or in other commands."""
        found = foreign.counterpart(name)
        if found is None:
            return ""
        if not found.flag:
            return f": kvrt has none; {found.remark}"
        where = "" if found.flag in self._names else _elsewhere(found.flag)
        remark = f", {found.remark}" if found.remark else ""
        return f": in kvrt it is --{found.flag}{where}{remark}"

    def _close(self, name: str) -> str:
        found = difflib.get_close_matches(name, [flag.name for flag in self._flags], n=1)
        return f" (did you mean --{found[0]}?)" if found else ""


def _elsewhere(name: str) -> str:
    """Which commands have a flag that this one lacks."""
    found = [
        command.name
        for command in COMMANDS
        if any(
            not f.info.place and name in (f.name, f.info.short, *f.info.aliases)
            for f in command.table()
        )
    ]
    return f" (one of kvrt {', '.join(found)})" if found else ""


def _check_needed(options: Options, command: Command) -> None:
    for flag in command.table():
        if flag.info.needed and getattr(options, flag.name) is None:
            raise UsageError(f"{_usage(flag).strip()} is wanted: kvrt {command.usage}")


def _definitions(command: Command) -> flags.FlagValues:
    values, plain = flags.FlagValues(), flags.ArgumentSerializer()
    for flag in command.table():
        many = flag.type == tuple[str, ...]
        define: Any = flags.DEFINE_multi if many else flags.DEFINE
        default = list(flag.default) if many else flag.default
        define(
            parser=_Parser(flag),
            serializer=plain,
            name=flag.name,
            default=default,
            help=flag.info.help,
            flag_values=values,
        )
    return values


class _Parser(flags.ArgumentParser):
    """Takes the text of a value to the flag's type and checks its range."""

    def __init__(self, flag: Flag):
        """For one flag."""
        super().__init__()
        self._flag = flag

    def parse(self, argument: Any) -> Any:
        """The value; raises ValueError that says what is wanted."""
        flag, info = self._flag, self._flag.info
        if flag.kind is bool:
            return self._known({"true": True, "false": False}, str(argument).lower())
        if flag.choices:
            known = {word: word for word in flag.choices}
            if info.several and "," in argument:
                return tuple(self._known(known, word) for word in argument.split(","))
            return self._known(known, argument)
        if flag.kind not in (int, float):
            return argument
        try:
            number = flag.kind(argument)
        except ValueError:
            number = math.nan
        if not (info.low <= number <= info.high and math.isfinite(number)):
            raise ValueError(f"{self._range()} is wanted")
        return number

    def _known(self, words: dict[str, Any], argument: str) -> Any:
        if argument not in words:
            near = foreign.nearest_value(argument, words)
            hint = f"; for {argument} take {near}" if near else ""
            raise ValueError(f"{' or '.join(words)} is wanted{hint}")
        return words[argument]

    def _range(self) -> str:
        info = self._flag.info
        noun = "a whole number" if self._flag.kind is int else "a number"
        if info.high == math.inf:
            return f"{noun} of at least {info.low}"
        return f"{noun} from {info.low} to {info.high}"
