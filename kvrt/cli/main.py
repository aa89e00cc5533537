"""The command `kvrt`: finds the subcommand, and turns mistakes into one line and an exit code."""

import sys
from collections.abc import Sequence

import kvrt
from kvrt.cli import flags, output
from kvrt.errors import KvrtError, UsageError

_HELP = """\
usage: kvrt COMMAND [flags]

A KV-cache runtime for decoder language models.

Commands
  run        continue a prompt with a model

Flags
  --help     this text; kvrt COMMAND --help for a command
  --version  the version

Example
  kvrt run -p "Once upon a time"
"""


def run() -> None:
    """Entry of the console script; exits with 0, 1, 2 or 130."""
    output.own_process()
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
    command, rest = (args[0], args[1:]) if args else ("", ())
    if command in ("--help", "-h", "-help"):
        return _show(_HELP)
    if command == "--version":
        return _show(f"kvrt {kvrt.version()}\n")
    if command != "run":
        found = f"unknown command {command!r}" if command else "no command given"
        raise UsageError(f"{found}; the commands are: run; see kvrt --help")
    options = flags.parse(rest)
    if options is None:
        return _show(flags.help_text() + "\n")
    # A mistake in a file is told before JAX is loaded, which takes a second.
    from kvrt.cli import prompt

    given = prompt.read(options)
    from kvrt.cli import run as command_run

    return command_run.execute(options, given)


def _show(text: str) -> int:
    output.write_text(text)
    return 0
