"""The operations of `kv` and `blocks` where devices divide the cache; the same where none do.

Every device does what the plain function does, with its own blocks: what it does not hold is
padding to it. What is read is collected from whoever holds it; nothing else travels.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from kvrt.arrays import AnyArray, Array, Bool, Int32, UInt8, state
from kvrt.store import blocks
from kvrt.store import kv as kv_store
from kvrt.store.blocks import Store
from kvrt.store.codec import KVArray, Quantized
from kvrt.store.kv import BlockMoves, KVStore
from kvrt.store.recurrent import StateStore
from kvrt.store.runs import channel_runs
from kvrt.store.shards import CELLS, Shards


def write_kv(shards: Shards, store: KVStore, slots: AnyArray, k: Any, v: Any) -> KVStore:
    """See `kv.write_kv`, which a step calls itself where no devices divide the cache."""

    def own(store: KVStore, slots: Array, k: Any, v: Any) -> KVStore:
        return kv_store.write_kv(store, shards.slots(slots, kv_store.n_cells(store)), k, v)

    at, new = shards.layers(store), (shards.with_heads(x, 1) for x in (k, v))
    return shards.run(own, (at, P(), *new), at)(store, slots, k, v)


def take_kv(
    shards: Shards | None, store: KVStore, slots: Int32[AnyArray, " T"]
) -> tuple[KVArray, KVArray]:
    """See `kv.take_kv`."""
    if shards is None:
        return kv_store.take_kv(store, slots)

    def own(store: KVStore, slots: Array) -> tuple[KVArray, KVArray]:
        return _taken(shards, store, slots)

    at = shards.layers(store)
    out = shards.with_heads(jax.eval_shape(kv_store.take_kv, store, slots), 2)
    return shards.run(own, (at, P()), out)(store, slots)


@state
class DividedKV:
    """Keys and values that every device took of its own cells: [L, parts * m, H, D].

    The first m are of the first part of the cells, and so on; kv heads are divided as in a store.
    """

    k: KVArray
    v: KVArray


def take_own(shards: Shards, store: KVStore, slots: Int32[AnyArray, "S m"]) -> DividedKV:
    """Keys and values of m cells of each part of the cells, which stay on the devices they are on.

    Args:
      shards: the devices that divide the cells, in S parts.
      store: their cells.
      slots: cells of each part, counted in it; its number of cells or more is padding, and gives
        zeros.
    """

    def own(store: KVStore, slots: Array) -> DividedKV:
        k, v = kv_store.take_kv(store, slots[shards.index()])
        return DividedKV(k=k, v=v)

    at = shards.layers(store)
    k, v = jax.eval_shape(kv_store.take_kv, store, slots[0])
    out = shards.taken(DividedKV(k=k, v=v))
    return shards.run(own, (at, P()), out)(store, slots)


def put_kv(
    shards: Shards | None,
    store: KVStore,
    slots: Int32[AnyArray, " T"],
    k: AnyArray | Quantized,
    v: AnyArray | Quantized,
) -> KVStore:
    """See `kv.put_kv`."""
    if shards is None:
        return kv_store.put_kv(store, slots, k, v)

    def own(store: KVStore, slots: Array, k: KVArray, v: KVArray) -> KVStore:
        return kv_store.put_kv(store, shards.slots(slots, kv_store.n_cells(store)), k, v)

    at, new = shards.layers(store), (shards.with_heads(x, 2) for x in (k, v))
    return shards.run(own, (at, P(), *new), at)(store, slots, k, v)


def clear_kv(shards: Shards | None, store: KVStore, released: Bool[AnyArray, "N B"]) -> KVStore:
    """See `kv.clear_kv`."""
    if shards is None:
        return kv_store.clear_kv(store, released)
    at = shards.layers(store)
    return shards.run(kv_store.clear_kv, (at, P(CELLS)), at)(store, released)


def move_kv(
    shards: Shards | None,
    store: KVStore,
    src: Int32[AnyArray, " M"],
    dst: Int32[AnyArray, " M"],
    n_moves: Int32[AnyArray, ""],
) -> KVStore:
    """See `kv.move_kv`; a chunk of cells goes to every device, and each keeps its own."""
    if shards is None:
        return kv_store.move_kv(store, src, dst, n_moves)
    size = kv_store.MOVE_CHUNK

    def own(store: KVStore, src: Array, dst: Array, n_moves: Array) -> KVStore:
        def chunk(i: Array, store: KVStore) -> KVStore:
            s, d = (lax.dynamic_slice_in_dim(x, i * size, size) for x in (src, dst))
            k, v = _taken(shards, store, s)
            return kv_store.put_kv(store, shards.slots(d, kv_store.n_cells(store)), k, v)

        return lax.fori_loop(0, (n_moves + (size - 1)) // size, chunk, store)

    at = shards.layers(store)
    return shards.run(own, (at, P(), P(), P()), at)(store, src, dst, n_moves)


def move_blocks(
    shards: Shards | None, store: KVStore, moves: BlockMoves, n_moves: Int32[AnyArray, ""]
) -> KVStore:
    """See `kv.move_blocks`; where devices divide the cells, they are copied one by one."""
    assert shards is None, "cells travel between devices in move_kv"
    return kv_store.move_blocks(store, moves, n_moves)


def copy_blocks(
    shards: Shards | None,
    store: KVStore,
    src: Int32[AnyArray, " M"],
    dst: Int32[AnyArray, " M"],
    n_copies: Int32[AnyArray, ""],
) -> KVStore:
    """See `channel_runs.copy_blocks`; a block goes to every device, and one keeps it."""
    if shards is None:
        return channel_runs.copy_blocks(store, src, dst, n_copies)

    def own(store: KVStore, src: Array, dst: Array, n_copies: Array) -> KVStore:
        n_blocks = jax.tree.leaves(store.v)[0].shape[0]

        def one(i: Array, store: KVStore) -> KVStore:
            a, b = (shards.ids(x[i], n_blocks) for x in (src, dst))
            return channel_runs.put_block(
                store, b, shards.collect(channel_runs.take_block(store, a))
            )

        return lax.fori_loop(0, n_copies, one, store)

    at = shards.layers(store)
    return shards.run(own, (at, P(), P(), P()), at)(store, src, dst, n_copies)


def keep_runs(shards: Shards | None, store: KVStore, held: Bool[AnyArray, " N"]) -> KVStore:
    """See `channel_runs.keep_runs`."""
    if shards is None:
        return channel_runs.keep_runs(store, held)
    at = shards.layers(store)
    return shards.run(channel_runs.keep_runs, (at, P(CELLS)), at)(store, held)


def take_blocks(
    shards: Shards | None, store: Store, ids: Int32[AnyArray, " M"]
) -> UInt8[Array, "M _"]:
    """See `blocks.take_blocks`; every device has all states."""
    if shards is None or isinstance(store, StateStore):
        return blocks.take_blocks(store, ids)

    def own(store: KVStore, ids: Array) -> KVStore:
        def get(x: Array) -> Array:
            return x.at[shards.ids(ids, x.shape[0])].get(mode="fill", fill_value=0)

        return shards.collect(jax.tree.map(get, blocks.in_blocks(store)))

    out = shards.with_heads(blocks.in_blocks(store), 1)
    found = shards.run(own, (shards.layers(store), P()), out)(store, ids)
    return blocks.take_blocks(found, jnp.arange(ids.shape[0], dtype=jnp.int32))


def put_blocks(
    shards: Shards | None,
    store: Store,
    ids: Int32[AnyArray, " M"],
    data: UInt8[AnyArray, "M _"],
) -> Store:
    """See `blocks.put_blocks`; every device has all states."""
    if shards is None or isinstance(store, StateStore):
        return blocks.put_blocks(store, ids, data)
    n, held = ids.shape[0], blocks.in_blocks(store)
    empty = jax.tree.map(lambda x: jnp.zeros((n, *x.shape[1:]), x.dtype), held)
    new = blocks.put_blocks(empty, jnp.arange(n, dtype=jnp.int32), data)

    def own(store: KVStore, ids: Array, new: KVStore) -> KVStore:
        def put(x: Array, new: Array) -> Array:
            return x.at[shards.ids(ids, x.shape[0])].set(new, mode="drop")

        held = blocks.in_blocks(store)
        own_ids = shards.ids(ids, jax.tree.leaves(held)[0].shape[0])
        return blocks.with_blocks(store, own_ids, jax.tree.map(put, held, new))

    at = shards.layers(store)
    return shards.run(own, (at, P(), shards.with_heads(new, 1)), at)(store, ids, new)


def _taken(shards: Shards, store: KVStore, slots: Array) -> tuple[KVArray, KVArray]:
    """Keys and values on every device, from those that hold them."""
    return shards.collect(kv_store.take_kv(store, shards.slots(slots, kv_store.n_cells(store))))
