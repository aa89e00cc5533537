"""Standard output and standard error, safe against those that are closed, full or gone.

Names and messages may come from a file that somebody made: nothing of them reaches a terminal as a
control character, here for all commands. Nothing heavy is imported: the help and every mistake in
a flag pass through here.
"""

import contextlib
import logging
import os
import sys
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

from kvrt.errors import KvrtError, reason

if TYPE_CHECKING:
    from rich.console import Console

_STDOUT, _STDERR = 1, 2


class OutputError(KvrtError):
    """Standard output cannot be written."""


def write_text(text: str) -> None:
    """Writes what a command says to standard output at once, as UTF-8, made `printable`.

    Raises:
      OutputError: it cannot be written, but for a reader that has gone (BrokenPipeError).
    """
    _write(printable(text, but="\n\t"))


def write_generated(text: str) -> None:
    """Writes a model's text to standard output at once, as UTF-8.

    On a terminal its control characters but newlines and tabs are shown as escapes, for a model may
    write what moves the cursor or sets the clipboard; a pipe or a file gets them as they are.

    Raises:
      KvrtError: as in `write_text`.
    """
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    _write(without_controls(text) if on_terminal else text)


def printable(text: str, but: str = "") -> str:
    """The text with escapes in place of what cannot be seen, but for the characters `but`.

    These are control characters, marks of direction, separators other than the space, and halves
    of characters, which a name of a file may have.
    """
    return "".join(c if c.isprintable() or c in but else _escaped(c) for c in text)


def without_controls(text: str) -> str:
    """The text with escapes in place of control characters but newlines and tabs."""
    return "".join(_escaped(c) if _is_control(c) else c for c in text)


def _is_control(character: str) -> bool:
    return unicodedata.category(character) == "Cc" and character not in "\n\t"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _write(text: str) -> None:
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
    """Writes to standard error, made `printable`; nowhere if that is full or gone."""
    with contextlib.suppress(OSError):
        print(printable(text, but="\n\t"), file=sys.stderr, flush=True)


def console(**options: Any) -> "Console":
    """Standard error for what is shown on a terminal; one that is closed meanwhile takes nothing.

    Args:
      options: of `rich.console.Console`.
    """
    from rich.console import Console

    return Console(file=cast(TextIO, _Lasting(sys.stderr)), **options)


class _Lasting:
    """A text file that ignores failed writes: after SIGHUP there is a session to save."""

    def __init__(self, file: Any):
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


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


Say = Callable[[str], None]
Show = Callable[[int, str], None]
LINE_S = 15.0  # between two lines of progress where there is no terminal


class Every:
    """A clock that is due once in so many seconds."""

    def __init__(self, seconds: float):
        """Starts the clock."""
        self._seconds, self._last = seconds, time.monotonic()

    def due(self) -> bool:
        """True if so many seconds have passed since it was made, or was due last."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True


@contextlib.contextmanager
def waiting(what: str, wanted: bool) -> Iterator[Say]:
    """Shows `what` on standard error while the block runs, nothing if that is no terminal.

    Gives the function that shows something else in its place.
    """
    if not (wanted and sys.stderr.isatty()):
        yield lambda text: None
        return
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    # Shown at once, where rich's own `status` waits for its thread: a short wait is named as well.
    spinner = Spinner("dots", Text(what), style="status.spinner")
    with Live(spinner, console=console(), refresh_per_second=12.5, transient=True):
        yield lambda text: spinner.update(text=Text(text))


@contextlib.contextmanager
def bar(what: str, n: int, said: str = "", *, left: bool = False) -> Iterator[Show]:
    """A bar on standard error; the function that it gives takes how many are done, and a text.

    Args:
      what: is counted.
      n: how many there are.
      said: the text before the first is done.
      left: the time left is shown, in place of the time since.
    """
    from rich import progress

    since = progress.TimeElapsedColumn()
    columns = (
        progress.TextColumn(what),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[said]}"),
        *((progress.TimeRemainingColumn(), progress.TextColumn("left")) if left else (since,)),
    )
    with progress.Progress(*columns, console=console(), transient=True) as bars:
        task = bars.add_task("", total=n, said=said)
        yield lambda done, said: bars.update(task, completed=done, said=said)
