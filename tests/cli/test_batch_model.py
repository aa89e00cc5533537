"""`kvrt batch` on a real model with windows that slide, against each text alone."""

import json

import pytest

from kvrt import CacheConfig, Runtime
from kvrt.cli.main import main
from kvrt_models.load import load

pytestmark = pytest.mark.model

# Steps of 64 tokens: a prompt is a little longer than a window, and few sizes are compiled.
MODEL, N, N_UBATCH, N_SHARED = "gemma3-270m", 16, 64, 560
BOOK = "The otter swam to the far side of the river and looked back at the mill. " * 33
PROMPTS = [BOOK + end for end in ("What did the otter see?", "The river was", "Then it")]


@pytest.fixture(scope="module")
def alone():
    """What a runtime says to each prompt by itself."""
    model = load(MODEL)
    runtime, said = Runtime(model.decoder, CacheConfig(n_ctx=1024, n_ubatch=N_UBATCH)), []
    for prompt in PROMPTS:
        runtime.seq_rm(0)
        ids = model.tokenizer.encode(prompt)
        assert len(ids) > N_SHARED
        runtime.append(ids)
        stop_ids = tuple(sorted(model.tokenizer.eos_ids))
        said.append([token.id for token in runtime.generate(N, stop_ids=stop_ids)])
    return said


def test_it_says_the_same_alone_and_in_company(tmp_path, capfd, alone):
    """Prompts of about 560 tokens that differ in their ends, windows of 512."""
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": f"r{i}", "prompt": prompt} for i, prompt in enumerate(PROMPTS)]
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["-i", str(given), "-o", str(out), "-c", "4096", "-b", str(N_UBATCH)]
    words += ["--n_seq_max", "2", "--mode", "paged"]
    words += ["--dtype", "f32", "--cache_type_k", "f32", "--cache_type_v", "f32"]
    code = main(["batch", "-m", MODEL, "--temp", "0", "-n", str(N), *words])
    assert code == 0, capfd.readouterr().err
    found = {r["id"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert [found[f"r{i}"]["tokens"] for i in range(3)] == alone
    # The third waits for one of the first two, and finds what they have in common.
    assert found["r2"]["n_cached"] >= N_SHARED
