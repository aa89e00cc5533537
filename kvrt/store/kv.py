"""Cached keys and values in blocks: create, write, move. Knows no positions or sequences.

The key and value of cell c lie in every layer at block c // B, offset c % B. Channels of K stand
before cells, so that scores need no transpose; a value is contiguous, so that the weighted sum
reads values in order. Slots beyond the last cell are padding and are dropped.

bf16 is kept as its bits, in uint16: around a scatter or a loop XLA's CPU backend widens a bfloat16
buffer to float32 as a whole, twice the cache in every step.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, bytes_of, state
from kvrt.kv_types import CHANNEL_CODECS, n_tail_groups, portable_dtype
from kvrt.sizes import StoreSpec
from kvrt.store import per_channel
from kvrt.store.codec import AnyKVArray, KVArray, Quantized, decode, encode, zeros
from kvrt.store.per_channel import KeyArray, PerChannel

MOVE_CHUNK = 64
# What a layer keeps of each token, and the axis of the cells in its blocks.
CELL_AXES = {"k": 3, "v": 2}
T = TypeVar("T")


@state
class KVStore:
    """Keys and values of one group, by layer: [N, H, D, B] and [N, H, B, D], or quantized.

    Invariant, kept by the callers: with rope="write" key c is rotated to pos[c] - delta[c], with
    rope="read" it is not rotated.

    Of a latent (`GroupSpec.latent_rank`) k has the channels that are rotated and v the latent,
    which attention reads as the rest of the keys too; so a K-shift never touches it.
    """

    k: tuple[KeyArray, ...]
    v: tuple[KVArray, ...]


def map_arrays(change: Callable, store: KVStore, *others: Any) -> Any:
    """A store with each array as `change` makes it, from the array and its axis of cells.

    Args:
      change: from an array, the axis of its cells, and an entry of each of the others.
      store: whose arrays.
      others: of as many entries by array, as a store has them.
    """
    found = {}
    for name, axis in CELL_AXES.items():
        each = zip(*(getattr(x, name) for x in (store, *others)), strict=True)
        found[name] = tuple(change(x, axis, *more) for x, *more in each)
    return KVStore(**found)


def create(spec: StoreSpec) -> KVStore:
    """Zeroed keys and values.

    Raises:
      BadConfig: a codec's groups do not fill a head.
    """
    n, b = spec.extent.n_blocks, spec.extent.block_size
    h, d = spec.n_kv_heads, spec.head_dim
    shape_v = n, h, b, spec.head_dim_v or d
    return KVStore(
        k=_copies(_keys(spec, (n, h, d, b)), spec.n_buffers),
        v=_copies(zeros(spec.type_v, shape_v, 3), spec.n_buffers),
    )


def _copies(x: T, n: int) -> tuple[T, ...]:
    """Several arrays like one, each in memory of its own; JAX copies while the host goes on."""
    return tuple(jax.device_put([x] * n, may_alias=False))


def _keys(spec: StoreSpec, shape: tuple[int, int, int, int]) -> KeyArray:
    codec = CHANNEL_CODECS.get(spec.type_k)
    if codec is None:
        return zeros(portable_dtype(spec.type_k), shape, 2)
    # Each device has a tail of its own, for all sequences may write where it has the cells.
    n_places = n_tail_groups(spec.type_k, spec.n_seq_max, spec.run) * spec.extent.n_shards
    return per_channel.empty_keys(codec, shape, n_places, spec.run)


def n_cells(store: KVStore) -> int:
    """Cells of a store, the padding index of every plan: blocks times block size."""
    x = jax.tree.leaves(store.v)[0]
    return x.shape[0] * x.shape[2]


@functools.cache
def cell_bytes(spec: StoreSpec) -> int:
    """Bytes of a cell in every layer, as `take_kv` copies it."""
    return bytes_of(lambda: take_kv(create(spec), np.zeros(1, np.int32)))


def write_kv(
    store: KVStore,
    slots: Int32[AnyArray, " T"],
    k_new: Sequence[Float[Array, "T _ _"]],
    v_new: Sequence[Float[Array, "T _ _"]],
) -> KVStore:
    """Writes one key and value a token and layer.

    Args:
      store: donated by the jitted caller.
      slots: cell of each token; n_cells(store) or more drops the token. `[T]`
      k_new: keys by layer, each as wide as its layer, cast to the store's KV dtype.
      v_new: values by layer, cast likewise.

    Returns:
      The store with cells `slots` replaced.
    """

    def written(x: KeyArray, axis: int, new: Array) -> KeyArray:
        return _put(x, slots, new if isinstance(x, PerChannel) else encode(new, x, -1), axis=axis)

    return map_arrays(written, store, KVStore(k=tuple(k_new), v=tuple(v_new)))


def order_after(done: Float[Array, "..."], slots: Int32[AnyArray, " T"]) -> Int32[Array, " T"]:
    """The slots, known only once a result of the step, in float32, is.

    Without a dependency XLA may write a layer before it is read, and copies the layer to be able
    to; an optimization barrier is gone before that is decided. The clamp is always 0.
    """
    bits = lax.bitcast_convert_type(done[(0,) * done.ndim], jnp.int32)
    return jnp.asarray(slots) + lax.clamp(jnp.int32(0), bits, jnp.int32(0))


def part(store: KVStore, buffers: Sequence[int]) -> KVStore:
    """Some arrays of a store, those of one group where several share it."""
    return KVStore(k=tuple(store.k[i] for i in buffers), v=tuple(store.v[i] for i in buffers))


def with_part(store: KVStore, buffers: Sequence[int], new: KVStore) -> KVStore:
    """The store with other arrays in the place of `part(store, buffers)`."""
    k, v = list(store.k), list(store.v)
    for i, new_k, new_v in zip(buffers, new.k, new.v, strict=True):
        k[i], v[i] = new_k, new_v
    return KVStore(k=tuple(k), v=tuple(v))


def read_kv(
    store: KVStore, layer: int, slots: Int32[AnyArray, " T"]
) -> tuple[Float[Array, "T H D"], Float[Array, "T H Dv"]]:
    """Keys and values of cells `slots` of one layer, in float32; padding reads as zero."""
    one = map_arrays(lambda x, axis: decode(_take(x, slots, axis), -1), part(store, [layer]))
    return one.k[0], one.v[0]


def take_kv(store: KVStore, slots: Int32[AnyArray, " T"]) -> tuple[KVArray, KVArray]:
    """Keys and values of cells `slots` of every layer, [L, T, H, D] in their KV dtype.

    Keys that are quantized by channel come as float16, see `kvrt.kv_types.portable_dtype`.
    """
    taken = map_arrays(lambda x, axis: _take(x, slots, axis), store)
    k, v = (jax.tree.map(lambda *x: jnp.stack(x), *side) for side in (taken.k, taken.v))
    return k, v


def put_kv(
    store: KVStore,
    slots: Int32[AnyArray, " T"],
    k: AnyKVArray,
    v: AnyKVArray,
) -> KVStore:
    """Replaces cells `slots` of every layer by what `take_kv` gave.

    Args:
      store: donated by the jitted caller.
      slots: cell of each token; n_cells(store) or more drops the token.
      k: keys by layer, [L, T, H, D] as the store keeps them.
      v: values, likewise.
    """

    def by_layer(new: AnyKVArray) -> tuple[Any, ...]:
        return tuple(jax.tree.map(operator.itemgetter(i), new) for i in range(len(store.k)))

    new = KVStore(k=by_layer(k), v=by_layer(v))
    return map_arrays(lambda x, axis, new: _put(x, slots, new, axis=axis), store, new)


def clear_kv(store: KVStore, released: Bool[AnyArray, "N B"]) -> KVStore:
    """Zeroes cells in every layer, in one pass over all of them.

    Attention never needs it, for a masked cell has no weight: it is for callers that must not keep
    what was removed.

    Args:
      store: donated by the jitted caller.
      released: which cells to zero.
    """

    def cleared(cached: KeyArray, axis: int) -> KeyArray:
        if isinstance(cached, PerChannel):
            return per_channel.clear_keys(cached, released)
        where = jnp.expand_dims(released, [i for i in (1, 2, 3) if i != axis])
        return jax.tree.map(lambda x: jnp.where(where, jnp.zeros((), x.dtype), x), cached)

    return map_arrays(cleared, store)


def move_kv(
    store: KVStore,
    src: Int32[AnyArray, " M"],
    dst: Int32[AnyArray, " M"],
    n_moves: Int32[AnyArray, ""],
) -> KVStore:
    """Copies cells src to cells dst in every layer, in place, a chunk at a time.

    Args:
      store: donated by the jitted caller.
      src: cells to read. `[M]`
      dst: cells to write, each at most once; padded with n_cells(store). `[M]`
      n_moves: how many of the M moves are real; the loop ends after them.

    Returns:
      The store; all sources of a chunk of 64 moves are read before any of its cells is written.
    """
    assert src.shape[0] % MOVE_CHUNK == 0, "pad the moves to whole chunks"

    def chunk(i: Array, store: KVStore) -> KVStore:
        s = lax.dynamic_slice_in_dim(src, i * MOVE_CHUNK, MOVE_CHUNK)
        d = lax.dynamic_slice_in_dim(dst, i * MOVE_CHUNK, MOVE_CHUNK)
        return map_arrays(lambda x, axis: _put(x, d, _take(x, s, axis), axis=axis), store)

    n_chunks = (n_moves + (MOVE_CHUNK - 1)) // MOVE_CHUNK
    return lax.fori_loop(0, n_chunks, chunk, store)


@state
class BlockMoves:
    """Cells that blocks take from other blocks, one pair of blocks at a time.

    Entry i writes block dst[i]: its cell c takes cell cells[i, c] of block src[i], or keeps what it
    has where that is beyond a block.
    """

    src: Int32[AnyArray, " M"]
    dst: Int32[AnyArray, " M"]
    cells: Int32[AnyArray, "M B"]


def plan_block_moves(
    src: Int32[np.ndarray, " _"], dst: Int32[np.ndarray, " _"], block_size: int
) -> BlockMoves | None:
    """Copies of cells src to cells dst as copies between blocks, on the host.

    Returns:
      The copies, which may run in any order; None where a cell is both read and written, so that
      they may not.
    """
    if np.isin(src, dst).any():
        return None
    pairs = (dst // block_size).astype(np.int64) << 32 | src // block_size
    found, which = np.unique(pairs, return_inverse=True)
    cells = np.full((len(found), block_size), block_size, np.int32)
    cells[which, dst % block_size] = src % block_size
    return BlockMoves(src=found.astype(np.int32), dst=(found >> 32).astype(np.int32), cells=cells)


def part_of_moves(
    moves: BlockMoves, first: int, size: int
) -> tuple[BlockMoves, Int32[np.ndarray, ""]]:
    """Entries from `first` on, `size` or as many as there are, padded; and how many."""
    n = min(len(moves.src) - first, size)

    def some(x: np.ndarray) -> np.ndarray:
        return np.pad(x[first : first + n], [(0, size - n), *[(0, 0)] * (x.ndim - 1)])

    return jax.tree.map(some, moves), np.asarray(n, np.int32)


def move_blocks(store: KVStore, moves: BlockMoves, n_moves: Int32[AnyArray, ""]) -> KVStore:
    """Copies cells between blocks in every layer, in place; for stores without `PerChannel`.

    Two blocks are read and one is written for each entry, however few cells it copies: `move_kv`
    writes cells one by one, and takes as long for 64 of them.

    Args:
      store: donated by the jitted caller.
      moves: from `plan_block_moves`, padded with anything.
      n_moves: how many of its entries are real.
    """
    parts = n_parts(store.v[0])

    def one(i: Array, store: KVStore) -> KVStore:
        entry, part = lax.div(i, jnp.int32(parts)), lax.rem(i, jnp.int32(parts))
        src, dst, cells = (jnp.asarray(x)[entry] for x in (moves.src, moves.dst, moves.cells))

        def merged(x: KeyArray, axis: int) -> KVArray:
            assert not isinstance(x, PerChannel), "see move_kv"
            old, new = (take_part(x, block, part, parts) for block in (dst, src))
            new = jax.tree.map(lambda old, new: _taken_over(old, new, cells, axis), old, new)
            return put_part(x, new, dst, part)

        return map_arrays(merged, store)

    return lax.fori_loop(0, n_moves * parts, one, store)


def _taken_over(old: Array, new: Array, cells: Array, axis: int) -> Array:
    """Part of a block, of which the cells named take those of another block."""
    found = jnp.take(new, cells, axis, mode="clip")
    taken = lax.expand_dims(cells < old.shape[axis], [i for i in range(4) if i != axis])
    return jnp.where(taken, found, old)


def n_parts(x: KVArray) -> int:
    """In how many parts a block of a layer is read, changed and written.

    On a CPU one a head, all layers of which stay in a core's cache; elsewhere a kernel has its
    price, and a block is one part.
    """
    return jax.tree.leaves(x)[0].shape[1] if jax.default_backend() == "cpu" else 1


def take_part(x: KVArray, block: Array, part: Array, parts: int) -> KVArray:
    """Keys or values of some heads of a block, [1, heads, _, _].

    XLA sees that what is written back comes from where it goes, and copies nothing first, as long
    as the axes stay.
    """

    def get(x: Array) -> Array:
        n = x.shape[1] // parts
        return lax.dynamic_slice(x, (block, part * n, 0, 0), (1, n, *x.shape[2:]))

    return jax.tree.map(get, x)


def put_part(x: KVArray, new: KVArray, block: Array, part: Array) -> KVArray:
    """Keys or values with what `take_part` gives replaced."""

    def put(x: Array, new: Array) -> Array:
        return lax.dynamic_update_slice(x, new, (block, part * new.shape[1], 0, 0))

    return jax.tree.map(put, x, new)


def _index(x: Array, slots: AnyArray, cell_axis: int) -> tuple:
    b = x.shape[cell_axis]
    index: list = [lax.div(slots, jnp.int32(b)), slice(None), slice(None), slice(None)]
    index[cell_axis] = lax.rem(slots, jnp.int32(b))
    return tuple(index)


# Jitted inside other programs as well, so that layers are traced once.
@functools.partial(jax.jit, static_argnames="axis")
def _put(x: KeyArray, slots: AnyArray, new: AnyKVArray, *, axis: int) -> KeyArray:
    """The keys or values with others in some cells, as `_take` gives them."""
    if isinstance(x, PerChannel):
        assert not isinstance(new, Quantized), "keys quantized by channel are written as floats"
        return per_channel.put_keys(x, slots, new)

    def put(x: Array, new: Array) -> Array:
        return x.at[_index(x, slots, axis)].set(new, mode="drop")

    return jax.tree.map(put, x, new)


def _take(x: KeyArray, slots: AnyArray, axis: int) -> KVArray:
    """Keys or values [T, H, D] of some cells, in their portable KV dtype."""
    if isinstance(x, PerChannel):
        return per_channel.take_keys(x, slots)

    def get(x: Array) -> Array:
        return x.at[_index(x, slots, axis)].get(mode="fill", fill_value=0)

    return jax.tree.map(get, x)
