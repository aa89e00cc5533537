"""Rows of K and V in blocks: create, write, move. Knows nothing of positions or sequences.

Row c of every layer belongs to cell c = block * B + offset. Channels of K stand before cells, so
that scores need no transpose; rows of V are contiguous, so that the weighted sum reads them in
order. Indices beyond the last row are padding and are dropped.

Rows of type bf16 are held as their bits, in uint16: around a scatter or a loop XLA's CPU backend
widens a bfloat16 buffer to float32 as a whole, twice the cache in every step.
"""

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.kv_types import CHANNEL_CODECS, carried, n_tail_groups
from kvrt.sizes import StoreSpec
from kvrt.store import per_channel
from kvrt.store.codec import AnyRows, Coded, Rows, decode, encode, zeros
from kvrt.store.per_channel import KeyRows, PerChannel

MOVE_CHUNK = 64


@state
class KVStore:
    """K and V rows of one group, by layer: [N, H, D, B] and [N, H, B, D], or codes of them.

    Invariant, kept by the callers: with rope="write" key c is rotated to pos[c] - delta[c], with
    rope="read" it is not rotated.
    """

    k: tuple[KeyRows, ...]
    v: tuple[Rows, ...]


def create(spec: StoreSpec) -> KVStore:
    """Zeroed rows.

    Raises:
      BadConfig: a codec's groups do not fill a head.
    """
    n, b = spec.extent.n_blocks, spec.extent.block_size
    h, d = spec.n_kv_heads, spec.head_dim
    return KVStore(
        k=tuple(_keys(spec, (n, h, d, b)) for _ in range(spec.n_buffers)),
        v=tuple(zeros(spec.type_v, (n, h, b, d), 3) for _ in range(spec.n_buffers)),
    )


def _keys(spec: StoreSpec, shape: tuple[int, int, int, int]) -> KeyRows:
    codec = CHANNEL_CODECS.get(spec.type_k)
    if codec is None:
        return zeros(carried(spec.type_k), shape, 2)
    return per_channel.zeros(codec, shape, n_tail_groups(spec.type_k, spec.n_seq_max))


def n_rows(store: KVStore) -> int:
    """Rows of a layer, the padding index of every plan: blocks times block size."""
    x = jax.tree.leaves(store.v)[0]
    return x.shape[0] * x.shape[2]


def n_bytes(store: KVStore) -> int:
    """Bytes of all rows."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(store))


def write_rows(
    store: KVStore,
    slots: Int32[AnyArray, " T"],
    k_rows: Sequence[Float[Array, "T _ _"]],
    v_rows: Sequence[Float[Array, "T _ _"]],
) -> KVStore:
    """Writes one row a token and layer.

    Args:
      store: donated by the jitted caller.
      slots: row of each token; n_rows(store) or more drops the token. `[T]`
      k_rows: keys by layer, each as wide as its layer, cast to the store's dtype.
      v_rows: values by layer, cast likewise.

    Returns:
      The store with rows `slots` replaced.
    """
    return KVStore(
        k=tuple(_coded_keys(k, slots, r) for k, r in zip(store.k, k_rows, strict=True)),
        v=tuple(_coded(v, slots, r, cell_axis=2) for v, r in zip(store.v, v_rows, strict=True)),
    )


def part(store: KVStore, buffers: Sequence[int]) -> KVStore:
    """Some arrays of a store, those of one group where several share it."""
    return KVStore(k=tuple(store.k[i] for i in buffers), v=tuple(store.v[i] for i in buffers))


def with_part(store: KVStore, buffers: Sequence[int], new: KVStore) -> KVStore:
    """The store with other arrays in the place of `part(store, buffers)`."""
    k, v = list(store.k), list(store.v)
    for i, new_k, new_v in zip(buffers, new.k, new.v, strict=True):
        k[i], v[i] = new_k, new_v
    return KVStore(k=tuple(k), v=tuple(v))


def read_rows(
    store: KVStore, layer: int, slots: Int32[AnyArray, " T"]
) -> tuple[Float[Array, "T H D"], Float[Array, "T H D"]]:
    """Keys and values of the rows `slots` of one layer, in float32; padding reads as zero."""
    k, v = _take_keys(store.k[layer], slots), _take(store.v[layer], slots, cell_axis=2)
    return decode(k, -1), decode(v, -1)


def take_rows(store: KVStore, slots: Int32[AnyArray, " T"]) -> tuple[Rows, Rows]:
    """Keys and values of the rows `slots` of every layer, [L, T, H, D] as they are stored.

    Keys that are coded by channel come as float16, see `kvrt.kv_types.carried`.
    """

    def stacked(taken: Iterable[Rows]) -> Rows:
        return jax.tree.map(lambda *x: jnp.stack(x), *taken)

    keys = stacked(_take_keys(x, slots) for x in store.k)
    return keys, stacked(_take(x, slots, cell_axis=2) for x in store.v)


def put_rows(
    store: KVStore,
    slots: Int32[AnyArray, " T"],
    k: AnyRows,
    v: AnyRows,
) -> KVStore:
    """Replaces the rows `slots` of every layer by what `take_rows` gave.

    Args:
      store: donated by the jitted caller.
      slots: row of each token; n_rows(store) or more drops the token.
      k: keys by layer, [L, T, H, D] as the store keeps them.
      v: values, likewise.
    """

    def at(i: int, new: AnyRows) -> AnyRows:
        return jax.tree.map(lambda x: x[i], new)

    return KVStore(
        k=tuple(_put_keys(x, slots, at(i, k)) for i, x in enumerate(store.k)),
        v=tuple(_put(x, slots, at(i, v), cell_axis=2) for i, x in enumerate(store.v)),
    )


def clear_rows(store: KVStore, released: Bool[AnyArray, "N B"]) -> KVStore:
    """Zeroes rows in every layer, in one pass over all of them.

    Attention never needs it, for a hidden row has no weight: it is for whoever must not keep what
    was removed.

    Args:
      store: donated by the jitted caller.
      released: which rows to zero.
    """

    def cleared(rows: Rows, where: AnyArray) -> Rows:
        return jax.tree.map(lambda x: jnp.where(where, jnp.zeros((), x.dtype), x), rows)

    def cleared_keys(rows: KeyRows) -> KeyRows:
        if isinstance(rows, PerChannel):
            return per_channel.clear(rows, released)
        return cleared(rows, released[:, None, None, :])

    return KVStore(
        k=tuple(map(cleared_keys, store.k)),
        v=tuple(cleared(x, released[:, None, :, None]) for x in store.v),
    )


def move_rows(
    store: KVStore,
    src: Int32[AnyArray, " M"],
    dst: Int32[AnyArray, " M"],
    n_moves: Int32[AnyArray, ""],
) -> KVStore:
    """Copies rows src to rows dst in every layer, in place, a chunk at a time.

    Args:
      store: donated by the jitted caller.
      src: rows to read. `[M]`
      dst: rows to write, each at most once; padded with n_rows(store). `[M]`
      n_moves: how many of the M moves are real; the loop ends after them.

    Returns:
      The store; all sources of a chunk of 64 moves are read before any of its rows is written.
    """
    assert src.shape[0] % MOVE_CHUNK == 0, "pad the moves to whole chunks"

    def chunk(i: Array, store: KVStore) -> KVStore:
        s = lax.dynamic_slice_in_dim(src, i * MOVE_CHUNK, MOVE_CHUNK)
        d = lax.dynamic_slice_in_dim(dst, i * MOVE_CHUNK, MOVE_CHUNK)
        return KVStore(
            k=tuple(_put_keys(k, d, _take_keys(k, s)) for k in store.k),
            v=tuple(_put(v, d, _take(v, s, cell_axis=2), cell_axis=2) for v in store.v),
        )

    n_chunks = (n_moves + (MOVE_CHUNK - 1)) // MOVE_CHUNK
    return lax.fori_loop(0, n_chunks, chunk, store)


def _index(x: Array, slots: AnyArray, cell_axis: int) -> tuple:
    b = x.shape[cell_axis]
    index: list = [lax.div(slots, jnp.int32(b)), slice(None), slice(None), slice(None)]
    index[cell_axis] = lax.rem(slots, jnp.int32(b))
    return tuple(index)


def _coded_keys(x: KeyRows, slots: AnyArray, rows: Array) -> KeyRows:
    """The keys with others in some places, which come in any float type."""
    new = rows if isinstance(x, PerChannel) else encode(rows, x, -1)
    return _put_keys(x, slots, new)


def _coded(x: Rows, slots: AnyArray, rows: Array, *, cell_axis: int) -> Rows:
    return _put(x, slots, encode(rows, x, -1), cell_axis=cell_axis)


# Jitted inside other programs as well, so that layers are traced once.
@jax.jit
def _put_keys(x: KeyRows, slots: AnyArray, rows: AnyRows) -> KeyRows:
    """Likewise, and they come as `_take_keys` gives them."""
    if not isinstance(x, PerChannel):
        return _put(x, slots, rows, cell_axis=3)
    assert not isinstance(rows, Coded), "keys that are coded by channel come as they are"
    return per_channel.put(x, slots, rows)


@functools.partial(jax.jit, static_argnames="cell_axis")
def _put(x: Rows, slots: AnyArray, rows: AnyRows, *, cell_axis: int) -> Rows:
    def put(x: Array, rows: Array) -> Array:
        return x.at[_index(x, slots, cell_axis)].set(rows, mode="drop")

    return jax.tree.map(put, x, rows)


def _take_keys(x: KeyRows, slots: AnyArray) -> Rows:
    """Keys [T, H, D] as they are taken out."""
    if isinstance(x, PerChannel):
        return per_channel.take(x, slots)
    return _take(x, slots, cell_axis=3)


def _take(x: Rows, slots: AnyArray, *, cell_axis: int) -> Rows:
    """Rows [T, H, D] as they are stored."""

    def get(x: Array) -> Array:
        return x.at[_index(x, slots, cell_axis)].get(mode="fill", fill_value=0)

    return jax.tree.map(get, x)
