"""An engine's metrics for people."""

from collections.abc import Iterator

from kvrt.cli.report import tables
from kvrt.serving.metrics import EngineStats


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
