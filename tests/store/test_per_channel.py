"""Keys in codes by channel: what the oracle has after the same writes, and what attention reads."""

import dataclasses
import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from plainchannel import SIZE, Keys

from kvrt import GroupSpec, RopeSpec
from kvrt.attention import BlockView, LayerAttention, LayerKV, SeqView, TokenQKV, attend
from kvrt.kv_types import CHANNEL_CODECS, N_TAIL
from kvrt.sizes import Extent, StoreSpec
from kvrt.store import kv as kv_store
from kvrt.store import per_channel, rope
from kvrt.upkeep.shift import ShiftPlan, apply_shift
from tests.store.plaincodec import head_bytes

H, D, B, N_BLOCKS = 2, 16, 64, 16
N_CELLS = B * N_BLOCKS
GROUP = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=RopeSpec(n_rot=D))


def spec_of(name):
    extent = Extent(n_cells=N_CELLS, block_size=B)
    return StoreSpec(n_buffers=1, n_kv_heads=H, head_dim=D, extent=extent, type_k=name)


def plain(name):
    return Keys(N_CELLS, H, D, N_TAIL // SIZE, CHANNEL_CODECS[name].bits)


write = jax.jit(kv_store.write_kv, donate_argnums=0)
move = jax.jit(kv_store.move_kv, donate_argnums=0)
clear = jax.jit(kv_store.clear_kv, donate_argnums=0)
take, last = jax.jit(kv_store.take_kv), jax.jit(per_channel.written_last)


@functools.partial(jax.jit, donate_argnums=0)
def shift(store, plan):
    return apply_shift(store, plan, GROUP, N_CELLS)


@functools.cache
def keys_of(seed):
    """Keys with a few channels far from zero, as real ones have; f16 holds them."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((N_CELLS, H, D)).astype(np.float32)
    keys[..., :3] = 40 * keys[..., :3] - 100
    return keys


def both(name, store, oracle, slots, new, size=16):
    """Writes in steps of `size`, padded."""
    for start in range(0, len(slots), size):
        at, part = slots[start : start + size], new[start : start + size]
        padded = np.full(size, N_CELLS, np.int32)
        padded[: len(at)] = at
        full = np.zeros((size, H, D), np.float32)
        full[: len(at)] = part
        store = write(store, padded, [full], [full])
        oracle.put(list(at), part)
    return store


def check(store, oracle):
    """What is read, and what is taken out, is what the oracle has."""
    found = np.asarray(take(store, np.arange(N_CELLS, dtype=np.int32))[0][0])
    np.testing.assert_array_equal(found, oracle.all().astype(np.float16))
    k = store.k[0]
    held = {int(g): np.asarray(k.tail)[i] for i, g in enumerate(k.group) if g >= 0}
    assert set(held) == set(oracle.tail)
    for g, keys in held.items():
        np.testing.assert_array_equal(np.moveaxis(keys, -1, 0), oracle.tail[g])


# --- the oracle -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANNEL_CODECS)
def test_a_long_text_leaves_what_the_oracle_has(name):
    """300 tokens in steps of 16, and 300 one by one."""
    store, oracle = kv_store.create(spec_of(name)), plain(name)
    store = both(name, store, oracle, range(300), keys_of(0)[:300])
    check(store, oracle)
    store = both(name, store, oracle, range(300, 600), keys_of(0)[300:600], size=1)
    check(store, oracle)
    # Of 19 groups four are as they came, and no other is.
    for g in range(19):
        at = slice(g * SIZE, min((g + 1) * SIZE, 600))
        came = np.array_equal(oracle.all()[at], keys_of(0)[at].astype(np.float16))
        assert came == (g >= 15)


@pytest.mark.parametrize("n", [N_TAIL - 1, N_TAIL, N_TAIL + 1, 2 * N_TAIL])
def test_nothing_is_coded_before_the_tail_is_full(n):
    store = kv_store.create(spec_of("kivi2"))
    oracle = plain("kivi2")
    store = both("kivi2", store, oracle, range(n), keys_of(1)[:n])
    check(store, oracle)
    n_coded = max(-(-n // SIZE) - N_TAIL // SIZE, 0)
    assert set(oracle.tail) == set(range(n_coded, -(-n // SIZE)))
    assert bool(np.asarray(store.k[0].quantized.data).any()) == (n_coded > 0)


def test_places_keep_their_order_behind_2_to_the_31_writes():
    young = kv_store.create(spec_of("kivi2")).k[0]
    written = np.array([3, 0, 7, 5], np.int32)
    young = dataclasses.replace(young, written=jnp.asarray(written))
    shifted = np.where(written, written + (2**31 - 8), 0).astype(np.int32)
    old = dataclasses.replace(young, written=jnp.asarray(shifted))
    for at in (1, 0, 4, 2, 2, 1, 3):
        young, old = (dataclasses.replace(x, written=last(x, np.int32(at))) for x in (young, old))
        assert np.argsort(young.written).tolist() == np.argsort(old.written).tolist()
    assert 0 < np.min(old.written) and np.max(old.written) < 20


PIECES = st.tuples(
    st.sampled_from([0, 1, 16, 31, 32, 40, 96, 130, 512, 990]),
    st.integers(1, 40),
    st.sampled_from([1, 16]),
    st.booleans(),
)


@pytest.mark.slow
@given(pieces=st.lists(PIECES, min_size=1, max_size=8), seed=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_any_writes_leave_what_the_oracle_has(pieces, seed):
    name = "kivi4" if seed % 2 else "kivi2"
    store, oracle, rng = kv_store.create(spec_of(name)), plain(name), np.random.default_rng(seed)
    for start, n, size, shuffled in pieces:
        slots = np.arange(start, min(start + n, N_CELLS))
        if shuffled:
            slots = rng.permutation(slots)
        store = both(name, store, oracle, slots, rng.standard_normal((len(slots), H, D)), size)
    check(store, oracle)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANNEL_CODECS)
def test_a_group_that_comes_back_keeps_its_codes(name):
    """Decoded and coded again it is what it was, where no cell of it was written."""
    store, oracle = kv_store.create(spec_of(name)), plain(name)
    store = both(name, store, oracle, range(320), keys_of(2)[:320])
    before = oracle.all()
    # Rewritten with what it holds: the group comes back and leaves again.
    store = both(name, store, oracle, [0], before[:1], size=1)
    store = both(name, store, oracle, range(320, 480), keys_of(2)[320:480])
    check(store, oracle)
    assert 0 not in oracle.tail
    np.testing.assert_allclose(oracle.all()[:32], before[:32], atol=0.1)


# --- what else changes rows ----------------------------------------------------------------------


def test_moves_read_all_before_they_write():
    store, oracle = kv_store.create(spec_of("kivi4")), plain("kivi4")
    store = both("kivi4", store, oracle, range(400), keys_of(3)[:400])
    src, dst = np.arange(300, 364), np.arange(10, 74)
    wanted = oracle.all()[src].astype(np.float16)
    store = move(store, src.astype(np.int32), dst.astype(np.int32), np.int32(64))
    oracle.put(list(dst), wanted)
    check(store, oracle)
    np.testing.assert_array_equal(oracle.all()[dst], wanted)


def test_a_shift_codes_again_what_it_turned_and_nothing_else():
    store, oracle = kv_store.create(spec_of("kivi4")), plain("kivi4")
    store = both("kivi4", store, oracle, range(400), keys_of(3)[:400])
    codes = np.asarray(store.k[0].quantized.data).copy()
    delta = np.zeros((N_BLOCKS, B), np.int32)
    delta[0, 10:20], delta[6, 5] = 7, -3
    moved = delta.reshape(-1) != 0
    blocks = np.zeros(N_BLOCKS, np.int32)
    blocks[:2] = [0, 6]
    keys = oracle.all()
    freqs = rope.frequencies(GROUP.rope, N_CELLS)
    angle = delta.reshape(-1, 1) * np.asarray(freqs, np.float64)
    cos, sin = (f(angle)[:, None].astype(np.float32) for f in (np.cos, np.sin))
    a, b = keys[..., : D // 2], keys[..., D // 2 :]
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    store = shift(store, ShiftPlan(delta=delta, blocks=blocks, n_blocks=np.int32(2)))
    oracle.replace(turned, moved)
    found = np.asarray(take(store, np.arange(N_CELLS, dtype=np.int32))[0][0])
    # Sines of both sides differ in their last bits, so that a code may differ by one.
    step = 260 / 15
    np.testing.assert_allclose(found, oracle.all(), atol=1.1 * step)
    near = np.abs(found - oracle.all()) < 0.2
    assert near.mean() > 0.999
    new = np.asarray(store.k[0].quantized.data)
    np.testing.assert_array_equal(new[1:], codes[1:])
    np.testing.assert_array_equal(new[0, ..., 32:], codes[0, ..., 32:])
    assert (new[0, ..., :32] != codes[0, ..., :32]).any()
    # The other moved cell lies in the tail, where it is turned and not coded.
    assert moved[389] and 389 // SIZE in oracle.tail
    np.testing.assert_allclose(found[389], turned[389], rtol=2e-3)


def test_what_is_released_can_be_zeroed():
    store, oracle = kv_store.create(spec_of("kivi2")), plain("kivi2")
    store = both("kivi2", store, oracle, range(300), keys_of(4)[:300])
    released = np.zeros(N_CELLS, bool)
    released[:64] = released[290:] = True
    before = oracle.all()
    store = clear(store, released.reshape(N_BLOCKS, B))
    found = np.asarray(take(store, np.arange(N_CELLS, dtype=np.int32))[0][0])
    assert not found[:64].any() and not found[290:].any()
    np.testing.assert_array_equal(found[64:290], before[64:290].astype(np.float16))


# --- attention and memory -------------------------------------------------------------------------


@pytest.mark.parametrize("n", [N_TAIL - 1, N_TAIL, N_TAIL + 1, 2 * N_TAIL])
@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_attention_reads_what_the_oracle_has(implementation, n):
    store, oracle = kv_store.create(spec_of("kivi2")), plain("kivi2")
    store = both("kivi2", store, oracle, range(n), keys_of(5)[:n])
    wide = np.moveaxis(oracle.all().reshape(N_BLOCKS, B, H, D), 1, -1)
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((2, h, D)).astype(np.float32) for h in (2 * H, H, H))
    pos = np.where(np.arange(N_CELLS) < n, np.arange(N_CELLS), -1).astype(np.int32)
    seqs = (pos >= 0).astype(np.uint32)
    blocks = np.arange(N_BLOCKS, dtype=np.int32)
    share = dict(
        pos=np.full(2, n, np.int32),
        bits=np.ones((2, 1), np.uint32),
        cell_pos=pos.reshape(N_BLOCKS, B),
        cell_seqs=seqs.reshape(N_BLOCKS, B, 1),
    )
    views = [
        BlockView(**share, blocks=blocks, n_blocks=np.int32(5)),
        SeqView(**share, blocks=np.tile(blocks, (2, 1)), n_blocks=np.full(2, 5, np.int32)),
    ]
    how = LayerAttention(group=GROUP, implementation=implementation)
    for view in views:
        out = [
            attend(TokenQKV(q=q, k=k, v=v), LayerKV(k=x, v=store.v[0]), view, how)[0]
            for x in (store.k[0], wide)
        ]
        np.testing.assert_array_equal(*map(np.asarray, out))


@pytest.mark.parametrize(("name", "bits"), [("kivi4", 5), ("kivi2", 3)])
def test_bytes_of_a_row_are_those_that_are_allocated(name, bits):
    assert head_bytes(name, D) * 8 == bits * D
    store = kv_store.create(spec_of(name))
    n = sum(x.nbytes for x in jax.tree.leaves(store.k))
    index = 2 * 4 * N_TAIL // SIZE
    assert n - index == H * (N_CELLS * head_bytes(name, D) + N_TAIL * D * 2)
