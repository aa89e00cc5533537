"""What all scripts do with their command line: flags alone, and mistakes in one line."""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from absl import app, flags
from rich import progress
from rich.console import Console

from kvrt.errors import KvrtError
from scripts._lib import measure


def run(main: Callable[[], int | None]) -> None:
    """Runs a script, and shows what it emitted as tables on standard error.

    Its exit code is what `main` gives, or that of an error of kvrt.
    """

    def checked(argv: Sequence[str]) -> int:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments: {argv[1:]}")
        try:
            code = main()
        except KvrtError as error:
            print(f"{Path(argv[0]).stem}: {error}", file=sys.stderr)
            return error.exit_code
        console = Console(stderr=True)
        for table in measure.tables(measure.emitted) if len(measure.emitted) > 1 else ():
            console.print(table, width=max(console.width, 160))
        return code or 0

    app.run(checked)


def check_names(flag: flags.FlagHolder[list[str]], known: Collection[str]) -> None:
    """Refuses names of a list that do not exist, and no name where some are the default.

    Raises:
      app.UsageError: as said.
    """
    unknown = sorted(set(flag.value) - set(known))
    if unknown or (flag.default and not flag.value):
        named = ",".join(unknown) or "nothing"
        raise app.UsageError(f"--{flag.name}={named}; of {', '.join(known)}")


@contextlib.contextmanager
def bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a bar on standard error while the body runs; what it yields moves the bar on."""
    columns = (
        progress.TextColumn(name),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(name, total=total)
        yield lambda n: shown.advance(task, n)
