"""Real models go on where llama.cpp stopped, and llama.cpp where they stopped."""

from pathlib import Path

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt.session.interop import llama
from kvrt_models.load import load

pytestmark = pytest.mark.model

GOLDEN = Path(__file__).parents[1] / "golden"
# llama.cpp rounds the new tokens' rows to f16 before they are seen, kvrt afterwards.
MODELS = {"smollm2": ("smollm2-135m", 2e-2), "gemma3": ("gemma3-270m", 2e-2)}


@pytest.fixture(scope="module", params=MODELS)
def real(request):
    """A name, its model and a runtime."""
    model = load(MODELS[request.param][0])
    # The files' 20 tokens and the 8 behind them are steps of one size.
    config = CacheConfig(n_ctx=512, n_ubatch=8, type_k="f16", type_v="f16")
    return request.param, model, Runtime(model.decoder, config)


def read(path, model, runtime):
    return llama.read(
        path,
        runtime.fingerprint,
        model.spec.groups,
        arch=model.spec.arch,
        n_vocab=runtime.n_vocab,
    )


def difference(logits, golden):
    """The largest difference over the 64 best, the 256 fixed ids and the log-sum-exp."""
    logits = np.asarray(logits)
    best = np.abs(logits[golden["logits.top_ids"][0]] - golden["logits.top"][0])
    probe = np.abs(logits[golden["logits.probe_ids"]] - golden["logits.probe"][0])
    lse = np.abs(np.logaddexp.reduce(logits.astype(np.float64)) - golden["logits.lse"][0])
    return float(max(best.max(), probe.max(), lse))


@pytest.mark.parametrize("kind", ["session", "seq"])
def test_a_file_of_llama_cpp_goes_on(real, kind):
    name, model, runtime = real
    with np.load(GOLDEN / name / "session.npz") as data:
        golden = dict(data)
    runtime.restore(read(GOLDEN / name / f"{kind}.bin", model, runtime))
    assert runtime.token_history(0)[1].tolist() == golden["tokens"][:20].tolist()
    worst = difference(runtime.prefill(golden["tokens"][20:].tolist()), golden)
    print(f"{name} {kind}: largest difference {worst:.1e}")
    assert worst < MODELS[name][1]
    assert [t.id for t in runtime.generate(16)] == golden["greedy"].tolist()


def test_rows_are_those_that_llama_cpp_computes(real):
    name, model, runtime = real
    runtime.clear()
    with np.load(GOLDEN / name / "session.npz") as data:
        runtime.prefill(data["tokens"][:20].tolist())
    found = runtime.snapshot()
    expected = read(GOLDEN / name / "session.bin", model, runtime)
    for a, b in zip(found.groups, expected.groups, strict=True):
        for which in ("k", "v"):
            x, y = (np.asarray(getattr(p.blocks[0], which), np.float32) for p in (a, b))
            worst = np.abs(x - y).max() / np.abs(y).max()
            print(f"{name} {which}: largest difference {worst:.1e} of the largest value")
            assert worst < 2e-3
