"""Engines on layers that read keys and values of others: logits of a dense model, hits included."""

import numpy as np
import pytest

from kvrt.options.serving import TierConfig
from kvrt.serving.request import Request
from tests.serving import engines
from tests.sharedlm import Dense

PROMPT = tuple((5 * i + i // 3) % 32 for i in range(22))


def checked(engine, name, tokens, n_predict=3):
    """Runs a request; the logits of each of its tokens are those of the dense model."""
    engine.add_request(Request(id=name, tokens=tokens, n_predict=n_predict))
    oracle, text, n_cached = Dense(engines.MODELS["shared"]()), list(tokens), 0
    wanted = oracle.step(text)[-1]
    while engine.has_work:
        for out in engine.step():
            for token in out.tokens:
                np.testing.assert_allclose(engine.logits(name), wanted, atol=1e-4, rtol=0)
                text.append(token)
                wanted = oracle.step([token])[-1]
            n_cached = out.n_cached
    return text, n_cached


# CI has hits and tiers of shared layers in the matrix.
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_requests_and_hits_are_those_of_a_dense_model(mode):
    engine = engines.make("shared", mode)
    text, n_cached = checked(engine, "a", PROMPT)
    assert not n_cached
    _, n_cached = checked(engine, "b", (*text[:-1], 9, 9, 9))
    assert n_cached >= 20


def test_pools_have_blocks_of_what_is_kept():
    """Four layers, of which two keep keys and values: a pool of one buffer for both kinds."""
    engine = engines.make("shared", "paged")
    layout = engine.device.layout
    assert [g.kv_of for g in layout.groups] == [((2, 0),), ((3, 1),)]
    assert [s.n_buffers for s in layout.stores] == [1]


@pytest.mark.slow
@pytest.mark.full
def test_blocks_come_back_from_a_tier():
    engine = engines.make(
        "shared", "paged", tiers=TierConfig(host_bytes=1 << 20, always=True), n_ctx=64
    )
    text, _ = checked(engine, "a", PROMPT)
    for i in range(3):
        checked(engine, f"other {i}", tuple(np.random.default_rng(i).integers(0, 32, 40).tolist()))
    _, n_cached = checked(engine, "again", (*text[:-1], 9))
    assert n_cached and engine.stats().tiers["host"].counts["loaded"]
    engine.close()
