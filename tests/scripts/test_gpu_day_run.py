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


def cells(path):
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [x for x in map(json.loads, whole) if "cell" in x]


def test_a_killed_day_is_resumed(tmp_path, budget):
    results = tmp_path / "results.jsonl"
    # Decode and prefill, in two of whose cells all kernels are interpreted, take longest.
    parts = budget(("tiles", "upkeep"), ("tests", "tiles", "decode", "prefill", "upkeep"))
    n_first, n_all = budget((1, 4), (3, 9))
    command = [*COMMAND, str(tmp_path), "--only", ",".join(parts)]
    with (tmp_path / "first.log").open("w") as log:
        first = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        end = time.monotonic() + 120
        while len(cells(results)) < n_first and time.monotonic() < end and first.poll() is None:
            time.sleep(0.1)
        first.send_signal(signal.SIGKILL)
        first.wait()
    before = [x["cell"] for x in cells(results)]
    assert len(before) >= n_first, (tmp_path / "first.log").read_text()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(before)} of {n_all} cells are measured" in done.stderr
    found = cells(results)
    assert [x["cell"] for x in found][: len(before)] == before
    assert len({x["cell"] for x in found}) == len(found) == n_all
    failed = {
        (x["cell"], n): s for x in found for n, s in x.get("sides", {}).items() if "failed" in s
    }
    assert not failed and not any("failed" in x for x in found)
    by_part = {x["part"]: x for x in found}
    assert set(by_part) == set(parts)
    assert by_part["tiles"]["rule_us"] > 0
    if "decode" in parts:
        assert by_part["tests"]["passed"] == 1
        assert {"pallas_gpu", "pallas_tpu", "chunked"} <= set(by_part["decode"]["sides"])
    assert done.stdout == (tmp_path / "tables.md").read_text()
    assert "Not run" not in done.stdout and "no figure here means anything" in done.stdout
    assert "tiles.json" in os.listdir(tmp_path)


def test_a_cpu_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # of the process that looks at the machine
    options = day.Options(
        out=tmp_path, smoke=False, only=plan.PARTS, minutes=1.0, retry=False, keep_tiles=False
    )
    with pytest.raises(SystemExit) as ended:
        day.run(options)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == ""
    assert err.startswith("JAX finds no GPU and no TPU") and err.count("\n") == 1
