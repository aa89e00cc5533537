"""A bar on a terminal's standard error, with the time that is left."""

import contextlib
from collections.abc import Callable, Iterator

from rich import progress
from rich.console import Console


@contextlib.contextmanager
def bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar while the body runs; what is yielded takes how many more are done."""
    columns = (
        progress.TextColumn(name),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(name, total=total)
        yield lambda n: shown.advance(task, n)
