"""An engine's counters for Prometheus: a collector for any registry, and a file.

from prometheus_client import REGISTRY
from kvrt.serving.prometheus import EngineCollector, write_metrics

REGISTRY.register(EngineCollector(engine.stats))    # served by prometheus_client as others are
write_metrics(Path("kvrt.prom"), engine.stats())    # read by the node exporter
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvrt.files import kinds
from kvrt.serving.metrics import EngineStats, TierUse

_Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]

# name, kind, field of the stats, help; counters are written with _total at their names
_ONE: tuple[tuple[str, _Kind, str, str], ...] = (
    ("kvrt_steps", CounterMetricFamily, "n_steps", "Steps that ran."),
    (
        "kvrt_steps_ahead",
        CounterMetricFamily,
        "n_ahead",
        "Steps dispatched before the last was read.",
    ),
    (
        *("kvrt_bad_logits", CounterMetricFamily, "n_bad_logits"),
        "Samples ended by logits that are not finite.",
    ),
    (
        *("kvrt_nan_scores", CounterMetricFamily, "n_nan_scores"),
        "Scores of a policy that were NaN, whose tokens were evicted first.",
    ),
    ("kvrt_extend_rounds", CounterMetricFamily, "n_extend", "Rounds of SelfExtend in the cache."),
    ("kvrt_uptime_seconds", GaugeMetricFamily, "seconds", "Seconds since the engine was made."),
    ("kvrt_running", GaugeMetricFamily, "n_running", "Samples that run."),
    ("kvrt_waiting", GaugeMetricFamily, "n_waiting", "Samples that wait to be admitted."),
    ("kvrt_pins", GaugeMetricFamily, "n_pins", "Prefixes that are pinned."),
)
# name, field of the stats, label, help
_BY_LABEL = (
    ("kvrt_tokens", "tokens", "kind", "Tokens computed by kind, and tokens sampled."),
    ("kvrt_ended", "finished", "reason", "Samples that ended."),
    ("kvrt_prefix_tokens", "prefix", "kind", "Tokens looked for in the prefix cache, and hits."),
    ("kvrt_rows", "sequences", "event", "Sequences admitted, forked, preempted and offloaded."),
    ("kvrt_drops", "drops", "kind", "Drops of policies, and tokens that they dropped."),
    ("kvrt_drafts", "drafts", "kind", "Rounds of drafts, tokens drafted, and those accepted."),
    ("kvrt_reads", "reads", "kind", "Cached tokens read once for several sequences, and spared."),
)
_POOLS: tuple[tuple[str, _Kind, str, str], ...] = (
    ("kvrt_pool_units", GaugeMetricFamily, "n_units", "Blocks or cells that can be used."),
    ("kvrt_pool_free", GaugeMetricFamily, "n_free", "Blocks or cells that nobody holds."),
    ("kvrt_pool_cached", GaugeMetricFamily, "n_cached", "Free blocks that a hit can find."),
    ("kvrt_pool_evicted", CounterMetricFamily, "n_evicted", "Blocks evicted."),
    ("kvrt_pool_pinned", GaugeMetricFamily, "n_pinned", "Blocks or cells that pins hold."),
)
_CHECKPOINTS: tuple[tuple[str, _Kind, str, str], ...] = (
    ("kvrt_checkpoints", GaugeMetricFamily, "n", "Context checkpoints that a hit can end at."),
    ("kvrt_checkpoint_bytes", GaugeMetricFamily, "n_bytes", "Bytes of context checkpoints."),
    ("kvrt_checkpoints_evicted", CounterMetricFamily, "n_evicted", "Context checkpoints evicted."),
)
# Labels that dashboards know by another name than the stats have for them.
_LABELS = {"sampled": "drawn", "offloaded": "parked"}


class EngineCollector(Collector):
    """What `Engine.stats` says, as metrics; labels that no sample has are left out.

    Args:
      stats: called at each collection; it may be called at any time, by any thread.
    """

    def __init__(self, stats: Callable[[], EngineStats]):
        """Collects nothing yet."""
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        return (family for family in _families(self._stats()) if family.samples)


def exposition(stats: EngineStats) -> str:
    """What `Engine.stats` says in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: stats))
    return generate_latest(registry).decode()


def write_metrics(path: Path, stats: EngineStats) -> None:
    """Writes stats to a file, whole or not at all, so that a reader never sees half of it.

    Raises:
      UsageError: the path holds another kind of file.
      SaveError: it cannot be written.
    """
    kinds.write_whole(path, exposition(stats).encode(), kinds.METRICS)


def _families(stats: EngineStats) -> Iterator[Metric]:
    for name, kind, key, about in _ONE:
        yield kind(name, about, value=getattr(stats, key))
    for name, key, label, about in _BY_LABEL:
        values = {(_LABELS.get(str(k), str(k)),): v for k, v in getattr(stats, key).items()}
        yield _labelled(CounterMetricFamily(name, about, labels=[label]), values)
    for name, kind, key, about in _POOLS:
        values = {(str(i),): getattr(pool, key) for i, pool in enumerate(stats.pools)}
        yield _labelled(kind(name, about, labels=["pool"]), values)
    if stats.checkpoints is not None:
        for name, kind, key, about in _CHECKPOINTS:
            yield kind(name, about, value=getattr(stats.checkpoints, key))
    if stats.attention is not None:
        about = "What computes attention, and why."
        value = dataclasses.asdict(stats.attention)
        yield InfoMetricFamily("kvrt_attention", about, value=value)
    yield from _tiers(stats.tiers)
    for what, found in stats.residency.items():
        yield _histogram(what, found)


def _tiers(tiers: Mapping[str, TierUse]) -> Iterator[Metric]:
    n_bytes = GaugeMetricFamily("kvrt_tier_bytes", "Bytes that a tier holds.", labels=["tier"])
    yield _labelled(n_bytes, {(name,): tier.n_bytes for name, tier in tiers.items()})
    blocks = CounterMetricFamily(
        "kvrt_tier_blocks", "Blocks of a tier by what became of them.", labels=["tier", "event"]
    )
    values = {(name, event): n for name, tier in tiers.items() for event, n in tier.counts.items()}
    yield _labelled(blocks, values)


def _labelled(
    family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[tuple[str, ...], float]
) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histogram(what: str, found: Mapping[str, Any]) -> Metric:
    buckets = [
        ("+Inf" if bound == float("inf") else repr(bound), n)
        for bound, n in found["buckets"].items()
    ]
    return HistogramMetricFamily(
        f"kvrt_block_{what}_seconds",
        f"Blocks that were followed: {what.replace('_', ' ')}.",
        buckets=buckets,
        sum_value=found["sum"],
    )
