"""Tiny random DeepSeeks against a live llama.cpp: log-probabilities of the whole vocabulary."""

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt_models.load import load
from tests.peer import server, tiny_latent

pytestmark = pytest.mark.model
OPTIMISED = False

TOLERANCE = 1e-4
N_PROMPT, N_PREDICT = 40, 24
MODELS = {
    "softmax": dict(sigmoid=False),
    "sigmoid": dict(),
    "yarn": dict(growth=0.8),
    "joined": dict(joined=True),
}


@pytest.fixture(scope="module", params=MODELS)
def peer(request, tmp_path_factory):
    """A file, its prompt, and what llama.cpp made of it."""
    path = tmp_path_factory.mktemp("peer") / f"{request.param}.gguf"
    tiny_latent.write_gguf(path, tiny_latent.TinyLatent(**MODELS[request.param]))
    prompt = np.random.default_rng(1).integers(0, 128, N_PROMPT).tolist()
    with server.llama_cpp(path, n_vocab=load(path).spec.n_vocab) as live:
        return path, prompt, live.complete(prompt, N_PREDICT)


@pytest.mark.parametrize("rope", ["write", pytest.param("read", marks=pytest.mark.full)])
def test_log_probs_are_those_of_llama_cpp(peer, rope):
    path, prompt, expected = peer
    # One model runs whole, the others by layer.
    programs = "whole" if path.stem == "joined" else "by_layer"
    config = CacheConfig(n_ctx=512, n_ubatch=8, rope=rope, programs=programs)
    runtime = Runtime(load(path).decoder, config)
    logits = [runtime.prefill(prompt)]
    logits += [runtime.decode({0: int(t)})[0] for t in expected.tokens[:-1]]
    found = np.asarray(logits, np.float64)
    found -= np.logaddexp.reduce(found, axis=1)[:, None]
    worst = float(np.abs(found - expected.log_probs).max())
    print(f"{path.stem} {rope}: largest difference {worst:.1e}")
    assert worst < TOLERANCE
    assert found.argmax(axis=1).tolist() == expected.tokens.tolist()
