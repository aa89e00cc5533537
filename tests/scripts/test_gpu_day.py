"""The day on a GPU without a GPU: its plan, resuming, time, tile sizes, and tables."""

import dataclasses
import functools
import json

import pytest
from gpu_day_results import GRID, MACHINE

from kvrt.attention import registry
from scripts._lib import shapes
from scripts.gpu_day import day, kernel_tests, machine, plan, tables
from scripts.gpu_day.budget import EXPECTED_S, Budget
from scripts.gpu_day.ledger import IDENTITY, Ledger
from scripts.gpu_day.measuring import OutOfTime
from scripts.gpu_day.plan import Cell
from scripts.gpu_day.sides import tile_search
from scripts.gpu_day.sides.implementations import Implementations

# --- plan -----------------------------------------------------------------------------------------


def test_the_plan_has_all_that_was_asked_for():
    cells = plan.plan("gpu", ["pallas_gpu"])
    assert len({cell.name for cell in cells}) == len(cells)
    for what in ("attention", "step"):
        found = {
            (c.shape, c.batch, c.context) for c in cells if c.part == "decode" and c.what == what
        }
        assert len(found) >= 4 * 4 * 5
        found = {(c.shape, c.batch) for c in cells if c.part == "prefill" and c.what == what}
        assert len(found) == 4 * 4
    windows = [
        c for c in cells if c.what == "attention" and c.shape == "gemma-3-27b" and not c.group
    ]
    assert {c.context for c in windows} == {4096}
    upkeep = {(c.what, c.shape) for c in cells if c.part == "upkeep"}
    assert upkeep == {(what, shape) for what in ("k_shift", "defrag") for shape in plan.SHAPES}
    assert {cell.kind for cell in cells} == set(EXPECTED_S)


def test_what_the_aims_are_about_comes_first():
    cells = plan.plan("gpu", ["pallas_gpu"])
    order = [(c.part, c.what) for c in cells]
    assert [part for part, _ in order][:2] == ["tests"] * 2
    first = [c for c in cells if c.part != "tests"][:4]
    assert [plan.aim(c) for c in first] == [0.83, 0.90, 0.80, 0.80]
    search = order.index(("tiles", "pallas_gpu"))
    assert not any(c.tuned for c in cells[:search]) and cells[search - 1].what == "step"
    assert plan.aim(dataclasses.replace(GRID, batch=8)) is None


def test_tests_are_those_of_the_platform():
    files = {p: {c.what.rpartition("/")[2] for c in plan.tests(p)} for p in ("gpu", "tpu")}
    assert files["gpu"] >= {"test_pallas_gpu.py", "test_kernels.py"}
    assert files["tpu"] == {"test_pallas_tpu.py", "test_kernels.py"}


def test_parts_can_be_chosen():
    assert {c.part for c in plan.plan("tpu", ["pallas_tpu"], ("upkeep",))} == {"upkeep"}
    assert {c.part for c in plan.smoke(["pallas_gpu"])} == set(plan.PARTS)


def test_peers_are_those_of_the_platform_and_the_cell():
    def names(platform, **options):
        return [p.name for p in plan.peers(dataclasses.replace(GRID, **options), platform)]

    assert names("gpu") == ["jax.nn xla", "jax.nn cudnn", "jax paged_attention"]
    assert names("gpu", peers="all")[3:] == ["torch sdpa", "flashinfer"]
    assert names("gpu", peers="all", what="step") == ["torch step"]
    assert names("tpu", peers="all") == ["jax.nn xla", "jax ragged_paged_attention"]
    windowed = shapes.SHAPES["gemma-3-27b"].groups[0].mask.size > 0
    assert windowed and names("gpu", shape="gemma-3-27b", part="prefill") == []


def test_a_new_kernel_is_measured_without_a_line_here(monkeypatch):
    make = functools.partial(registry.load_kernel, "gpu")
    monkeypatch.setitem(registry.IMPLEMENTATIONS, "newer_gpu", make)
    known = Implementations(interpret=True)
    assert known.kernels["newer_gpu"] == "gpu" and "cells" in known.tile_sizes("newer_gpu")
    assert "reference" not in known.others and "chunked" in known.others
    assert "pallas_gpu" not in Implementations().kernels
    alias = known.registered("newer_gpu", None)
    assert alias != "newer_gpu" and registry.implementation(alias)
    monkeypatch.delitem(registry.IMPLEMENTATIONS, alias)


# --- results file ---------------------------------------------------------------------------------


def test_a_run_continues_where_it_was(tmp_path):
    path = tmp_path / "results.jsonl"
    first = Ledger(path, MACHINE)
    first.add("a", {"x": 1})
    first.add("b", {"failed": "no room"})
    with path.open("a") as file:
        file.write('{"cell": "c", "x"')  # killed while it wrote
    again = Ledger(path, MACHINE)
    assert (set(again.lines), again.began) == ({"a", "b"}, "")
    again.add("c", {"x": 3})
    assert [json.loads(x).get("cell") for x in path.read_text().splitlines()][1:] == ["a", "b", "c"]
    assert set(Ledger(path, MACHINE, retry=True).lines) == {"a", "c"}


@pytest.mark.parametrize("name", IDENTITY)
def test_another_identity_begins_anew(tmp_path, name):
    path = tmp_path / "results.jsonl"
    Ledger(path, MACHINE).add("a", {"x": 1})
    other = Ledger(path, MACHINE | {name: "other"})
    assert other.lines == {} and f"{name} {MACHINE[name]} -> other" in other.began
    assert '"a"' in (tmp_path / "results.1.jsonl").read_text()
    assert Ledger(path, MACHINE | {"free_disk_bytes": 5, name: "other"}).began == ""


# --- time -----------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_time_is_kept_for_the_tables_and_cells_learn():
    clock = Clock()
    budget = Budget(2, now=clock)
    assert budget.left_s == 115 and not budget.fits("tests") and budget.fits("decode step")
    budget.learn("decode step", 110)
    clock.now = 6
    assert not budget.fits("decode step")
    for _ in range(5):
        budget.learn("decode step", 10)
    assert budget.expected_s("decode step") == 10 and budget.fits("decode step")
    clock.now = 115
    assert not budget.fits("upkeep") and not Budget(0, quick=True, now=clock).fits("upkeep")


class Measured:
    """Stands for processes: a cell takes some seconds of a clock."""

    def __init__(self, clock, seconds, late=()):
        self.clock, self.seconds, self.late, self.seen = clock, seconds, late, []

    def measure(self, cell):
        self.clock.now += self.seconds
        if cell.what in self.late:
            raise OutOfTime
        self.seen.append(cell.what)
        return {"failed": "nothing is measured here"}


def days(tmp_path, measured, minutes, cells):
    ledger = Ledger(tmp_path / "results.jsonl", MACHINE)
    budget = Budget(minutes, now=measured.clock)
    day.measure_all(cells, measured, budget, ledger, lambda: None)
    return ledger


def test_cells_that_do_not_fit_are_left_and_smaller_ones_are_not(tmp_path):
    cells = [Cell(part="tests", what="long"), Cell(part="upkeep", what="a")]
    cells += [Cell(part="upkeep", what="b"), Cell(part="upkeep", what="c")]
    measured = Measured(Clock(), 20)
    ledger = days(tmp_path, measured, 1, cells)
    assert measured.seen == ["a", "b"] and len(ledger.lines) == 2
    assert ledger.lines[cells[1].name]["seconds"] == 20


def test_a_cell_that_the_time_ends_is_measured_by_the_next_run(tmp_path):
    cells = [Cell(part="upkeep", what=what) for what in "ab"]
    ledger = days(tmp_path, Measured(Clock(), 1, late="b"), 1, cells)
    assert set(ledger.lines) == {cells[0].name}
    measured = Measured(Clock(), 1)
    days(tmp_path, measured, 1, [c for c in cells if c.name not in ledger.lines])
    assert measured.seen == ["b"]


# --- tile sizes -----------------------------------------------------------------------------------


def test_a_search_keeps_what_gains_and_says_what_failed():
    def measure(sizes):
        if sizes.get("stages") == 6:
            raise RuntimeError("too much shared memory")
        return 10 - {32: 1, 64: 3}.get(sizes.get("cells"), 0) - (sizes.get("warps") == 8)

    search = tile_search.Search()
    choices = {"cells": (32, 64), "stages": (2, 6), "warps": (2, 8)}
    assert search.run(choices, measure, lambda: True) == {"cells": 64, "warps": 8}
    assert search.failed[(("cells", 64), ("stages", 6))] == "RuntimeError: too much shared memory"


def test_a_search_ends_with_its_time():
    search, left = tile_search.Search(), iter([True, False])
    best = search.run({"cells": (32, 64)}, lambda sizes: -len(sizes), lambda: next(left))
    assert best == {"cells": 32} and len(search.seconds) == 2


def test_found_sizes_become_the_table(tmp_path):
    key = {"kernel": "gpu", "device": "NVIDIA H200", "type_q": "f32", "type_k": "bf16"}
    key |= {"type_v": "bf16", "head_dim": 128, "block_size": 256, "step": "decode"}
    found = {"part": "tiles", "key": key, "sizes": {"cells": 64}, "rule_us": 9, "best_us": 8}
    day.write_tiles(
        tmp_path, {"a": found, "b": found | {"key": key | {"head_dim": 64}, "sizes": {}}}
    )
    (entry,) = json.loads((tmp_path / "tiles.json").read_text())["tiles"]
    assert (entry["key"], entry["sizes"]) == (key, {"cells": 64})
    assert entry["note"] == "8 us a layer, 9 by the rule"


# --- machine, tests, tables -----------------------------------------------------------------------


def test_a_cpu_is_refused_in_one_line():
    told = machine.refusal(MACHINE | {"backend": "cpu"})
    assert "--smoke" in told and "\n" not in told
    assert machine.refusal(MACHINE | {"backend": "cpu", "smoke": True}) is None
    assert "0.5 GiB of disk" in machine.refusal(MACHINE | {"free_disk_bytes": 1 << 29})
    assert machine.refusal(MACHINE) is None


def test_pytests_report_is_read():
    report = """<testsuites><testsuite><testcase name="a"/><testcase name="b">
    <failure message="assert 1&#10;== 2">long</failure></testcase>
    <testcase name="c"><skipped/></testcase></testsuite></testsuites>"""
    found = kernel_tests.outcomes(report)
    assert (found["passed"], found["n_failed"], found["n_skipped"]) == (1, 1, 1)
    assert found["failures"] == {"b": "assert 1 == 2"}
    assert "failed" in kernel_tests.outcomes("<testsuites/>")
    assert kernel_tests.platform(MACHINE) == "cuda"
    assert kernel_tests.platform(MACHINE | {"platform": "ROCm 7"}) == "rocm"
    assert kernel_tests.platform(MACHINE | {"backend": "tpu"}) == "tpu"


def side(us, share, **more):
    return {"us": [us, us, us], "share": share, "n_samples": 30, **more}


def test_tables_say_what_was_reached_failed_and_is_left():
    step = dataclasses.replace(GRID, what="step")
    lost = dataclasses.replace(GRID, batch=64)
    left = dataclasses.replace(GRID, batch=1)
    lines = {
        GRID.name: {
            "aim": 0.83,
            "copy_gb_s": 4000.0,
            "sides": {
                "pallas_gpu": side(1234.5, 0.71),
                "jax.nn xla": side(2000, 0.4, alone=True),
                "flashinfer": {"skipped": "not installed"},
                "jax.nn cudnn": {"failed": "MemoryError: needs 9 GiB of 3", "no_room": True},
            },
        },
        step.name: {
            "aim": 0.8,
            "sides": {"pallas_gpu": side(5500, 0.85, device_us=5000.0, host_gap=0.091)},
        },
        lost.name: {"failed": "no answer within 300 s"},
    }
    text = tables.render(MACHINE, [GRID, step, lost, left], lines)
    row = "| llama-3.1-8b | 32 | 4,096 | bf16 | 1,234.5 | 71% (below) | 2,000.0, alone | no room |"
    assert f"{row} not installed | 83% |" in text
    assert "| 5.500 | 85% | 80% | 5.000 | 9.1% (above 5 %) |" in text
    assert f"| {lost.name} |  | no answer within 300 s |" in text
    assert "**Not run: 1 cells**" in text and f"| {left.name} |" in text
    assert "4,000 to 4,000 GB/s" in text and "--smoke" not in text
