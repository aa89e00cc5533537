"""Engines on layers that keep one latent a token: logits of the plain form, hits and tiers."""

import numpy as np
import pytest

from kvrt.options.serving import TierConfig
from kvrt.serving.request import Request
from tests.latentlm import RANK, ROPE, Plain
from tests.serving import engines

pytestmark = pytest.mark.slow

PROMPT = tuple((5 * i + i // 3) % 32 for i in range(22))


def checked(engine, name, tokens, n_predict=3):
    """Runs a request; the logits of each of its tokens are those of the plain form."""
    engine.add_request(Request(id=name, tokens=tokens, n_predict=n_predict))
    oracle, text, n_cached = Plain(engines.MODELS["latent"]()), list(tokens), 0
    wanted = oracle.step(text)[-1]
    while engine.has_work:
        for out in engine.step():
            for token in out.tokens:
                np.testing.assert_allclose(engine.logits(name), wanted, atol=1e-4, rtol=0)
                text.append(token)
                wanted = oracle.step([token])[-1]
            n_cached = out.n_cached
    return text, n_cached


# CI has hits and tiers of latents in the matrix.
@pytest.mark.full
@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_requests_and_hits_are_those_of_the_plain_form(mode):
    engine = engines.make("latent", mode)
    text, n_cached = checked(engine, "a", PROMPT)
    assert not n_cached
    _, n_cached = checked(engine, "b", (*text[:-1], 9, 9, 9))
    assert n_cached >= 20


def test_a_block_has_each_number_once():
    engine = engines.make("latent", "paged")
    (store,) = engine.device.layout.stores
    assert (store.head_dim, store.head_dim_v, store.n_buffers) == (ROPE, RANK, 1)


@pytest.mark.full
def test_blocks_come_back_from_a_tier():
    engine = engines.make(
        "latent", "paged", tiers=TierConfig(host_bytes=1 << 20, always=True), n_ctx=64
    )
    text, _ = checked(engine, "a", PROMPT)
    for i in range(3):
        checked(engine, f"other {i}", tuple(np.random.default_rng(i).integers(0, 32, 40).tolist()))
    _, n_cached = checked(engine, "again", (*text[:-1], 9))
    assert n_cached and engine.stats().tiers["host"].counts["loaded"]
    engine.close()
