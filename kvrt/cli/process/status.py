"""A line on a terminal that says what is being waited for, and is gone afterwards."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from kvrt.cli.flags.evaluate import ModelFlags
from kvrt.cli.process import output
from kvrt.options.option import Options

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
    with Live(spinner, console=output.console(), refresh_per_second=12.5, transient=True):
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
    with progress.Progress(*columns, console=output.console(), transient=True) as bars:
        task = bars.add_task("", total=n, said=said)
        yield lambda done, said: bars.update(task, completed=done, said=said)


def loads(options: Options) -> bool:
    """Whether a command is to load JAX, which takes seconds, and may say so."""
    return isinstance(options, ModelFlags) and "quiet" not in options.given
