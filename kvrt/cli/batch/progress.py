"""What `kvrt batch` shows on standard error: a bar or lines while it works, then a summary."""

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator

from kvrt.cli.process import output, status
from kvrt.cli.report.phrases import compiled, nan_scores, token_noun
from kvrt.options.size import show_size
from kvrt.serving.metrics import EngineStats

_BAR_S = 0.1  # between two updates of a bar


@dataclasses.dataclass
class BatchCounts:
    """What was done.

    Attributes:
      n_done: requests that ended.
      n_failed: those of them with an error.
      n_long: requests that may reach beyond what the model was trained for.
      n_sampled: tokens sampled.
      n_compiles: programs compiled.
      n_from_disk: those of them that were kept on the disk.
      compile_s: time that took.
      seconds: time of all steps, without compiling.
      approximate: requests whose answers are not those of the whole text, by reason.
      usage: the greatest part of the cache that was in use.
    """

    n_done: int = 0
    n_failed: int = 0
    n_long: int = 0
    n_sampled: int = 0
    n_compiles: int = 0
    n_from_disk: int = 0
    compile_s: float = 0.0
    seconds: float = 0.0
    usage: float = 0.0
    approximate: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def rate(self) -> str:
        """Tokens sampled a second, where it is known."""
        return f"{self.n_sampled / self.seconds:,.1f} tokens/s" if self.seconds > 0 else ""


Show = Callable[[BatchCounts, Callable[[], EngineStats]], None]


@contextlib.contextmanager
def progress_of(n_requests: int, *, to_stdout: bool) -> Iterator[Show]:
    """A bar on a terminal, else a line every 15 seconds.

    Args:
      n_requests: that are to be done.
      to_stdout: results go to standard output; on one terminal with a bar they would tear it.

    Yields:
      A function to call after each step, with the counts and what gives the engine's stats.
    """
    if sys.stderr.isatty():
        if to_stdout:
            yield lambda counts, stats: None
        else:
            with _bar(n_requests) as show:
                yield show
        return
    clock = status.Every(status.LINE_S)

    def line(counts: BatchCounts, stats: Callable[[], EngineStats]) -> None:
        if clock.due():
            done = f"{counts.n_done:,} of {n_requests:,} done, {counts.n_sampled:,} tokens"
            output.note(f"requests   {done}, {_state(counts, stats())}")

    yield line


def _state(counts: BatchCounts, stats: EngineStats) -> str:
    """Speed, how full the cache is, and the share of prompt tokens that were prefix hits."""
    usage = max(stats.usage, default=0.0)
    said = counts.rate, f"cache {100 * usage:.0f} %", f"hits {_hits(stats)}"
    return ", ".join(filter(None, said))


def _hits(stats: EngineStats) -> str:
    return f"{100 * stats.hit_rate:.1f} %"


@contextlib.contextmanager
def _bar(n_requests: int) -> Iterator[Show]:
    from rich import progress

    columns = (
        progress.TextColumn("requests"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[said]}"),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=output.console(), transient=True) as bars:
        task = bars.add_task("", total=n_requests, said="compiling the first step")
        clock = status.Every(_BAR_S)

        def show(counts: BatchCounts, stats: Callable[[], EngineStats]) -> None:
            if clock.due():
                bars.update(task, completed=counts.n_done, said=_state(counts, stats()))

        yield show


def batch_summary(
    counts: BatchCounts, stats: EngineStats, *, n_bad: int, n_before: int, n_left: int
) -> list[str]:
    """The lines that end a batch.

    Args:
      counts: what was done.
      stats: of the engine.
      n_bad: lines that were no requests.
      n_before: requests whose results were there.
      n_left: requests that are to be done still.
    """
    failed = f", {counts.n_failed:,} of them failed" if counts.n_failed else ""
    if n_bad:
        failed += f", {n_bad:,} {'line was' if n_bad == 1 else 'lines were'} no request"
    before = f", {n_before:,} were there already" if n_before else ""
    left = f"; {n_left:,} are left, the same command resumes" if n_left else ""
    n, rate = counts.n_sampled, f", {counts.rate}" if counts.rate else ""
    lines = [
        f"requests   {counts.n_done:,} done{failed}{before}{left}",
        f"generated  {n:,} {token_noun(n)} in {counts.seconds:.2f} s{rate}",
        compiled(counts.n_compiles, counts.compile_s, counts.n_from_disk),
        *([f"attention  {stats.attention}"] if stats.attention else []),
        f"cache      {stats.prefix['hit']:,} of {stats.prefix['asked']:,} prompt tokens were "
        f"prefix hits, {_hits(stats)}; {100 * counts.usage:.0f} % in use at most",
        *_upkeep(stats),
    ]
    if counts.approximate:
        why = ", ".join(f"{n:,} by {by}" for by, n in counts.approximate.most_common())
        lines.append(f"exactness  answers that are not of the whole text: {why}")
    if counts.n_long:
        long = f"{counts.n_long:,} requests may reach beyond what the model was trained for"
        lines.append(f"length     {long}, and text beyond it suffers")
    return lines


def from_sessions(stats: EngineStats, folder: str) -> str:
    """The line that says what requests began from a folder of sessions."""
    n, asked = stats.prefix["session"], stats.prefix["asked"]
    return f"sessions   {n:,} of {asked:,} prompt tokens were loaded from those in {folder}"


def _upkeep(stats: EngineStats) -> Iterator[str]:
    """What policies have dropped and what shortage has cost, where there was any."""
    if n := stats.drops.get("tokens", 0):
        yield f"dropped    {n:,} {token_noun(n)} by policies, beyond the context of their requests"
    if stats.n_nan_scores:
        yield f"policy     {nan_scores(stats.n_nan_scores)}"
    lost = stats.sequences
    n_evicted = sum(pool.n_evicted for pool in stats.pools)
    if lost["preempted"] or n_evicted:
        offloaded = f" ({lost['offloaded']:,} to a tier)" if lost["offloaded"] else ""
        yield (
            f"shortage   {lost['preempted']:,} sequences were preempted{offloaded}, "
            f"{n_evicted:,} cached blocks were evicted"
        )
    for name, tier in stats.tiers.items():
        events = ", ".join(f"{n:,} {event}" for event, n in tier.counts.items() if n)
        yield f"{name:<10} {show_size(tier.n_bytes)}{events and ', '}{events}"
