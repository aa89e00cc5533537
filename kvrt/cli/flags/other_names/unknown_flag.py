"""What may be meant by a flag that is none: another command's, another program's, or nearly it."""

import difflib

from absl import flags

from kvrt.cli.commands import COMMANDS, Command
from kvrt.cli.flags.other_names import other_programs


def said(error: flags.UnrecognizedFlagError, command: Command) -> str:
    """That there is no such flag, and which one may be meant."""
    word = error.flagvalue.partition("=")[0]
    name = word.lstrip("-").replace("-", "_")
    own = {n for flag in command.given_by_name().values() for n in flag.names}
    found = other_programs.counterpart(name)
    if found is not None and found.flag in own:
        near = _counterpart(name, own)
    elif name[:1] in own and name[1:].isdigit():
        near = f" (did you mean -{name[0]} {name[1:]}?)"
    else:
        near = _elsewhere(name) or _counterpart(name, own) or _nearly(name, command)
    return f"unknown flag {word}{near}"


def _counterpart(name: str, own: set[str]) -> str:
    """What stands for a flag of another program, here or in other commands."""
    found = other_programs.counterpart(name)
    if found is None:
        return ""
    if not found.flag:
        return f": kvrt has none; {found.remark}"
    where = "" if found.flag in own else _elsewhere(found.flag)
    remark = f", {found.remark}" if found.remark else ""
    return f": in kvrt it is --{found.flag}{where}{remark}"


def _nearly(name: str, command: Command) -> str:
    """The flag whose name is nearly this one; absl names aliases and too many of them."""
    found = difflib.get_close_matches(name, list(command.given_by_name()), n=1)
    return f" (did you mean --{found[0]}?)" if found else ""


def _elsewhere(name: str) -> str:
    """Which commands have a flag that this one lacks."""
    found = [
        command.name
        for command in COMMANDS
        if any(name in flag.names for flag in command.given_by_name().values())
    ]
    return f" (one of kvrt {', '.join(found)})" if found else ""
