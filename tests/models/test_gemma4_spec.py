"""What a config.json says of Gemma 4's text model, which layers share, and what is refused."""

import numpy as np
import pytest
from headers import GOLDEN, hf, numbered_kinds

from kvrt import CacheConfig, Runtime
from kvrt_models.layers import tensors
from kvrt_models.load import load
from kvrt_models.spec import Experts

SHARED, WIDE, MIXED = "gemma4", "gemma4-wide", "gemma4-experts"


def test_the_last_layers_read_the_last_of_their_kind():
    windowed, full = hf(SHARED).groups
    assert (windowed.layers, windowed.kv_of) == ((0, 1), ((3, 1), (4, 1)))
    assert (full.layers, full.kv_of) == ((2,), ((5, 2),))
    assert (windowed.head_dim, full.head_dim, windowed.mask.size) == (8, 16, 8)
    assert {g.scale for g in (windowed, full)} == {1.0}
    found = hf(SHARED, num_kv_shared_layers=0)
    assert [g.kv_of for g in found.groups] == [(), ()]
    assert (hf(SHARED).n_ff_of(2), hf(SHARED).n_ff_of(5), hf(SHARED).n_layers) == (24, 48, 6)


def test_layers_of_one_kind_have_any_index():
    """Windowed and full ones, and those that read others', whose networks are wide."""
    assert numbered_kinds(hf(SHARED)) == [0, 0, 1, 2, 2, 3]
    assert numbered_kinds(hf(WIDE)) == [0, 1, 1] and numbered_kinds(hf(MIXED)) == [0, 1]


def test_readers_have_queries_alone():
    found = hf(SHARED)
    parts = tensors.weight_parts(found)
    assert parts["blk.5.attn_qkv.weight"] == ("blk.5.attn_q.weight",)
    assert "blk.5.attn_k_norm.weight" not in parts and "blk.2.attn_k_norm.weight" in parts
    one = tensors.weight_parts(hf(WIDE))["blk.1.attn_qkv.weight"]
    assert one == ("blk.1.attn_q.weight", "blk.1.attn_k.weight")


def test_sizes_of_full_layers_in_both_forms():
    full = hf(WIDE).groups[1]
    assert (full.n_kv_heads, full.head_dim, hf(WIDE).v_of_k) == (1, 16, (1, 2))
    own = dict(global_head_dim=16, num_global_key_value_heads=1)
    assert hf(WIDE, without=["per_layer_config"], **own) == hf(WIDE)
    # Kv heads of their own belong to layers whose values are their keys.
    other = hf(WIDE, without=["per_layer_config"], attention_k_eq_v=False, **own)
    assert (other.groups[1].n_kv_heads, other.v_of_k) == (2, ())
    rope = full.rope
    assert (rope.n_rot, rope.freq_factors[:2], len(rope.freq_factors)) == (16, (1.0, 1.0), 8)
    assert set(rope.freq_factors[2:]) == {1e30}


def test_experts_lie_beside_the_dense_network():
    found = hf(MIXED)
    sizes = dict(layers=(0, 1), n_experts=6, n_used=2, n_ff=12)
    assert found.experts == Experts(**sizes, scoring="softmax", beside=True)
    names = tensors.tensors_of(found)
    both = np.arange(6 * 24 * 32).reshape(6, 24, 32)
    gate, up = (
        row.make([both], row.shape)
        for row in (names[f"blk.0.ffn_{x}_exps.weight"] for x in ("gate", "up"))
    )
    np.testing.assert_array_equal(np.concatenate([gate, up], axis=1), both)


@pytest.mark.slow
def test_what_is_shared_is_kept_once():
    """Two windowed layers of 2 heads of 8 and one full layer of 2 heads of 16, keys and values."""
    runtime = Runtime(load(GOLDEN / SHARED).decoder, CacheConfig(n_ctx=64, block_size=64))
    kept = [len(store.k) for store in runtime.cache.stores]
    assert kept == [2, 1]
    assert [store.k[0].shape[1:3] for store in runtime.cache.stores] == [(2, 8), (2, 16)]
