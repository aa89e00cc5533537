"""Weights of eight bits: a start that quantizes and one that maps them compute the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_gguf

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_give_equal_outputs_at_int8(tmp_path):
    # Large enough for the processor to decide how products of eight bits are computed.
    tiny = tiny_gguf.TinyModel(n_layers=1, n_ff=1 << 14)
    model = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny)
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
