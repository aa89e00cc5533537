"""Tiny models with recurrent layers against a live llama.cpp: log-probabilities of all tokens."""

import numpy as np
import pytest

from models.load import load
from tests.models import stand_in
from tests.peer import server, tiny_recurrent

pytestmark = pytest.mark.model

TOLERANCE = 1e-4
N_PROMPT, N_PREDICT = 40, 24
GRANITE = dict(arch="granitehybrid", attention=(1,))
MODELS = {
    "mamba": dict(arch="mamba"),
    "mamba-tied": dict(arch="mamba", rank=4, tied=True),
    "mamba2": dict(arch="mamba2"),
    "mamba2-groups": dict(arch="mamba2", n_groups=2),
    "jamba": dict(arch="jamba", n_layers=4, attention=(1, 3), rank=4),
    "jamba-experts": dict(arch="jamba", attention=(1,), experts=(0, 2)),
    "bamba": dict(**GRANITE, n_rot=8, n_groups=2),
    "granite": dict(**GRANITE, n_rot=0, scales=(3.0, 0.5, 2.0, 0.125)),
    "granite-experts": dict(**GRANITE, n_rot=0, experts=(0, 1, 2), scales=(3.0, 0.5, 2.0, 0.125)),
}


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_llama_cpp(name, tmp_path):
    model = tiny_recurrent.TinyRecurrent(**MODELS[name])
    path = tiny_recurrent.write_gguf(tmp_path / f"{name}.gguf", model)
    prompt = np.random.default_rng(1).integers(0, 128, N_PROMPT).tolist()
    loaded = load(path)
    with server.llama_cpp(path, n_vocab=loaded.spec.n_vocab) as live:
        expected = live.complete(prompt, N_PREDICT)
    tokens = [*prompt, *map(int, expected.tokens[:-1])]
    parts = [N_PROMPT] + [1] * (N_PREDICT - 1)
    found = stand_in.logits(loaded.decoder, tokens, parts)[N_PROMPT - 1 :].astype(np.float64)
    found -= np.logaddexp.reduce(found, axis=1)[:, None]
    worst = float(np.abs(found - expected.log_probs).max())
    print(f"{name}: largest difference {worst:.1e}")
    assert worst < TOLERANCE
    assert found.argmax(axis=1).tolist() == expected.tokens.tolist()
    assert len(set(expected.tokens.tolist())) > 4
