"""Queries that grow with their position: the step's queries alone, each by its own position."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec
from kvrt.attention import BlockView, LayerAttention, LayerKV, TokenQKV, attend
from kvrt.attention.step_attention import step_attention
from kvrt.config import QueryTemperature
from kvrt.errors import BadConfig
from kvrt.sizes import store_spec
from kvrt.store import kv as kv_store

H, D, B = 1, 4, 8
PLAIN = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=None)
WARM = dataclasses.replace(PLAIN, temperature=QueryTemperature(floor_scale=4.0, attn_scale=0.5))
CONFIG = CacheConfig(n_ctx=B, block_size=B, attention="chunked")
# Growth: ln(1 + floor((pos + 1) / 4)) / 2 + 1; the last token is padding.
POS = [2, 3, 10, 11, -1]
GROWTH = [1.0, 1 + np.log(2) / 2, 1 + np.log(3) / 2, 1 + np.log(4) / 2, 1.0]


def drawn():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((5, h, D)), jnp.float32) for h in (2 * H, H, H))
    view = BlockView(
        pos=jnp.asarray(POS, jnp.int32),
        bits=jnp.asarray([[1]] * 4 + [[0]], jnp.uint32),
        blocks=jnp.zeros(1, jnp.int32),
        n_blocks=jnp.int32(0),
        cell_pos=jnp.full((1, B), -1, jnp.int32),
        cell_seqs=jnp.zeros((1, B, 1), jnp.uint32),
    )
    return q, k, v, view


def attention(group, view):
    rows = kv_store.create(store_spec(group, CONFIG))
    return step_attention([rows], [[view]], [group], CONFIG, {}, None)


@pytest.mark.slow
def test_each_query_grows_by_its_own_position_and_no_key_does():
    q, k, v, view = drawn()
    step = attention(WARM, view)
    grown = q * jnp.asarray(GROWTH, jnp.float32)[:, None, None]
    rows = kv_store.create(store_spec(PLAIN, CONFIG))
    tokens, cached = TokenQKV(q=grown, k=k, v=v), LayerKV(k=rows.k[0], v=rows.v[0])
    expected, _ = attend(tokens, cached, view, LayerAttention(group=PLAIN))
    np.testing.assert_allclose(step(0, q, k, v), expected, atol=1e-6)
    np.testing.assert_array_equal(step.k_new[0], k)


@pytest.mark.slow
def test_a_group_without_a_temperature_leaves_queries_alone():
    q, k, v, view = drawn()
    warm, plain = (attention(group, view)(0, q, k, v) for group in (WARM, PLAIN))
    np.testing.assert_array_equal(warm[0], plain[0])  # positions below the first step
    assert float(jnp.abs(warm[2:4] - plain[2:4]).max()) > 1e-2


def test_steps_of_no_length_are_refused():
    with pytest.raises(BadConfig, match=r"floor_scale is 0\.0; it must be above 0"):
        QueryTemperature(floor_scale=0.0, attn_scale=0.1)
