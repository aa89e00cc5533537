"""The day on a GPU without a GPU: its commands, resuming, time, lost sides, and tables."""

import json

import pytest

from scripts.bench import tiles as tile_search
from scripts.gpu_day import day, kernel_tests, machine, plan
from scripts.gpu_day.day import Budget
from scripts.gpu_day.ledger import IDENTITY, Ledger
from scripts.gpu_day.plan import PARTS, Command

MACHINE = {
    "device": "NVIDIA H200",
    "n_devices": 1,
    "backend": "cuda",
    "platform": "cuda 13010",
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "tiled": ["pallas_gpu"],
    "commit": "abc1234",
    "sources": "0f0f",
    "smoke": False,
    "free_disk_bytes": 1 << 40,
}

# --- commands -------------------------------------------------------------------------------------


def flags_of(commands, part):
    """Flags of the commands of a part, with their values."""
    pairs = (c.words[1:] for c in commands if c.part == part)
    return [dict(zip(x[::2], x[1::2], strict=True)) for x in pairs]


def test_the_plan_has_all_that_was_asked_for():
    commands = plan.plan("cuda", ["pallas_gpu"])
    assert len({c.name for c in commands}) == len(commands)
    assert {c.part for c in commands} == set(PARTS)
    grid = {(f["--shape"], f["--context"]) for f in flags_of(commands, "decode")}
    assert len(grid) == 4 * 5
    behind = {(f["--shape"], f["--context"]) for f in flags_of(commands, "prefill")}
    assert len(behind) == 4 * 6
    upkeep = {(f["--what"], f["--shape"]) for f in flags_of(commands, "upkeep")}
    assert upkeep == {(what, shape) for what in ("k_shift", "defrag") for shape in plan.SHAPES}
    assert {f["--type_k"] for f in flags_of(commands, "decode")} == {"bf16", "int8"}


def test_what_the_aims_are_about_comes_first():
    commands = plan.plan("cuda", ["pallas_gpu"])
    assert [c.part for c in commands[:2]] == ["tests"] * 2
    first = [c for c in commands if c.part != "tests"][:3]
    assert [c.aim for c in first] == [0.83, 0.90, 0.80]
    search = [c.part for c in commands].index("tiles")
    assert not any(c.tuned for c in commands[:search])
    assert [c.aim for c in commands[search:] if c.tuned][:3] == [0.83, 0.90, 0.80]


def test_tests_are_those_of_the_platform():
    files = {p: {c.words[-1].rpartition("/")[2] for c in plan.tests(p)} for p in ("cuda", "tpu")}
    assert files["cuda"] >= {"test_pallas_gpu.py", "test_kernels.py"}
    assert files["tpu"] == {"test_pallas_tpu.py", "test_kernels.py"}


def test_parts_can_be_chosen():
    assert {c.part for c in plan.plan("tpu", ["pallas_tpu"], ("upkeep",))} == {"upkeep"}
    assert {c.part for c in plan.smoke()} == set(PARTS)


# --- results file ---------------------------------------------------------------------------------


def test_a_run_continues_where_it_was(tmp_path):
    path = tmp_path / "results.jsonl"
    first = Ledger(path, MACHINE)
    for line in (
        {"command": "a", "begins": True},
        {"command": "a", "x": 1},
        {"command": "a", "seconds": 1},
        {"command": "b", "x": 2},
        {"command": "b", "seconds": 1, "failed": "no room"},
        {"command": "c", "x": 3},
    ):
        first.add(line)
    with path.open("a") as file:
        file.write('{"command": "c", "x"')  # killed while it wrote
    again = Ledger(path, MACHINE)
    assert (set(again.done), again.began) == ({"a", "b"}, "")
    assert "c" not in again.lines and again.lines["a"] == [{"command": "a", "x": 1}]
    again.add({"command": "c", "begins": True})
    again.add({"command": "c", "x": 4})
    again.add({"command": "c", "seconds": 2})
    found = Ledger(path, MACHINE, retry=True)
    assert set(found.done) == {"a", "c"} and [x["x"] for x in found.lines["c"]] == [4]


@pytest.mark.parametrize("name", IDENTITY)
def test_another_identity_begins_anew(tmp_path, name):
    path = tmp_path / "results.jsonl"
    Ledger(path, MACHINE).add({"command": "a", "seconds": 1})
    other = Ledger(path, MACHINE | {name: "other"})
    assert other.done == {} and f"{name} {MACHINE[name]} -> other" in other.began
    assert '"a"' in (tmp_path / "results.1.jsonl").read_text()
    assert Ledger(path, MACHINE | {"free_disk_bytes": 5, name: "other"}).began == ""


# --- time -----------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_time_is_kept_for_the_tables_and_parts_learn():
    clock = Clock()
    budget = Budget(2, now=clock)
    assert budget.left_s == 115 and not budget.fits("tests") and budget.fits("decode")
    budget.learn("decode", 110)
    clock.now = 6
    assert not budget.fits("decode")
    for _ in range(5):
        budget.learn("decode", 10)
    assert budget.fits("decode")
    clock.now = 115
    assert not budget.fits("upkeep")


def run_all(tmp_path, monkeypatch, seconds, commands):
    """What ran in a minute of a clock on which each takes some seconds, and the ledger."""
    clock, seen = Clock(), []

    def takes(command, *_):
        clock.now += seconds
        seen.append(command.name)
        return {"failed": "nothing is measured here"}

    monkeypatch.setattr(day, "run_one", takes)
    ledger = Ledger(tmp_path / "results.jsonl", MACHINE)
    options = day.Options(out=tmp_path, smoke=False, only=(), minutes=1)
    day.run_all(commands, options, Budget(1, now=clock), ledger)
    return seen, ledger


def test_commands_that_do_not_fit_are_left_and_smaller_ones_are_not(tmp_path, monkeypatch):
    commands = [Command("tests", ("long",)), *(Command("upkeep", (x,)) for x in "abc")]
    seen, ledger = run_all(tmp_path, monkeypatch, 20, commands)
    assert seen == ["a", "b"] and ledger.done["a"]["seconds"] == 20


def test_a_command_that_the_time_ends_is_run_again(tmp_path, monkeypatch):
    seen, ledger = run_all(tmp_path, monkeypatch, 56, [Command("upkeep", ("a",))])
    assert seen == ["a"] and ledger.done == {}


# --- processes ------------------------------------------------------------------------------------

BENCH = r"""
import json, os, sys, time
lost = sys.argv[-1].split(",") if "--without" in sys.argv else []
for side in ("good", "dies", "hangs", "last"):
    if side in lost: continue
    print(f"side: {side}", file=sys.stderr, flush=True)
    if side == "dies": os._exit(7)
    if side == "hangs": time.sleep(60)
    print("noise of a library", flush=True)
    print(json.dumps({"bench": "x", "side": side}), flush=True)
if "fails" in sys.argv: sys.exit("two lines\nand a reason")
"""


def ran(tmp_path, monkeypatch, *words):
    (tmp_path / "fake_bench.py").write_text(BENCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(day, "_LIMIT_S", 2.0)
    ledger = Ledger(tmp_path / "results.jsonl", MACHINE)
    options = day.Options(out=tmp_path, smoke=False, only=(), minutes=1)
    command = Command("decode", ("fake_bench", *words), aim=0.5)
    end = day.run_one(command, options, 60.0, ledger)
    return end, {x["side"]: x for x in ledger.lines[command.name]}


def test_sides_that_hang_or_die_are_recorded_and_the_others_run(tmp_path, monkeypatch):
    end, sides = ran(tmp_path, monkeypatch)
    assert end == {} and set(sides) == {"good", "dies", "hangs", "last"}
    assert sides["last"]["aim"] == 0.5 and "failed" not in sides["good"]
    assert "ended with 7" in sides["dies"]["failed"] and "ended with -9" in sides["hangs"]["failed"]


def test_a_command_that_fails_says_why(tmp_path, monkeypatch):
    end, sides = ran(tmp_path, monkeypatch, "fails", "--without", "dies,hangs")
    assert end == {"failed": "ended with 1: and a reason"} and set(sides) == {"good", "last"}


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
    found = {"bench": "tiles", "key": key, "sizes": {"cells": 64}, "rule_us": 9, "best_us": 8}
    ledger = Ledger(tmp_path / "results.jsonl", MACHINE)
    ledger.add({"command": "a", **found})
    ledger.add({"command": "b", **found, "key": key | {"head_dim": 64}, "sizes": {}})
    day.write_tiles(tmp_path, ledger)
    (entry,) = json.loads((tmp_path / "tiles.json").read_text())["tiles"]
    assert (entry["key"], entry["sizes"]) == (key, {"cells": 64})
    assert entry["note"] == "8 us a layer, 9 by the rule"


# --- machine, tests, tables -----------------------------------------------------------------------


def test_a_cpu_is_refused_in_one_line():
    reason = machine.refusal(MACHINE | {"backend": "cpu"})
    assert "--smoke" in reason and "\n" not in reason
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


def test_tables_say_what_was_reached_failed_and_is_left(tmp_path):
    asked = [Command("decode", (x,)) for x in ("done", "lost", "left")]
    ledger = Ledger(tmp_path / "results.jsonl", MACHINE)
    line = {"command": "done", "bench": "decode attention", "shape": "llama-3.1-8b", "aim": 0.83}
    ledger.add(line | {"side": "kvrt pallas_gpu", "layer_us": [1, 2.5, 3], "share_of_copy": 0.71})
    ledger.add(line | {"side": "jax.nn xla", "layer_us": [4, 5, 6], "alone": True})
    ledger.add(line | {"side": "flashinfer", "skipped": "torch is not installed"})
    ledger.add({"command": "done", "seconds": 3})
    ledger.add({"command": "lost", "seconds": 3, "failed": "ended with -9"})
    text = day.report(MACHINE, asked, ledger)
    assert "**decode attention: shape llama-3.1-8b, aim 0.83**" in text and "**not run: 1**" in text
    rows = ["".join(row.split()) for row in text.splitlines()]
    assert "|side|layer_us|share_of_copy|alone|skipped|" in rows
    assert "|kvrtpallas_gpu|2.5(1to3)|0.71|||" in rows and "|jax.nnxla|5(4to6)||True||" in rows
    assert "|lost|endedwith-9|" in rows and "|left|" in rows and "--smoke" not in text
