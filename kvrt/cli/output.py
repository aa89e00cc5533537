"""Standard output and standard error, safe against those that are closed, full or gone.

Nothing heavy is imported: the help and every mistake in a flag pass through here.
"""

import contextlib
import logging
import os
import sys
import warnings

from kvrt.errors import KvrtError, reason

_STDOUT, _STDERR = 1, 2


class OutputError(KvrtError):
    """Standard output cannot be written."""


def write_text(text: str) -> None:
    """Writes to standard output at once, as UTF-8.

    Raises:
      OutputError: it cannot be written, but for a reader that has gone (BrokenPipeError).
    """
    if sys.stdout is None:
        raise OutputError("standard output is closed; open it, or send it to a file")
    try:
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_pending(_STDOUT)
        why = reason(error)
        raise OutputError(f"standard output: {why}; free space or write elsewhere") from error


def warn(message: str) -> None:
    """A warning, in one line on standard error."""
    _line(f"kvrt: warning: {message}")


def complain(message: str) -> None:
    """What ended the command, in one line on standard error."""
    _line(f"kvrt: {message}")


def note(text: str) -> None:
    """Writes to standard error, or nowhere if that is full or gone: the text matters more."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def drop_pending(*files: int) -> None:
    """Sends nowhere what Python still holds back for these files, 1 and 2 if none is named.

    It would be written once more at exit, fail once more, and change the exit code.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in files or (_STDOUT, _STDERR):
        os.dup2(nowhere, file)
    os.close(nowhere)


def own_process() -> None:
    """Makes standard error kvrt's alone, for a process that runs nothing else.

    JAX and XLA log there: what backend they miss, on what machine a program was compiled. What
    matters of it also comes as an exception. A Python warning becomes a line of kvrt's.
    """
    if sys.stderr is None:
        # Without one, `print` would send to standard output what is meant for it.
        sys.stderr = open(os.devnull, "w")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.getLogger("jax").setLevel(logging.CRITICAL)
    warnings.showwarning = lambda message, *where: warn(str(message))


def _line(text: str) -> None:
    note(" ".join(text.split()))
