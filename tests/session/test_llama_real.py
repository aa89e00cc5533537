"""Real models go on where llama.cpp stopped, and llama.cpp where they stopped."""

from pathlib import Path

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt_models.load import load
from tests.peer import slots
from tests.test_golden import difference

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


@pytest.mark.parametrize("kind", ["session", "seq"])
def test_a_file_of_llama_cpp_goes_on(real, kind):
    name, model, runtime = real
    with np.load(GOLDEN / name / "session.npz") as data:
        golden = dict(data)
    slots.restored(runtime, model, GOLDEN / name / f"{kind}.bin")
    assert runtime.token_history(0)[1].tolist() == golden["tokens"][:20].tolist()
    logits = runtime.prefill(golden["tokens"][20:].tolist())
    worst = difference(logits, golden, "logits")
    print(f"{name} {kind}: largest difference {worst:.1e}")
    assert worst < MODELS[name][1]
    assert [t.id for t in runtime.generate(16)] == golden["greedy"].tolist()


def test_rows_are_those_that_llama_cpp_computes(real):
    name, model, runtime = real
    runtime.clear()
    with np.load(GOLDEN / name / "session.npz") as data:
        runtime.prefill(data["tokens"][:20].tolist())
    found = runtime.snapshot()
    expected = slots.read(runtime, model, GOLDEN / name / "session.bin")
    for a, b in zip(found.groups, expected.groups, strict=True):
        for which in ("k", "v"):
            x, y = (np.asarray(getattr(p.blocks[0], which), np.float32) for p in (a, b))
            worst = np.abs(x - y).max() / np.abs(y).max()
            print(f"{name} {which}: largest difference {worst:.1e} of the largest value")
            assert worst < 2e-3
