"""One token over cells of its own and of others, whatever the others hold, in all KV dtypes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec, MaskSpec, RopeSpec
from kvrt.attention import BlockView, LayerAttention, LayerKV, TokenQKV, attend, rope
from kvrt.sizes import store_spec
from kvrt.store import kv as kv_store

H, D, B, N = 2, 32, 256, 7
HIDDEN = [0, 3, 255, *range(300, 320)]
TYPES = ["f32", "bf16", "f16", "int8", "q8_0", "int4"]
MASKS = [MaskSpec(), MaskSpec(kind="window", size=400), MaskSpec(kind="window", size=90, n_sink=2)]
POS = N * B - 5


jitted_attend, jitted_write = jax.jit(attend), jax.jit(kv_store.write_kv)


@functools.cache
def store_of(kv_dtype):
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((N * B, H, D)).astype(np.float32) for _ in range(2))
    config = CacheConfig(n_ctx=N * B, block_size=B, type_k=kv_dtype, type_v=kv_dtype)
    spec = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=None)
    empty = kv_store.create(store_spec(spec, config))
    return jitted_write(empty, np.arange(N * B, dtype=np.int32), [k], [v])


def spoilt(cached, cell_axis, cells, bad):
    """Keys or values whose float parts are `bad` in some cells; one of bits is that number's."""

    def one(x):
        if not jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != jnp.uint16:
            return x
        bits = np.asarray(bad, jnp.bfloat16).view(np.uint16)
        value = bits if x.dtype == jnp.uint16 else bad
        index: list = [slice(None)] * 4
        index[0], index[cell_axis] = np.divmod(np.asarray(cells), B)
        x = np.array(x)
        x[tuple(index)] = value
        return x

    return jax.tree.map(one, cached)


def attention_of(k, v, mask, implementation="chunked", unrotated=False):
    rng = np.random.default_rng(1)
    q, *own = (rng.standard_normal((1, h, D)).astype(np.float32) for h in (2 * H, H, H))
    pos = np.arange(N * B, dtype=np.int32)
    seqs = np.ones(N * B, np.uint32)
    # Some cells are released, others another sequence's, those from POS on of a later position.
    pos[HIDDEN[::2]], seqs[HIDDEN[::2]], seqs[HIDDEN[1::2]] = -1, 0, 2
    view = BlockView(
        pos=np.array([POS], np.int32),
        bits=np.ones((1, 1), np.uint32),
        blocks=np.arange(N, dtype=np.int32)[::-1],
        n_blocks=np.int32(N),
        cell_pos=pos.reshape(N, B),
        cell_seqs=seqs.reshape(N, B, 1),
    )
    group = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=None, mask=mask)
    tables = rope_of(view) if unrotated else None
    how = LayerAttention(group=group, rope=tables, implementation=implementation)
    return jitted_attend(TokenQKV(q=q, k=own[0], v=own[1]), LayerKV(k=k, v=v), view, how)


@jax.jit
def rope_of(view):
    return rope.make(RopeSpec(n_rot=D), view, N * B, unrotated=True)


def attended(*args, **options):
    """The same in NumPy."""
    out, lse = attention_of(*args, **options)
    return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize("kv_dtype", TYPES)
def test_what_no_token_sees_changes_no_bit(kv_dtype):
    store = store_of(kv_dtype)
    k, v = store.k[0], store.v[0]
    clean = attended(k, v, MASKS[0])
    np.testing.assert_allclose(attended(k, v, MASKS[0], "reference")[0], clean[0], atol=2e-6)
    cells = [*HIDDEN, *range(POS + 1, N * B)]
    for bad in (np.nan, np.inf):
        found = attended(spoilt(k, 3, cells, bad), spoilt(v, 2, cells, bad), MASKS[0])
        for x, y in zip(found, clean, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: f"{m.kind}-{m.size}")
@pytest.mark.parametrize("unrotated", [False, True])
def test_masks_and_unrotated_keys_hide_as_well(mask, unrotated):
    store = store_of("f32")
    k, v = store.k[0], store.v[0]
    clean = attended(k, v, mask, unrotated=unrotated)
    wanted = attended(k, v, mask, "reference", unrotated)
    np.testing.assert_allclose(clean[0], wanted[0], atol=2e-6)
    cells = [*HIDDEN] if mask.kind == "full" else [*HIDDEN, *range(10, POS - mask.size + 1)]
    found = attended(k, spoilt(v, 2, cells, np.nan), mask, unrotated=unrotated)
    np.testing.assert_array_equal(found[0], clean[0])


def test_a_value_that_is_seen_reaches_the_token():
    store = store_of("f32")
    bad = np.array(store.v[0])
    bad[1, 1, 100, 7] = np.nan
    out, _ = attended(store.k[0], bad, MASKS[0])
    wanted = np.zeros(out.shape, bool)
    wanted[0, 2:, 7] = True  # two query heads read the kv head
    np.testing.assert_array_equal(np.isnan(out), wanted)


@pytest.mark.parametrize("kv_dtype", TYPES)
def test_products_read_float32_a_tile_at_a_time(kv_dtype):
    """Nothing multiplies in the stored type; loops widen a tile, or the eight that sums fuse."""
    store = store_of(kv_dtype)
    lowered = jax.jit(lambda k, v: attention_of(k, v, MASKS[0])).lower(store.k[0], store.v[0])
    text = lowered.as_text()
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    types = [re.findall(r"tensor<([\dx]+)x(\w+)>", line) for line in dots]
    assert len(types) == 3  # its own score; scores and values of a tile
    assert {dtype for each in types for _, dtype in each} == {"f32"}
    if kv_dtype != "f32":
        wide = re.findall(r"tensor<([\dx]+)xf32>", text)
        sizes = {int(np.prod([int(n) for n in x.split("x")])) for x in wide}
        assert max(sizes) == H * D * B * (1 if kv_dtype in ("q8_0", "int4") else 8)
