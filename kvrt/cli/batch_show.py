"""What `kvrt batch` shows on standard error: a bar while it works, a summary at the end."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator

from kvrt.cli.words import tokens


@dataclasses.dataclass
class Counts:
    """What was done.

    Attributes:
      n_done: requests that ended.
      n_failed: those of them with an error.
      n_long: requests that may reach beyond what the model was trained for.
      n_drawn: tokens drawn.
      n_prompt: tokens of prompts that ended, once for each sample.
      n_cached: tokens of them that were found in the cache.
      n_compiles: programs compiled.
      compile_s: time that took.
      seconds: time of all steps, without compiling.
    """

    n_done: int = 0
    n_failed: int = 0
    n_long: int = 0
    n_drawn: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_compiles: int = 0
    compile_s: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> str:
        """Tokens drawn a second, where that can be told."""
        return f"{self.n_drawn / self.seconds:,.1f} tokens/s" if self.seconds > 0 else ""

    @property
    def hits(self) -> str:
        """The share of prompts that was found."""
        return f"{100 * self.n_cached / self.n_prompt:.1f} %" if self.n_prompt else "0 %"


Show = Callable[[Counts, float | None], None]


@contextlib.contextmanager
def bar(n_requests: int, wanted: bool) -> Iterator[Show]:
    """A bar on a terminal, nothing otherwise; takes counts and how full the cache is."""
    if not (wanted and sys.stderr.isatty()):
        yield lambda counts, usage: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("requests"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[said]}"),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=n_requests, said="")

        def show(counts: Counts, usage: float | None) -> None:
            full = "" if usage is None else f"cache {100 * usage:.0f} %"
            said = [counts.rate, full, f"hits {counts.hits}"]
            bars.update(task, completed=counts.n_done, said=", ".join(filter(None, said)))

        yield show


def summary(
    counts: Counts, *, n_bad: int, n_before: int, n_left: int, usage: float | None
) -> list[str]:
    """The lines that end a batch.

    Args:
      counts: what was done.
      n_bad: lines that were no requests.
      n_before: requests whose results were there.
      n_left: requests that are to be done still.
      usage: the greatest part of the cache that was in use; None if nobody knows.
    """
    before = f", {n_before:,} were there already" if n_before else ""
    failed = f", {counts.n_failed:,} of them failed" if counts.n_failed else ""
    if n_bad:
        failed += f", {n_bad:,} {'line was' if n_bad == 1 else 'lines were'} no request"
    left = f"; {n_left:,} are left, the same command goes on" if n_left else ""
    full = "" if usage is None else f"{100 * usage:.0f} % in use at most, "
    lines = [
        f"requests   {counts.n_done:,} done{failed}{before}{left}",
        f"generated  {counts.n_drawn:,} {tokens(counts.n_drawn)} in {counts.seconds:.2f} s"
        + (f", {counts.rate}" if counts.rate else ""),
        f"cache      {full}{counts.n_cached:,} of {counts.n_prompt:,} tokens of prompts found, "
        f"{counts.hits}",
        f"compiled   {counts.n_compiles} programs in {counts.compile_s:.2f} s, not counted above",
    ]
    if counts.n_long:
        long = f"{counts.n_long:,} requests may reach beyond what the model was trained for"
        lines.append(f"length     {long}, and text beyond it suffers")
    return lines
