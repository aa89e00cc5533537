"""An engine's metrics for people."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvrt.cli.report import tables


def table(report: Mapping[str, Any]) -> str:
    """A report of `kvrt.serving.metrics` as a table, ending with a newline."""
    return tables.table(("", ""), rows(report))


def rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a report says, and its value; what never happened is left out."""
    tokens, prefix, lost = report["tokens"], report["prefix"], report["rows"]
    seconds = report["seconds"]
    yield "steps", f"{report['steps']:,} in {seconds:.1f} s"
    yield "prompt tokens prefilled", f"{tokens['prompt']:,}"
    rate = f", {tokens['drawn'] / seconds:.1f} a second" if seconds else ""
    yield "tokens generated", f"{tokens['drawn']:,}{rate}"
    for reason, n in report["ended"].items():
        if n:
            yield f"ended: {reason}", f"{n:,}"
    if prefix["asked"]:
        yield "prefix hits", f"{_part(prefix['hit'], prefix['asked'])} of prompt tokens"
    if prefix["asked_again"]:
        again = _part(prefix["hit_again"], prefix["asked_again"])
        yield "prefix hits of preempted sequences", f"{again} of their tokens"
    for what in ("forked", "preempted", "parked"):
        if lost[what]:
            yield what, f"{lost[what]:,}"
    for i, pool in enumerate(report["pools"]):
        name = f"pool {i}" if len(report["pools"]) > 1 else "cache"
        used = _part(pool["n_units"] - pool["n_free"], pool["n_units"])
        yield f"{name} in use", f"{used}, {pool['n_cached']:,} more cached"
        if pool["n_evicted"]:
            yield f"{name} evicted", f"{pool['n_evicted']:,}"
    for name, tier in report["tiers"].items():
        events = ", ".join(f"{n:,} {event}" for event, n in tier["counts"].items() if n)
        yield name, f"{tier['n_bytes'] / 2**20:,.1f} MiB{events and ': '}{events}"
    for what, found in report.get("residency", {}).items():
        if found["count"]:
            mean = found["sum"] / found["count"]
            yield f"blocks: {what.replace('_', ' ')}", f"{mean:.3g} s, at most {found['max']:.3g} s"


def _part(n: int, of: int) -> str:
    return f"{n:,} of {of:,} ({n / of:.1%})" if of else "0"
