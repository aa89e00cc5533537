"""The command `kvrt`: finds the subcommand, and turns mistakes into one line and an exit code."""

import importlib
import sys
from collections.abc import Sequence

import kvrt
from kvrt.cli import accelerators, flags, output, status
from kvrt.cli.commands import COMMANDS
from kvrt.cli.options import PromptFlags
from kvrt.errors import KvrtError, UsageError

_HELP = """\
usage: kvrt COMMAND [flags]

A KV-cache runtime for decoder language models.

Commands
{commands}

Flags
  --help     this text; kvrt COMMAND --help for a command
  --version  the version

Example
  kvrt run -p "Once upon a time"
"""


def run() -> None:
    """Entry of the console script; exits with 0, 1, 2 or 130."""
    output.own_process()
    accelerators.leave_out_libtpu()
    sys.exit(main(sys.argv[1:]))


def main(args: Sequence[str]) -> int:
    """Runs the command and returns its exit code; says in one line what is wrong."""
    try:
        return _dispatch(args)
    except KvrtError as error:
        output.complain(str(error))
        return error.exit_code
    except BrokenPipeError:
        # The reader has gone, which `kvrt run | head` means to happen: nothing to say.
        output.drop_pending()
        return 1
    except KeyboardInterrupt:
        return 130


def _dispatch(args: Sequence[str]) -> int:
    word, rest = (args[0], args[1:]) if args else ("", ())
    if word in ("--help", "-h", "-help"):
        lines = [f"  {c.name:<10} {c.brief}" for c in COMMANDS]
        return _show(_HELP.format(commands="\n".join(lines)))
    if word == "--version":
        return _show(f"kvrt {kvrt.version()}\n")
    command = next((c for c in COMMANDS if c.name == word), None)
    if command is None:
        found = f"unknown command {word!r}" if word else "no command given"
        names = ", ".join(c.name for c in COMMANDS)
        raise UsageError(f"{found}; the commands are: {names}; see kvrt --help")
    options = flags.parse(rest, command)
    if options is None:
        return _show(flags.help_text(command=command) + "\n")
    given = ()
    if isinstance(options, PromptFlags):
        # A mistake in a file is told before JAX is loaded, which takes a second.
        from kvrt.cli import prompt

        given = (prompt.read(options),)
    with status.waiting("starting JAX", status.loads(options)):
        module = importlib.import_module(f"kvrt.cli.{command.module}")
    return module.execute(options, *given)


def _show(text: str) -> int:
    output.write_text(text)
    return 0
