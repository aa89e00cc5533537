"""The command `kvrt`: finds the subcommand, and turns mistakes into one line and an exit code."""

import difflib
import importlib
import os
import sys
import textwrap
from collections.abc import Sequence

import kvrt
from kvrt.cli.commands import COMMANDS
from kvrt.cli.flags import other_names, parse
from kvrt.cli.flags.evaluate import ModelFlags, PromptFlags
from kvrt.cli.flags.parse import fields_text, help_text
from kvrt.cli.flags.serving import AnyModelFlags
from kvrt.cli.flags.session_files import NamedModel
from kvrt.cli.flags.topics import TOPICS
from kvrt.cli.process import accelerators, output
from kvrt.cli.process.interrupt import Ended, Unwinding
from kvrt.errors import KvrtError, UsageError
from kvrt.files.named import check_named
from kvrt.options.option import Options

_FIELDS = "fields"  # the topic that is made of the options
_SIGNALS = 128  # exit codes above it are those of signals
_HELP = """\
usage: kvrt COMMAND [flags]

A KV-cache runtime for decoder language models.

Commands
{commands}

Flags
  --help     this text; kvrt COMMAND --help for a command, --help_all for all its flags
  --version  the version

Topics of kvrt help TOPIC
{topics}

Example
  kvrt run -p "Once upon a time"
"""


def run() -> None:
    """Runs the command of this process; exits with 0, 1, 2, or 128 and a signal's number."""
    output.own_process()
    accelerators.leave_out_libtpu()
    code = main(sys.argv[1:])
    if code > _SIGNALS:
        # What is to be kept is saved. Python would wait for programs that are being compiled, and
        # native threads that JAX was just starting crash an interpreter that ends under them.
        os._exit(code)
    sys.exit(code)


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
    except Ended as ended:
        output.complain(str(ended))
        return ended.exit_code


def _dispatch(args: Sequence[str]) -> int:
    word, rest = (args[0], args[1:]) if args else ("--help", ())
    if word in ("--help", "-h", "-help"):
        return _show(_help())
    if word == "help":
        return _show(_help_on(rest))
    if word in ("--version", "-version", "-V"):
        return _show(f"kvrt {kvrt.version()}\n")
    command = next((c for c in COMMANDS if c.name == word), None)
    if command is None:
        raise _unknown_command(word)
    try:
        options = parse.parse_flags(rest, command)
    except parse.HelpWanted as wanted:
        return _show(help_text(command=command, everything=wanted.everything) + "\n")
    # A mistake in a name or a file is reported before JAX is loaded, which takes seconds.
    if isinstance(options, ModelFlags | AnyModelFlags | NamedModel) and options.model is not None:
        from kvrt_models import hub

        hub.named(options.model)
    check_named(options.files())
    given = ()
    if isinstance(options, PromptFlags):
        from kvrt.cli.run import prompt

        given = (prompt.read_prompt(options),)
    with output.waiting("starting JAX", _loads(options)):
        module, _, function = command.does.partition(":")
        execute = getattr(importlib.import_module(module), function)
    with Unwinding():
        return execute(options, *given)


def _help() -> str:
    lines = [f"  {c.name:<10} {c.brief}" for c in COMMANDS]
    topics = ", ".join((*TOPICS, _FIELDS))
    wrapped = textwrap.wrap(topics, 74, initial_indent="  ", subsequent_indent="  ")
    return _HELP.format(commands="\n".join(lines), topics="\n".join(wrapped))


def _help_on(words: Sequence[str]) -> str:
    """What `kvrt help` says of a command or a topic, or of all without one."""
    if not words:
        return _help()
    name = "_".join(words).lstrip("-").replace("-", "_")
    command = next((c for c in COMMANDS if c.name == name), None)
    if command is not None:
        return help_text(command=command) + "\n"
    if name == _FIELDS:
        return fields_text()
    if name not in TOPICS:
        topics = (*TOPICS, _FIELDS)
        near = _close(name, [*topics, *(c.name for c in COMMANDS)])
        raise UsageError(
            f"no help on {' '.join(words)!r}{near}; the topics are: {', '.join(topics)}; and every "
            "command"
        )
    return TOPICS[name]


def _unknown_command(word: str) -> UsageError:
    names = [c.name for c in COMMANDS]
    near = _close(word, ("--help", "--version"))
    if word.startswith("-") and not near:
        found = f"the command comes first, before {word}"
    else:
        meant = other_names.command(word)
        near = near or (f": {meant}" if meant else _close(word.lower(), names))
        found = f"unknown command {word!r}{near}"
    return UsageError(f"{found}; the commands are: {', '.join(names)}; see kvrt --help")


def _close(word: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(word, names, n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def _show(text: str) -> int:
    output.write_text(text)
    return 0


def _loads(options: Options) -> bool:
    """Whether a command is to load JAX, which takes seconds, and may say so."""
    return isinstance(options, ModelFlags) and "quiet" not in options.given
