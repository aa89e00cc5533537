"""Tiny models with recurrent layers against a live llama.cpp: log-probabilities of all tokens."""

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt_models.load import load
from tests.peer import server, tiny_recurrent
from tests.peer.slots import assert_same_text, followed

pytestmark = pytest.mark.model
OPTIMISED = False

TOLERANCE = 1e-4
N_PROMPT, N_PREDICT, N_FORK = 40, 24, 25
GRANITE = dict(arch="granitehybrid", attention=(1,))
MODELS = {
    "mamba": dict(arch="mamba", rank=4, tied=True),
    "mamba2-groups": dict(arch="mamba2", n_groups=2),
    "jamba-experts": dict(arch="jamba", attention=(1,), experts=(0, 2)),
    "bamba": dict(**GRANITE, n_rot=8, n_groups=2),
    "granite-experts": dict(**GRANITE, n_rot=0, experts=(0, 1, 2), scales=(3.0, 0.5, 2.0, 0.125)),
}


@pytest.fixture(scope="module", params=MODELS)
def peer(request, tmp_path_factory):
    """A decoder, and by prompt what llama.cpp made of two that part after N_FORK tokens."""
    model = tiny_recurrent.TinyRecurrent(**MODELS[request.param])
    path = tmp_path_factory.mktemp("peer") / f"{request.param}.gguf"
    tiny_recurrent.write_gguf(path, model)
    draw = np.random.default_rng(1)
    prompt = draw.integers(0, 128, N_PROMPT).tolist()
    other = prompt[:N_FORK] + draw.integers(0, 128, N_PROMPT - N_FORK).tolist()
    loaded = load(path)
    with server.llama_cpp(path, n_vocab=loaded.spec.n_vocab) as live:
        return loaded.decoder, [(p, live.complete(p, N_PREDICT)) for p in (prompt, other)]


def runtime(decoder, **change):
    config = {"n_ctx": 512, "n_ubatch": 8, "n_seq_max": 2, "programs": "by_layer", **change}
    return Runtime(decoder, CacheConfig(**config))


def check(logits, expected):
    """Logits before each token against llama.cpp's log-probabilities."""
    assert_same_text(logits, expected, TOLERANCE)
    assert len(set(expected.tokens.tolist())) > 4


def test_log_probs_are_those_of_llama_cpp(peer):
    decoder, [(prompt, expected), _] = peer
    turns = any(g.rope for g in decoder.groups)
    for rope in ("write", "read") if turns else ("write",):
        at = runtime(decoder, rope=rope)
        for size in (7, N_PROMPT):
            at.clear()
            for start in range(0, N_PROMPT, size):
                logits = [at.prefill(prompt[start : start + size])]
            check(logits + followed(at, expected), expected)
        at.clear()
        at.prefill(prompt)
        assert [t.id for t in at.generate(N_PREDICT, stride=8)] == expected.tokens.tolist()


@pytest.mark.parametrize("peer", ["jamba-experts", "bamba"], indirect=True)
def test_both_sides_of_a_fork_are_those_of_llama_cpp(peer):
    """With whole programs, where the other tests run by layer."""
    decoder, [(prompt, mine), (other, theirs)] = peer
    at = runtime(decoder, programs="whole")
    at.prefill(prompt[:N_FORK])
    at.seq_cp(0, 1)
    rows = [[at.append(p[N_FORK:], s)[0]] for s, p in enumerate((prompt, other))]
    for tokens in zip(mine.tokens[:-1].tolist(), theirs.tokens[:-1].tolist(), strict=True):
        logits = at.decode(dict(enumerate(tokens)))
        for s in (0, 1):
            rows[s].append(logits[s])
    check(rows[0], mine)
    check(rows[1], theirs)


@pytest.mark.parametrize("peer", ["mamba", "bamba"], indirect=True)
def test_a_new_prompt_after_a_removal_is_that_of_llama_cpp(peer):
    decoder, [(prompt, mine), (other, theirs)] = peer
    at = runtime(decoder, n_rs_seq=3)
    at.prefill(other)
    followed(at, theirs)
    at.seq_rm(0)
    assert at.seq_pos_max(0) == -1
    rows = [np.asarray(x) for x in (at.prefill(prompt), *followed(at, mine))]
    check(rows, mine)
    # Three tokens back, and the same ones again.
    end = N_PROMPT + N_PREDICT - 1
    at.seq_rm(0, end - 3)
    again = [np.asarray(at.decode({0: t})[0]) for t in mine.tokens[-4:-1].tolist()]
    assert np.array_equal(again, rows[-3:])
    at.seq_rm(None)
    check([at.prefill(other), *followed(at, theirs)], theirs)
