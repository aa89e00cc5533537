"""Parses the flags of `kvrt run` with absl, and prints their help. Nothing heavy is imported."""

import difflib
import math
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from kvrt.cli.options import Flag, RunOptions, table
from kvrt.errors import UsageError

HELP = "see kvrt run --help"
_ABOUT = "Continues a prompt. Standard output is the text and nothing else."


def parse(args: Sequence[str]) -> RunOptions | None:
    """Options from the words after `kvrt run`; None when help is asked for.

    Both `--flag=value` and `--flag value` are understood, one dash or two, and dashes inside a
    name for underscores.

    Raises:
      UsageError: an unknown flag, a value outside its range, or flags that contradict each other.
    """
    words = list(_normalise(args))
    if "--help" in words:
        return None
    values = _definitions()
    try:
        values(["kvrt", *words])
    except flags.Error as error:
        raise UsageError(f"{error}; {HELP}") from error
    chosen: dict[str, Any] = {flag.name: values[flag.name].value for flag in table()}
    options = RunOptions(**{**chosen, "stop": tuple(chosen["stop"])})
    _check(options)
    return options


def help_text(width: int | None = None) -> str:
    """The help, wrapped to the terminal or to `width` columns."""
    width = width or min(max(shutil.get_terminal_size().columns, 60), 100)
    lines = ["usage: kvrt run [flags]", "", *textwrap.wrap(_ABOUT, width)]
    left = max(len(_usage(flag)) for flag in table()) + 4
    group = ""
    for flag in table():
        if flag.info.group != group:
            group = flag.info.group
            lines += ["", group]
        text = textwrap.wrap(flag.info.help + _default(flag), width - left)
        first = f"  {_usage(flag)}".ljust(left)
        lines += [first + text[0], *(" " * left + more for more in text[1:])]
    return "\n".join(lines)


def _usage(flag: Flag) -> str:
    short = f"-{flag.info.short}, " if flag.info.short else "    "
    if flag.type is bool:
        return f"{short}--[no]{flag.name}"
    return f"{short}--{flag.name} {flag.info.value or '|'.join(flag.choices)}"


def _default(flag: Flag) -> str:
    if flag.default in (None, ()) or flag.default is False:
        return ""
    return f" (default {'on' if flag.default is True else flag.default})"


def _normalise(args: Sequence[str]) -> Iterator[str]:
    """Each flag as one word `--name=value`, so that no value can be taken for a flag."""
    names = {flag.name: flag.name for flag in table()}
    names |= {flag.info.short: flag.name for flag in table() if flag.info.short}
    switches = {flag.name for flag in table() if flag.type is bool}
    rest = iter(args)
    for word in rest:
        name, equals, value = word.partition("=")
        if not name.startswith("-") or not name.strip("-"):
            raise UsageError(f"unexpected argument {word!r}; give a prompt with -p TEXT, {HELP}")
        name = name.removeprefix("-").removeprefix("-").replace("-", "_")
        off = name.removeprefix("no").removeprefix("_")
        if name in ("help", "h"):
            yield "--help"
            return
        if name in switches:
            yield f"--{name}={value if equals else 'true'}"
        elif name.startswith("no") and off in switches and not equals:
            yield f"--{off}=false"
        elif name in names:
            value = value if equals else next(rest, None)
            if value is None:
                raise UsageError(f"flag {word} needs a value; {HELP}")
            yield f"--{names[name]}={value}"
        else:
            raise UsageError(f"unknown flag {word.partition('=')[0]}{_close(name)}; {HELP}")


def _close(name: str) -> str:
    found = difflib.get_close_matches(name, [flag.name for flag in table()], n=1)
    return f" (did you mean --{found[0]}?)" if found else ""


def _definitions() -> flags.FlagValues:
    values, plain = flags.FlagValues(), flags.ArgumentSerializer()
    for flag in table():
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
        if flag.type is bool:
            return self._known({"true": True, "false": False}, str(argument).lower())
        if flag.choices:
            return self._known({word: word for word in flag.choices}, argument)
        if flag.type not in (int, float):
            return argument
        try:
            number = flag.type(argument)
        except ValueError:
            number = math.nan
        if not (info.low <= number <= info.high and math.isfinite(number)):
            raise ValueError(f"{self._range()} is wanted")
        return number

    def _known(self, words: dict[str, Any], argument: str) -> Any:
        if argument not in words:
            raise ValueError(f"{' or '.join(words)} is wanted")
        return words[argument]

    def _range(self) -> str:
        info = self._flag.info
        noun = "a whole number" if self._flag.type is int else "a number"
        if info.high == math.inf:
            return f"{noun} of at least {info.low}"
        return f"{noun} from {info.low} to {info.high}"


def _check(options: RunOptions) -> None:
    given = {"-p": options.prompt, "-f": options.file, "--tokens": options.tokens}
    found = [name for name, value in given.items() if value is not None]
    if len(found) != 1:
        raise UsageError(
            "the prompt is wanted once, as -p TEXT, -f FILE or --tokens FILE; found "
            f"{' and '.join(found) or 'none'}; {HELP}"
        )
    if options.chat and options.tokens is not None:
        raise UsageError(f"--chat needs text, --tokens gives ids; use -p or -f, {HELP}")
    if "" in options.stop:
        raise UsageError(f"flag --stop= is empty; give at least one character, {HELP}")
    if options.logprobs and not options.json:
        raise UsageError(f"--logprobs {options.logprobs} has no place in the text; add --json")
