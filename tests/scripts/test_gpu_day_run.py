"""A whole day with tiny shapes, on a CPU: killed in the middle and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "scripts.gpu_day", "--smoke", "--out"]


def cells(path):
    if not path.exists():
        return []
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [x for x in map(json.loads, whole) if "cell" in x]


@pytest.mark.slow
def test_a_killed_day_is_resumed(tmp_path):
    results = tmp_path / "results.jsonl"
    with (tmp_path / "first.log").open("w") as log:
        first = subprocess.Popen([*COMMAND, str(tmp_path)], cwd=ROOT, stdout=log, stderr=log)
        end = time.monotonic() + 120
        while len(cells(results)) < 3 and time.monotonic() < end and first.poll() is None:
            time.sleep(0.1)
        first.send_signal(signal.SIGKILL)
        first.wait()
    before = [x["cell"] for x in cells(results)]
    assert len(before) >= 3, (tmp_path / "first.log").read_text()
    done = subprocess.run([*COMMAND, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"{len(before)} of 9 cells are measured" in done.stderr
    found = cells(results)
    assert [x["cell"] for x in found][: len(before)] == before
    assert len({x["cell"] for x in found}) == len(found) == 9
    failed = {
        (x["cell"], n): s for x in found for n, s in x.get("sides", {}).items() if "failed" in s
    }
    assert not failed and not any("failed" in x for x in found)
    by_part = {x["part"]: x for x in found}
    assert set(by_part) == {"tests", "tiles", "decode", "prefill", "upkeep"}
    assert by_part["tests"]["passed"] == 1 and by_part["tiles"]["rule_us"] > 0
    assert {"pallas_gpu", "pallas_tpu", "chunked"} <= set(by_part["decode"]["sides"])
    assert done.stdout == (tmp_path / "tables.md").read_text()
    assert "Not run" not in done.stdout and "no figure here means anything" in done.stdout
    assert "tiles.json" in os.listdir(tmp_path)


@pytest.mark.slow
def test_a_cpu_is_refused(tmp_path):
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [x for x in COMMAND if x != "--smoke"]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("JAX finds no GPU and no TPU") and done.stderr.count("\n") == 1
