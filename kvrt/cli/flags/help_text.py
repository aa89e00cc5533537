"""The help of a command: its flags by their groups, wrapped to the terminal.

There are two: of the flags that most need, and of all.
"""

import shutil
import textwrap

from kvrt.cli.commands import COMMANDS, RUN, Command
from kvrt.options.option import Flag

_MIN_WIDTH, _MAX_WIDTH = 60, 100
# Groups by their first words; others stand behind them.
_ORDER = "Prompt Files Session Model Context Length Sampling Cache Serving Scheduling".split()


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
