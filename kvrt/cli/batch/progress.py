"""What `kvrt batch` shows on standard error: a bar or lines while it works, then a summary."""

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvrt.cli.process import output
from kvrt.cli.report import tables
from kvrt.cli.report.phrases import compiled, counted, nan_scores
from kvrt.cli.setup.model import OF_OLDER, weight_type
from kvrt.errors import KvrtError
from kvrt.options.size import show_size
from kvrt.serving.metrics import EngineStats
from kvrt.session import fingerprint, io
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.library.library import Library
from kvrt.session.library.stored import Entry, is_as_added

_BAR_S = 0.1  # between two updates of a bar
_WEIGHTS, _TYPE = "model.weights", f"model.{fingerprint.WEIGHT_TYPE}"
_CACHE = {"type_k": "--cache_type_k", "type_v": "--cache_type_v"}
_SHOWN = 2


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
    is_terminal = sys.stderr.isatty()
    if is_terminal and to_stdout:
        yield lambda counts, stats: None
        return
    clock = output.Every(_BAR_S if is_terminal else output.LINE_S)

    def line(n_done: int, state: str) -> None:
        output.note(f"requests   {n_done:,} of {n_requests:,} done, {state}")

    def show(counts: BatchCounts, stats: Callable[[], EngineStats]) -> None:
        if clock.due():
            sampled = "" if is_terminal else f"{counts.n_sampled:,} tokens, "
            say(counts.n_done, sampled + _state(counts, stats()))

    bar = output.bar("requests", n_requests, "compiling the first step")
    with bar if is_terminal else contextlib.nullcontext(line) as say:
        yield show


def _state(counts: BatchCounts, stats: EngineStats) -> str:
    """Speed, how full the cache is, and the share of prompt tokens that were prefix hits."""
    usage = max(stats.usage, default=0.0)
    said = counts.rate, f"cache {100 * usage:.0f} %", f"hits {_hits(stats)}"
    return ", ".join(filter(None, said))


def _hits(stats: EngineStats) -> str:
    return f"{100 * stats.hit_rate:.1f} %"


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
        f"generated  {counted(n, 'token')} in {counts.seconds:.2f} s{rate}",
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


def _upkeep(stats: EngineStats) -> Iterator[str]:
    """What policies have dropped and what shortage has cost, where there was any."""
    if n := stats.drops.get("tokens", 0):
        yield f"dropped    {counted(n, 'token')} by policies, beyond the context of their requests"
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


def session_lines(stats: EngineStats, folder: Path, here: Fingerprint) -> Iterator[str]:
    """What requests began from a folder of sessions, and which of its sessions were passed over.

    Of these there is a line where some are of this model. Weights of another type have another
    digest, which does not say whether they are this model's.

    Args:
      stats: of the engine.
      folder: with an index.
      here: the fingerprint of the engine.
    """
    n, asked = stats.prefix["session"], stats.prefix["asked"]
    yield f"sessions   {n:,} of {asked:,} prompt tokens were loaded from those in {folder}"
    found: Counter[str] = Counter()
    flags: dict[str, str | None] = {fingerprint.digest(here): None}
    # Sessions with one digest have one fingerprint, so few are opened.
    for entry in _entries(folder):
        if entry.fingerprint not in flags and is_as_added(entry):
            flags[entry.fingerprint] = _flags(entry.path, here)
        if flag := flags.get(entry.fingerprint):
            found[flag] += 1
    if not found:
        return
    shown = "; ".join(f"{n:,} with {flag}" for flag, n in found.most_common(_SHOWN))
    more = f"; {len(found) - _SHOWN:,} more settings" if len(found) > _SHOWN else ""
    n = found.total()
    were = "session there was" if n == 1 else "sessions there were"
    yield f"{'':11}{n:,} {were} passed over; of this model they serve {shown}{more}"


def _entries(folder: Path) -> tuple[Entry, ...]:
    """Entries of the index; none if it was damaged since the engine began, for all are served."""
    try:
        return Library(folder).entries()
    except KvrtError:
        return ()


def _flags(path: Path, here: Fingerprint) -> str | None:
    """Flags with which a session would serve; None where no flags would do, or it is damaged."""
    try:
        said = io.open_session(path, is_use=False).manifest.fingerprint
        weights = weight_type(path, said) or OF_OLDER
    except (OSError, KvrtError):
        return None
    other = fingerprint.differences(said, here)
    if not set(other) <= {_WEIGHTS, _TYPE, *_CACHE, "hadamard"}:
        return None
    wanted = []
    if _WEIGHTS in other:
        if weights == here["model"].get(fingerprint.WEIGHT_TYPE):
            return None  # of another model
        wanted.append(f"--dtype {weights}")
    wanted += [f"{flag} {_listed(said[name])}" for name, flag in _CACHE.items() if name in other]
    if "hadamard" in other:
        wanted.append("--hadamard" if said["hadamard"] else "--nohadamard")
    return " ".join(wanted) or None


def _listed(types: Any) -> str:
    return types if isinstance(types, str) else ",".join(types)


def metrics_table(stats: EngineStats) -> str:
    """An engine's stats as a table, ending with a newline."""
    return tables.table(("", ""), rows(stats))


def rows(stats: EngineStats) -> Iterator[tuple[str, str]]:
    """Names and values; what never happened is left out."""
    tokens, prefix, lost = stats.tokens, stats.prefix, stats.sequences
    seconds = stats.seconds
    yield "steps", f"{stats.n_steps:,} in {seconds:.1f} s"
    yield "prompt tokens prefilled", f"{tokens['prompt']:,}"
    rate = f", {tokens['sampled'] / seconds:.1f} a second" if seconds else ""
    yield "tokens generated", f"{tokens['sampled']:,}{rate}"
    if stats.attention:
        yield "attention", str(stats.attention)
    for reason, n in stats.finished.items():
        if n:
            yield f"ended: {reason}", f"{n:,}"
    if prefix["asked"]:
        yield "prefix hits", f"{_part(prefix['hit'], prefix['asked'])} of prompt tokens"
    if prefix["asked_again"]:
        again = _part(prefix["hit_again"], prefix["asked_again"])
        yield "prefix hits of preempted sequences", f"{again} of their tokens"
    for what in ("forked", "preempted", "offloaded"):
        if lost[what]:
            yield what, f"{lost[what]:,}"
    if stats.reads.get("read_once"):
        once, spared = stats.reads["read_once"], stats.reads["not_read_again"]
        yield "shared tokens read once", f"{once:,} in place of {once + spared:,}"
    events = {"rounds of SelfExtend": stats.n_extend, "scores that were NaN": stats.n_nan_scores}
    yield from ((what, f"{n:,}") for what, n in events.items() if n)
    for i, pool in enumerate(stats.pools):
        name = f"pool {i}" if len(stats.pools) > 1 else "cache"
        used = _part(pool.n_units - pool.n_free, pool.n_units)
        yield f"{name} in use", f"{used}, {pool.n_cached:,} more cached"
        if pool.n_evicted:
            yield f"{name} evicted", f"{pool.n_evicted:,}"
    if kept := stats.checkpoints:
        lost = f", {kept.n_evicted:,} evicted" if kept.n_evicted else ""
        yield "context checkpoints", f"{kept.n:,} in {kept.n_bytes / 2**20:,.1f} MiB{lost}"
    for name, tier in stats.tiers.items():
        events = ", ".join(f"{n:,} {event}" for event, n in tier.counts.items() if n)
        yield name, f"{tier.n_bytes / 2**20:,.1f} MiB{events and ': '}{events}"
    for what, found in stats.residency.items():
        if found["count"]:
            mean = found["sum"] / found["count"]
            yield f"blocks: {what.replace('_', ' ')}", f"{mean:.3g} s, at most {found['max']:.3g} s"


def _part(n: int, of: int) -> str:
    return f"{n:,} of {of:,} ({n / of:.1%})" if of else "0"
