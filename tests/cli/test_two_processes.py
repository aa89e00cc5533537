"""Weights of eight bits: a start that quantizes and one that maps them compute the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvrt_models import hub

ROOT = Path(__file__).parents[2]


@pytest.mark.model
def test_two_processes_give_equal_outputs_at_int8(tmp_path):
    model = hub.resolve("smollm2-135m", progress=False)
    command = [sys.executable, "-m", "kvrt", "run", "-m", str(model), "--dtype", "int8"]
    command += ["-p", "Once upon a time", "-c", "256", "-n", "16", "--temp", "0", "--ignore_eos"]
    command += ["--json", "--logprobs", "5"]
    env = os.environ | {"KVRT_CACHE": str(tmp_path / "cache")}
    found = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=600)
        assert done.returncode == 0, done.stderr.decode()
        found.append(json.loads(done.stdout))
    assert len(list((tmp_path / "cache" / "weights").glob("*.safetensors"))) == 1
    first, second = found
    assert first["weights"] == second["weights"] == "int8" and len(first["tokens"]) == 16
    assert first["n_from_disk"] == 0 < second["n_from_disk"]
    # Log-probabilities of the best five, too: equal to the last bit.
    assert (first["tokens"], first["logprobs"]) == (second["tokens"], second["logprobs"])
