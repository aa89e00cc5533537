"""Tiny random models against a live llama.cpp: log-probabilities of the whole vocabulary."""

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt_models.load import load
from tests.peer import server, tiny_gguf, tiny_latent
from tests.peer.slots import assert_same_text, followed

pytestmark = pytest.mark.model
OPTIMISED = False

# Gemma's GELU is looked up in a table of float16 there.
TOLERANCE = {"gemma2": 5e-3}
N_PROMPT, N_PREDICT = 40, 24
# Models that run whole as well; all run by layer.
WHOLE_TOO = ("llama", "gemma2", "gpt-oss", "deepseek-joined")
MODELS = {
    "llama": dict(arch="llama"),
    "qwen2": dict(arch="qwen2"),
    "qwen3": dict(arch="qwen3"),
    "tied": dict(tied=True),
    "mixture": dict(mixture=True),
    "linear": dict(scaling="linear", factor=4.0),
    "yarn": dict(scaling="yarn", factor=4.0),
    "freq_factors": dict(freq_factors=True),
    "gemma2": dict(arch="gemma2", tied=True, n_layers=4),
    "gpt-oss": dict(arch="gpt-oss", n_layers=4, scaling="yarn", factor=4.0),
}
LATENT = {
    "deepseek-softmax": dict(sigmoid=False),
    "deepseek-sigmoid": dict(),
    "deepseek-yarn": dict(growth=0.8),
    "deepseek-joined": dict(joined=True),
}


@pytest.fixture(scope="module", params=[*MODELS, *LATENT])
def peer(request, tmp_path_factory):
    """A file, its prompt, and what llama.cpp made of it."""
    path = tmp_path_factory.mktemp("peer") / f"{request.param}.gguf"
    if request.param in LATENT:
        tiny_latent.write_gguf(path, tiny_latent.TinyLatent(**LATENT[request.param]))
    else:
        tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(**MODELS[request.param]))
    prompt = np.random.default_rng(1).integers(0, 128, N_PROMPT).tolist()
    with server.llama_cpp(path, n_vocab=load(path).spec.n_vocab) as live:
        return path, prompt, live.complete(prompt, N_PREDICT)


@pytest.mark.parametrize("rope", ["write", pytest.param("read", marks=pytest.mark.full)])
def test_log_probs_are_those_of_llama_cpp(peer, rope):
    path, prompt, expected = peer
    for programs in ("by_layer", *["whole"] * (path.stem in WHOLE_TOO)):
        config = CacheConfig(n_ctx=512, n_ubatch=8, rope=rope, programs=programs)
        check(Runtime(load(path).decoder, config), path, prompt, expected)


def check(runtime, path, prompt, expected):
    """Log-probabilities of the prompt's last token and of all that follow, and the text."""
    logits = [runtime.prefill(prompt), *followed(runtime, expected)]
    assert_same_text(logits, expected, TOLERANCE.get(path.stem, 1e-4))
    if path.stem == "llama":  # what a run of steps draws is of no family
        runtime.clear()
        runtime.prefill(prompt)
        assert [t.id for t in runtime.generate(N_PREDICT)] == expected.tokens.tolist()
