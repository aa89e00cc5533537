"""`kvrt batch` on a real model with windows that slide, against what llama.cpp says to a text."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvrt.cli.main import main

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_layer_a_program")]
OPTIMISED = False  # products of float32 cost the same, and compiling less

# Steps of 64 tokens: a prompt is longer than a window of 512, and few sizes are compiled.
MODEL, N, N_UBATCH, N_SHARED = "gemma3-270m", 16, 64, 560
GOLDEN = Path(__file__).parents[1] / "golden" / "gemma3" / "plain-long.npz"


def test_it_says_the_same_alone_and_in_company(tmp_path, capfd):
    """Two prompts that begin alike run beside each other; the third finds what they have."""
    with np.load(GOLDEN) as data:
        tokens, greedy = data["tokens"].tolist(), data["greedy"].tolist()
    prompts = [tokens, [*tokens[:N_SHARED], *tokens[:9]], tokens]
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": f"r{i}", "tokens": prompt} for i, prompt in enumerate(prompts)]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["-i", str(given), "-o", str(out), "-c", "4096", "-b", str(N_UBATCH)]
    words += ["--n_seq_max", "2", "--mode", "paged"]
    words += ["--dtype", "f32", "--cache_type_k", "f32", "--cache_type_v", "f32"]
    code = main(["batch", "-m", MODEL, "--temp", "0", "-n", str(N), *words])
    assert code == 0, capfd.readouterr().err
    found = {r["id"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert found["r0"]["tokens"] == found["r2"]["tokens"] == greedy[:N]
    # The third waits for one of the first two, and finds what they have in common.
    assert found["r1"]["tokens"] and found["r2"]["n_cached"] >= N_SHARED
