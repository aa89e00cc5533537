"""A whole day with tiny shapes, on a CPU: killed in the middle and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.gpu_day import day, plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "scripts.gpu_day", "--smoke", "--out"]


def lines(path):
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [x for x in map(json.loads, whole) if "command" in x]


def test_a_killed_day_is_resumed(tmp_path, budget):
    results = tmp_path / "results.jsonl"
    # Decode and prefill, in which all kernels are interpreted, take longest.
    parts = budget(("tiles", "upkeep"), tuple(plan.PARTS))
    n_all = len(plan.smoke(parts))
    command = [*COMMAND, str(tmp_path), "--only", ",".join(parts)]
    with (tmp_path / "first.log").open("w") as log:
        first = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        end = time.monotonic() + 120
        while not any("seconds" in x for x in lines(results)) and time.monotonic() < end:
            time.sleep(0.1)
        first.send_signal(signal.SIGKILL)
        first.wait()
    before = [x["command"] for x in lines(results) if "seconds" in x]
    assert before, (tmp_path / "first.log").read_text()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(before)} of {n_all} commands are done" in done.stderr
    found = lines(results)
    ends = [x["command"] for x in found if "seconds" in x]
    assert ends[: len(before)] == before and len({*ends}) == len(ends) == n_all
    assert not [x for x in found if "failed" in x]
    by_bench = {x["bench"]: x for x in found if "bench" in x}
    assert by_bench["tiles"]["rule_us"] > 0 and by_bench["defrag"]["share_of_copy"] > 0
    if "decode" in parts:
        assert by_bench["tests"]["passed"] == 1
        lines_of = [x for x in found if x.get("bench") == "decode attention"]
        sides = {x["side"] for x in lines_of if "layer_us" in x}
        assert {"kvrt pallas_gpu", "kvrt pallas_tpu", "kvrt chunked", "jax.nn xla"} <= sides
        assert "prefill step" in by_bench
    assert done.stdout == (tmp_path / "tables.md").read_text()
    assert "not run" not in done.stdout and "no figure here means anything" in done.stdout
    assert "tiles.json" in os.listdir(tmp_path)


def test_a_cpu_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # of the process that looks at the machine
    options = day.Options(
        out=tmp_path, smoke=False, only=(*plan.PARTS,), minutes=1.0, retry=False, keep_tiles=False
    )
    assert day.run(options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("JAX finds no GPU and no TPU") and err.count("\n") == 1
