"""Rows: written, read and moved as a NumPy array of rows would be."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrt import CacheConfig, GroupSpec
from kvrt.arrays import array_bytes
from kvrt.kv_types import FLOAT_DTYPES
from kvrt.sizes import store_spec
from kvrt.store import kv as kv_store
from kvrt.store.codec import decode

H, D, B, N_CTX = 2, 4, 8, 100
N_ROWS = 104  # 13 blocks; the last four rows belong to no cell
TYPES = ("f32", "bf16", "f16")

write = jax.jit(kv_store.write_kv, donate_argnums=0)
move = jax.jit(kv_store.move_kv, donate_argnums=0)
move_blocks = jax.jit(kv_store.move_blocks, donate_argnums=0)
read = jax.jit(lambda s, slots: [kv_store.read_kv(s, i, slots) for i in range(len(SHAPES))])
decoded = jax.jit(decode, static_argnums=1)


GROUP = GroupSpec(layers=(0, 2, 5), n_kv_heads=H, head_dim=D, rope=None)
SHAPES = ((H, D),) * 3


def empty(type_k="f32", type_v="f32"):
    config = CacheConfig(n_ctx=N_CTX, block_size=B, type_k=type_k, type_v=type_v)
    return kv_store.create(store_spec(GROUP, config))


def drawn(rng, n):
    """K and V rows of n tokens for each layer, exact in every type."""
    return tuple(
        [rng.integers(-99, 99, (n, *shape)).astype(np.float32) for shape in SHAPES]
        for _ in range(2)
    )


def filled(rng, **types):
    """A store with a known row in every place, and these rows."""
    kv = drawn(rng, N_ROWS)
    slots = np.arange(N_ROWS, dtype=np.int32)
    return write(empty(**types), slots, *copied(kv)), kv


def copied(kv):
    """Rows that the device may still be reading while the test changes its own."""
    return jax.tree.map(np.copy, kv)


def check(store, kv):
    """Every row of the store is what the arrays say."""
    slots = np.arange(N_ROWS, dtype=np.int32)
    for layer, found in enumerate(read(store, slots)):
        for x, side in zip(found, kv, strict=True):
            np.testing.assert_array_equal(np.asarray(x).astype(np.float32), side[layer])


def test_arrays_of_an_empty_store_share_no_memory():
    arrays = jax.tree.leaves(empty("int8", "f16"))
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)
    assert not any(np.asarray(x).any() for x in arrays)


@pytest.mark.parametrize("type_k", TYPES)
@pytest.mark.parametrize("type_v", TYPES)
def test_a_new_store_is_zero_and_of_its_types(type_k, type_v):
    store = empty(type_k, type_v)
    assert kv_store.n_cells(store) == N_ROWS
    assert [k.shape for k in store.k] == [(13, h, d, B) for h, d in SHAPES]
    assert [v.shape for v in store.v] == [(13, h, B, d) for h, d in SHAPES]
    sizes = {"f32": 4, "bf16": 2, "f16": 2}
    width = sum(h * d for h, d in SHAPES)
    assert array_bytes(store) == N_ROWS * width * (sizes[type_k] + sizes[type_v])
    assert {k.dtype.itemsize for k in store.k} == {sizes[type_k]}
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(store))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(data=st.data(), types=st.sampled_from([("f32", "f16"), ("bf16", "f32"), ("f16", "bf16")]))
def test_writes_replace_their_rows_and_no_other(data, types):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    store, kv = filled(rng, type_k=types[0], type_v=types[1])
    for _ in range(2):
        n = data.draw(st.integers(0, 5))
        slots = np.full(5, N_ROWS, np.int32)
        slots[:n] = rng.permutation(N_ROWS)[:n]
        # Padding may stand anywhere, and any index beyond the last row is padding.
        slots[n:] += rng.integers(0, 500, 5 - n, dtype=np.int32)
        order = rng.permutation(5)
        slots, new = slots[order], drawn(rng, 5)
        store = write(store, slots, *copied(new))
        for old, fresh in zip(kv, new, strict=True):
            for layer in range(len(SHAPES)):
                old[layer][slots[slots < N_ROWS]] = fresh[layer][slots < N_ROWS]
        check(store, kv)


def test_padding_reads_as_zero():
    store, kv = filled(np.random.default_rng(0))
    k, v = map(np.asarray, read(store, np.array([5, N_ROWS, 103, 10**6], np.int32))[1])
    for got, want in ((k, kv[0][1]), (v, kv[1][1])):
        np.testing.assert_array_equal(got[0], want[5])
        np.testing.assert_array_equal(got[2], want[103])
        assert not got[[1, 3]].any()


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_half_precision_rounds_to_nearest(kind):
    # Steps of a 16th of what the type can tell apart near 1.
    step = np.float32({"bf16": 2.0**-7, "f16": 2.0**-10}[kind]) / 16
    x = np.float32(1) + step * np.arange(N_ROWS, dtype=np.float32)
    k = [np.broadcast_to(x[:, None, None], (N_ROWS, *s)).astype(np.float32) for s in SHAPES]
    store = write(empty(kind, kind), np.arange(N_ROWS, dtype=np.int32), k, k)
    rounded = x.astype(FLOAT_DTYPES[kind]).astype(np.float32)
    assert (rounded != x).any()
    # Block 3 has rows 24 to 31, as the last axis of K and the one before of V.
    k, v = np.asarray(decoded(store.k[0], -2)), np.asarray(decoded(store.v[1], -1))
    np.testing.assert_array_equal(k[3, 1, 2], rounded[24:32])
    np.testing.assert_array_equal(v[3, 0, :, 2], rounded[24:32])


def moved(store, src, dst, n_moves, size):
    def padded(x):
        return np.concatenate([x, np.full(size - len(x), N_ROWS)]).astype(np.int32)

    return move(store, padded(src), padded(dst), np.asarray(n_moves, np.int32))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), n_swaps=st.integers(0, 52), kind=st.sampled_from(TYPES))
def test_swaps_side_by_side_exchange_rows(seed, n_swaps, kind):
    rng = np.random.default_rng(seed)
    store, kv = filled(rng, type_k=kind)
    a, b = rng.permutation(N_ROWS)[: 2 * n_swaps].reshape(2, n_swaps)
    src, dst = np.stack([a, b], 1).reshape(-1), np.stack([b, a], 1).reshape(-1)
    store = moved(store, src, dst, 2 * n_swaps, 128)
    for half in kv:
        for layer in range(len(SHAPES)):
            half[layer][dst] = half[layer][src].copy()
    check(store, kv)


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 90])
def test_moves_run_in_chunks_to_the_last_one(n):
    """Row i to row i - 1 in ascending order: the one before is read before it is overwritten."""
    store, kv = filled(np.random.default_rng(1))
    src = np.arange(1, n + 1)
    store = moved(store, src, src - 1, n, 128)
    for half in kv:
        for layer in range(len(SHAPES)):
            half[layer][src - 1] = half[layer][src].copy()
    check(store, kv)


def test_moves_beyond_the_count_do_not_run():
    """The bound is a whole chunk: what lies behind it is left alone, listed or not."""
    store, kv = filled(np.random.default_rng(2))
    src = np.arange(100)
    store = moved(store, src, (src + 4) % 100, 64, 128)
    for half in kv:
        for layer in range(len(SHAPES)):
            half[layer][4:68] = half[layer][:64].copy()
    check(store, kv)


def test_moves_are_padded_to_whole_chunks():
    with pytest.raises(AssertionError, match="pad the moves to whole chunks"):
        moved(empty(), [1], [2], 1, 65)


def by_block(store, src, dst, size=13):
    moves = kv_store.plan_block_moves(np.int32(src), np.int32(dst), B)
    for first in range(0, len(moves.src), size):
        store = move_blocks(store, *kv_store.part_of_moves(moves, first, size))
    return store


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(0, 52), kind=st.sampled_from(TYPES))
def test_copies_between_blocks_are_copies_of_cells(seed, n, kind):
    rng = np.random.default_rng(seed)
    store, kv = filled(rng, type_k=kind)
    src, dst = rng.permutation(N_ROWS)[: 2 * n].reshape(2, n)
    # A cell may be copied more than once, and within its block.
    src = rng.choice(src, n) if n else src
    store = by_block(store, src, dst)
    for half in kv:
        for layer in range(len(SHAPES)):
            half[layer][dst] = half[layer][src]
    check(store, kv)


def test_what_is_read_and_written_is_not_copied_by_block():
    cells = np.arange(9, dtype=np.int32)
    assert kv_store.plan_block_moves(cells + 1, cells, B) is None
    moves = kv_store.plan_block_moves(cells[:3] + 40, cells[:3] + 6, B)
    assert (moves.src.tolist(), moves.dst.tolist()) == ([5, 5], [0, 1])
    assert moves.cells.tolist() == [[8] * 6 + [0, 1], [2] + [8] * 7]


def test_writers_run_in_place():
    store, _ = filled(np.random.default_rng(3))
    for write_to in (
        lambda s: write(s, np.array([1], np.int32), *drawn(np.random.default_rng(4), 1)),
        lambda s: moved(s, [1], [2], 1, 64),
        lambda s: by_block(s, [1], [2]),
    ):
        old, store = store, write_to(store)
        assert all(x.is_deleted() for x in jax.tree.leaves(old))


@pytest.mark.parametrize("kind", TYPES)
def test_released_rows_are_zeroed_and_no_other(kind):
    store, kv = filled(np.random.default_rng(5), type_k=kind, type_v=kind)
    released = np.random.default_rng(6).random(N_ROWS) < 0.5
    cleared = jax.jit(kv_store.clear_kv, donate_argnums=0)(store, released.reshape(-1, B))
    for layer in kv[0] + kv[1]:
        layer[released] = 0
    check(cleared, kv)
    assert {x.is_deleted() for x in jax.tree.leaves(store)} == {True}
