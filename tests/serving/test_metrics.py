"""Metrics: counted right, and written in a format that a strict reader takes."""

import dataclasses
import math
import os
import re

import pytest
from plainspace import PlainSpace, Served
from prometheus_client import CollectorRegistry, Gauge

from kvrt.cli.batch import progress as metrics_table
from kvrt.errors import BadConfig, SaveError, UsageError
from kvrt.options.serving import Rules
from kvrt.paged.residency import Histogram, Residency
from kvrt.serving import prometheus
from kvrt.serving.metrics import EngineStats, Metrics, PoolUse, TierUse
from kvrt.serving.request import Request

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")


def parse(text: str) -> dict[str, tuple[str, str, dict[tuple, float]]]:
    """Families by name: kind, help, and values by suffix and labels; refuses all else."""
    found: dict[str, tuple[str, str, dict[tuple, float]]] = {}
    name = kind = ""
    assert text.endswith("\n") and "\n\n" not in text
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("# HELP "):
            name, about = re.fullmatch(rf"# HELP ({NAME}) (.+)", line).groups()
            assert name not in found and not re.search(r"(?<!\\)(\\\\)*\\[^\\n]", about)
            kind_line = next(lines)
            kind = re.fullmatch(rf"# TYPE {name} (counter|gauge|histogram)", kind_line)[1]
            assert (kind == "counter") == name.endswith("_total")
            found[name] = (kind, about, {})
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        whole, inside, value = match[1], match[2] or "", float(match[match.lastindex])
        suffix = whole.removeprefix(name)
        assert suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
        labels = tuple(re.findall(LABEL, inside))
        assert (suffix, labels) not in found[name][2] and not math.isnan(value)
        found[name][2][suffix, labels] = value
    for kind, _, samples in found.values():
        assert samples
        if kind == "histogram":
            buckets = [v for (suffix, _), v in samples.items() if suffix == "_bucket"]
            assert buckets == sorted(buckets) and buckets[-1] == samples["_count", ()]
            assert ("_bucket", (("le", "+Inf"),)) in samples
    return found


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def full_report() -> EngineStats:
    """A report of requests that shared, forked, were preempted and cancelled."""
    clock = Clock()
    residency = Residency(n_every=1, clock=clock)
    metrics = Metrics(residency, clock)
    s = Served(PlainSpace(3, 8, finds=True), Rules(n_batch=24))
    tokens = tuple(range(8))
    s.add(Request(id="a", tokens=tokens, n_predict=9))
    s.add(Request(id="b", tokens=(50, *tokens), n_predict=9, n=2))
    s.add(Request(id="gone", tokens=tokens, n_predict=2))
    s.add(Request(id="later", tokens=(*tokens, 9), n_predict=2))
    ended = set()
    for turn in range(60):
        if turn == 1:
            s.cancel("gone")
        plan = s.scheduler.plan()
        metrics.planned(plan)
        s.scheduler.ran(plan)
        for state in [*plan.decode, *(x for x, _, _ in plan.prompts)]:
            s.space.computed(state)
        sampled = [*plan.ending, *(dst for _, dst in plan.forks)]
        for state in sampled:
            if why := state.append(5):
                s.scheduler.finish(state, why)
                s.ended[state.request.id, state.sample] = state
        metrics.ran(plan, len(sampled))
        for key in set(s.ended) - ended:
            metrics.finished(s.ended[key])
            ended.add(key)
    residency.born(["x", "y"])
    clock.now = 5.0
    residency.used(["x", "unknown"])
    clock.now = 100.0
    residency.gone(["x"])
    return metrics.snapshot(
        n_running=0,
        n_waiting=1,
        pools=(PoolUse(n_units=8, n_free=2, n_cached=1, n_evicted=3),),
        tiers={'di"sk\\\n': TierUse(n_bytes=5 << 20, counts={"written": 7, "damaged": 0})},
    )


def test_what_happened_is_counted():
    report = full_report()
    assert report.finished == {"stop": 0, "length": 4, "cancelled": 1, "error": 0}
    # a: 9 sampled, b: 9 twice, later: 2.
    assert report.tokens["sampled"] == 29
    assert report.sequences["forked"] == 1 and report.sequences["preempted"] >= 1
    assert report.sequences["admitted"] == 3 + report.sequences["preempted"]
    # a, b and `later` asked once; `later` found a's first 8.
    assert report.prefix["asked"] == 8 + 9 + 9 and report.prefix["hit"] == 8
    assert report.prefix["hit_again"] > 0 and report.hit_rate == 8 / 26
    assert report.usage == [0.75] and report.n_waiting == 1
    assert report.residency["lifetime"]["sum"] == 100 and report.seconds == 100
    assert report.residency["idle"]["sum"] == 95
    assert report.residency["reuse_gap"]["sum"] == 5


def test_prometheus_reads_it():
    report = full_report()
    found = parse(prometheus.exposition(report))
    assert found["kvrt_steps_total"][2] == {("", ()): 60}
    assert found["kvrt_ended_total"][2]["", (("reason", "cancelled"),)] == 1
    assert found["kvrt_prefix_tokens_total"][2]["", (("kind", "hit"),)] == 8
    assert found["kvrt_pool_free"][2] == {("", (("pool", "0"),)): 2}
    assert found["kvrt_tier_bytes"][2] == {("", (("tier", r"di\"sk\\\n"),)): 5 << 20}
    idle = found["kvrt_block_idle_seconds"][2]
    assert idle["_sum", ()] == 95 and idle["_bucket", (("le", "600.0"),)] == 1
    assert idle["_bucket", (("le", "60.0"),)] == 0


def test_a_report_of_an_engine_that_did_nothing_is_read_too():
    report = Metrics().snapshot(n_running=0, n_waiting=0)
    found = parse(prometheus.exposition(report))
    assert "kvrt_pool_free" not in found and found["kvrt_running"][2] == {("", ()): 0}
    assert report.hit_rate == 0


def test_a_registry_collects_an_engine_beside_other_metrics():
    registry, report = CollectorRegistry(), full_report()
    Gauge("others", "Not ours.", registry=registry).set(2)
    registry.register(prometheus.EngineCollector(lambda: report))
    assert registry.get_sample_value("others") == 2
    assert registry.get_sample_value("kvrt_steps_total") == 60
    report = dataclasses.replace(report, n_steps=61)
    assert registry.get_sample_value("kvrt_steps_total") == 61


@pytest.mark.parametrize(
    "bad",
    [
        "kvrt_x 1\n",
        '# HELP kvrt_x a\n# TYPE kvrt_x gauge\nkvrt_x{a="b"c"} 1\n',
        "# HELP kvrt_x a\n# TYPE kvrt_x counter\nkvrt_x 1\n",
        "# HELP kvrt_x a\n# TYPE kvrt_x gauge\nkvrt_x nan\n",
        "# HELP kvrt_x a\n# TYPE kvrt_x gauge\nkvrt_x 1\nkvrt_x 2\n",
    ],
)
def test_the_reader_is_strict(bad):
    with pytest.raises((AssertionError, KeyError)):
        parse(bad)


def test_a_file_is_written_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "kvrt.prom"
    report = full_report()
    prometheus.write_metrics(path, report)
    assert path.read_text() == prometheus.exposition(report)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SaveError, match="no space left on device"):
        prometheus.write_metrics(path, Metrics().snapshot(n_running=0, n_waiting=0))
    assert path.read_text() == prometheus.exposition(report)
    # The lock is no half-written file.
    assert {p.name for p in tmp_path.iterdir()} == {"kvrt.prom", ".kvrt.prom.lock"}


def test_metrics_replace_no_other_file(tmp_path):
    path = tmp_path / "o.jsonl"
    path.write_text('{"id": "a"}\n')
    with pytest.raises(UsageError, match="is not a file of kvrt's metrics and stays as it is"):
        prometheus.write_metrics(path, full_report())
    assert path.read_text() == '{"id": "a"}\n'


def test_metrics_follow_a_link_and_can_be_read_by_others(tmp_path):
    real, link = tmp_path / "real.prom", tmp_path / "link.prom"
    link.symlink_to(real)
    for _ in range(2):
        prometheus.write_metrics(link, full_report())
    assert link.is_symlink() and real.read_text() == prometheus.exposition(full_report())
    umask = os.umask(0)
    os.umask(umask)
    assert real.stat().st_mode & 0o777 == 0o666 & ~umask


def test_people_get_a_table():
    text = metrics_table.metrics_table(full_report())
    rows = dict(metrics_table.rows(full_report()))
    assert rows["prefix hits"] == "8 of 26 (30.8%) of prompt tokens"
    assert rows["cache in use"] == "6 of 8 (75.0%), 1 more cached"
    assert rows["ended: cancelled"] == "1" and "ended: error" not in rows
    assert rows["blocks: idle"] == "95 s, at most 95 s"
    assert rows['di"sk\\\n'] == "5.0 MiB: 7 written"
    assert all(name.strip() in text for name in rows if "\n" not in name)
    assert r"di\"sk" not in text and r"\n" in text  # no control character reaches the terminal
    short = dict(metrics_table.rows(Metrics(clock=lambda: 0.0).snapshot(n_running=0, n_waiting=0)))
    assert list(short) == ["steps", "prompt tokens prefilled", "tokens generated"]


def test_a_sample_of_blocks_is_followed():
    clock = Clock()
    residency = Residency(n_every=4, n_max=2, clock=clock)
    residency.born(range(100))
    clock.now = 2.0
    residency.used(range(100))
    residency.gone(range(100))
    report = residency.report()
    assert [report[k]["count"] for k in ("lifetime", "idle", "reuse_gap")] == [2, 2, 2]
    with pytest.raises(BadConfig, match="n_every 0"):
        Residency(0)


def test_a_value_on_a_bound_is_within_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.add(value)
    report = histogram.report()
    assert report["buckets"] == {1.0: 2, 2.0: 4, math.inf: 5}
    assert (report["count"], report["sum"], report["max"]) == (5, 14.0, 9.0)
