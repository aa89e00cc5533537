"""An engine's metrics in the text format that Prometheus reads, as a file.

Source: Prometheus, "Exposition formats", text format 0.0.4.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from kvrt.files import atomic

Labels = Mapping[str, str]
Kind = Literal["counter", "gauge", "histogram"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Samples of one name.

    Attributes:
      name: of the family.
      kind: what it is.
      help: one line, or more.
      samples: what follows the name, labels, and the value.
    """

    name: str
    kind: Kind
    help: str
    samples: tuple[tuple[str, Labels, float], ...]


# name, key of the report, help
_ONE_COUNTER = (
    ("kvrt_steps_total", "steps", "Steps that ran."),
    ("kvrt_bad_logits_total", "bad_logits", "Samples ended by logits that are not finite."),
)
_ONE_GAUGE = (
    ("kvrt_uptime_seconds", "seconds", "Seconds since the engine was made."),
    ("kvrt_running", "n_running", "Samples that have a row in the cache."),
    ("kvrt_waiting", "n_waiting", "Samples that wait for a row."),
)
# name, key of the report, label, help
_COUNTERS = (
    ("kvrt_tokens_total", "tokens", "kind", "Tokens computed by kind, and tokens drawn."),
    ("kvrt_ended_total", "ended", "reason", "Samples that ended."),
    ("kvrt_prefix_tokens_total", "prefix", "kind", "Tokens looked for in the cache, and found."),
    ("kvrt_rows_total", "rows", "event", "Rows of the cache given, forked and taken."),
)
_POOLS: tuple[tuple[str, str, Kind, str], ...] = (
    ("kvrt_pool_units", "n_units", "gauge", "Blocks or cells that can be used."),
    ("kvrt_pool_free", "n_free", "gauge", "Blocks or cells that nobody holds."),
    ("kvrt_pool_cached", "n_cached", "gauge", "Free blocks that can be found again."),
    ("kvrt_pool_evicted_total", "n_evicted", "counter", "Blocks that could be found and went."),
)


def text(report: Mapping[str, Any]) -> str:
    """A report of `Metrics` as text."""
    return "".join(_written(family) for family in families(report))


def write(path: Path, report: Mapping[str, Any]) -> None:
    """Writes a report to a file, whole or not at all, so that a reader never sees half of it.

    Raises:
      SaveError: it cannot be written.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with atomic.told_of(path):
        try:
            new.write_text(text(report))
            os.replace(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


def families(report: Mapping[str, Any]) -> Iterator[Family]:
    """A report of `Metrics` as families of samples."""
    for name, key, about in _ONE_COUNTER:
        yield Family(name=name, kind="counter", help=about, samples=(("", {}, report[key]),))
    for name, key, about in _ONE_GAUGE:
        yield Family(name=name, kind="gauge", help=about, samples=(("", {}, report[key]),))
    for name, key, label, about in _COUNTERS:
        samples = tuple(("", {label: k}, v) for k, v in report[key].items())
        yield Family(name=name, kind="counter", help=about, samples=samples)
    for name, key, kind, about in _POOLS:
        pools = enumerate(report["pools"])
        samples = tuple(("", {"pool": str(i)}, pool[key]) for i, pool in pools)
        yield Family(name=name, kind=kind, help=about, samples=samples)
    yield from _tiers(report["tiers"])
    for what, found in report.get("residency", {}).items():
        yield _histogram(what, found)


def _tiers(tiers: Mapping[str, Any]) -> Iterator[Family]:
    yield Family(
        name="kvrt_tier_bytes",
        kind="gauge",
        help="Bytes that a tier holds.",
        samples=tuple(("", {"tier": name}, tier["n_bytes"]) for name, tier in tiers.items()),
    )
    yield Family(
        name="kvrt_tier_blocks_total",
        kind="counter",
        help="Blocks of a tier by what became of them.",
        samples=tuple(
            ("", {"tier": name, "event": event}, n)
            for name, tier in tiers.items()
            for event, n in tier["counts"].items()
        ),
    )


def _histogram(what: str, found: Mapping[str, Any]) -> Family:
    buckets = tuple(("_bucket", {"le": _number(b)}, n) for b, n in found["buckets"].items())
    return Family(
        name=f"kvrt_block_{what}_seconds",
        kind="histogram",
        help=f"Blocks that were followed: {what.replace('_', ' ')}.",
        samples=(*buckets, ("_sum", {}, found["sum"]), ("_count", {}, found["count"])),
    )


def _written(family: Family) -> str:
    if not family.samples:
        return ""
    about = family.help.replace("\\", r"\\").replace("\n", r"\n")
    lines = [f"# HELP {family.name} {about}", f"# TYPE {family.name} {family.kind}"]
    for suffix, labels, value in family.samples:
        inside = ",".join(f'{name}="{_escaped(x)}"' for name, x in labels.items())
        braces = f"{{{inside}}}" if inside else ""
        lines.append(f"{family.name}{suffix}{braces} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else repr(value)
