"""A long run: context shifts cost no memory and no compiling."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_process import AS_HERE

ROOT = Path(__file__).parents[2]
# A run as a user's, that also notes the bytes of all arrays when each token comes. What the
# allocator of the process keeps for later is no part of that.
PROGRAM = """
import json, sys
import jax
from kvrt.cli.main import main
from kvrt.runtime.runtime import Runtime

held, generate = [], Runtime.generate

def noting(self, *args, **rest):
    for token in generate(self, *args, **rest):
        held.append(sum(x.nbytes for x in jax.live_arrays()))
        yield token

Runtime.generate = noting
code = main(sys.argv[2:])
open(sys.argv[1], "w").write(json.dumps(held))
sys.exit(code)
"""


@pytest.mark.slow
def test_many_tokens_in_128_cells(tiny, cache, tmp_path):
    n = 400
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "held.json")]
    command += ["run", "-m", str(tiny), "-p", "the sand of", "-c", "128"]
    command += ["--keep", "4", "-n", str(n), "--ignore_eos"]
    env = os.environ | AS_HERE | {"KVRT_CACHE": str(cache)}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=600)
    assert process.returncode == 0, process.stderr.decode()
    err = process.stderr
    # From the summary on.
    lines = err.decode().partition("\nprompt ")[2].splitlines()
    assert lines[1].startswith(f"generated  {n} tokens in ")
    # Prefill, first draw, decode and K-shift: the first shift compiles the last of them.
    assert lines[2].startswith("compiled   9 programs")
    assert lines[4].startswith("attention  ")
    # 127 cells fill up, and half of the 123 that are not kept goes.
    places = range(123, n, 61)
    n_shifts, n_dropped = len(places), 61 * len(places)
    upkeep = f"upkeep     {n_shifts} context shifts, {n_dropped} tokens dropped, 0 defrags"
    assert lines[6] == upkeep and n_shifts >= 4
    said = f"exactness  approximate from token 127 on: {n_dropped} older tokens were dropped"
    assert lines.pop().startswith(said)
    assert lines[7:] == [f"           61 of 127 dropped after {x} generated" for x in places]
    # The first shift comes after 123 tokens. Keys and values of 128 cells are 33 KB: not an array
    # is added by the others.
    held = json.loads((tmp_path / "held.json").read_text())
    assert len(held) == n
    assert max(held[150:]) <= max(held[:150]), (max(held[:150]), max(held[150:]))
    assert max(held) - min(held[1:]) < 33_000, (min(held[1:]), max(held))
