"""Keys quantized by channel in an engine's blocks: copies of blocks, and runs that end early.

A run of cells stays float16 until its last cell is written (`PerChannel.run`), so the tail has room
for one run of every sequence. Whoever ends a sequence within a run has to say so, with `keep_held`:
otherwise its place would go to another sequence only when a run that is still being written has
lost its own.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float16, Int32, state
from kvrt.store.codec import KVArray, Quantized
from kvrt.store.kv import KVStore, map_arrays, put_part, take_part
from kvrt.store.per_channel import (
    KeyArray,
    PerChannel,
    tail_places,
    without_places,
    written_last,
)


def keep_held(cached: PerChannel, held: Bool[AnyArray, " N"]) -> PerChannel:
    """Empties places of the tail whose blocks nobody holds.

    Args:
      cached: donated by the jitted caller.
      held: by block, whether somebody does.
    """
    group = jnp.asarray(cached.group)
    block = lax.div(jnp.maximum(group, 0), jnp.int32(cached.quantized.scale.shape[3]))
    return without_places(cached, (group >= 0) & ~jnp.asarray(held)[block])


def forget_blocks(cached: PerChannel, blocks: Int32[AnyArray, " M"]) -> PerChannel:
    """Empties places of the tail that some blocks have; their quantized keys count from now on."""
    held = jnp.ones(cached.quantized.scale.shape[0], bool)
    return keep_held(cached, held.at[jnp.asarray(blocks)].set(False, mode="drop"))


@state
class BlockKeys:
    """The keys of a block by channel, with what the tail has of it; `held` is 1 or 0 by group."""

    quantized: Quantized
    tail: Float16[AnyArray, "n H D _"]
    held: Int32[AnyArray, " n"]


def take_block(store: KVStore, block: Array) -> KVStore:
    """A block of every layer, bit by bit, keys by channel as `BlockKeys`.

    Zeros where it is beyond the last.
    """
    is_here = block < jax.tree.leaves(store.v)[0].shape[0]

    def taken(cached: KeyArray, axis: int) -> BlockKeys | KVArray:
        if not isinstance(cached, PerChannel):
            one = take_part(cached, block, jnp.int32(0), 1)
            return jax.tree.map(lambda y: jnp.where(is_here, y, jnp.zeros((), y.dtype)), one)
        held, at = tail_places(cached, _groups(cached, block))
        held = held & is_here
        found, quantized = jnp.asarray(cached.tail)[at], taken(cached.quantized, axis)
        assert isinstance(quantized, Quantized), "as the store has it"
        return BlockKeys(
            quantized=quantized,
            tail=jnp.where(held[:, None, None, None], found, jnp.zeros((), found.dtype)),
            held=held.astype(jnp.int32),
        )

    return map_arrays(taken, store)


def put_block(store: KVStore, block: Array, new: KVStore) -> KVStore:
    """Writes a block of every layer; what the tail had of it is dropped. Nothing beyond the last.

    Args:
      store: donated by the jitted caller.
      block: which.
      new: from `take_block`.
    """
    n_blocks = jax.tree.leaves(store.v)[0].shape[0]
    is_here, at = block < n_blocks, jnp.minimum(block, n_blocks - 1)

    def put(cached: Any, axis: int, new: Any) -> Any:
        if isinstance(cached, PerChannel):
            quantized = put(cached.quantized, axis, new.quantized)
            cached = forget_blocks(dataclasses.replace(cached, quantized=quantized), block[None])
            return _put_tail(cached, _groups(cached, block), new, is_here)
        old = take_part(cached, at, jnp.int32(0), 1)
        one = jax.tree.map(lambda old, new: jnp.where(is_here, new, old), old, new)
        return put_part(cached, one, at, jnp.int32(0))

    return map_arrays(put, store, new)


def _groups(cached: PerChannel, block: Array) -> Int32[Array, " n"]:
    """The groups of a block."""
    n = cached.quantized.scale.shape[3]
    return block * n + jnp.arange(n, dtype=jnp.int32)


def _put_tail(cached: PerChannel, groups: Array, new: BlockKeys, is_here: Array) -> PerChannel:
    """Gives groups places in the tail, as far as they had some where they come from."""

    def one(i: Array, cached: PerChannel) -> PerChannel:
        # Beyond the last place nothing is written.
        wanted = is_here & (jnp.asarray(new.held)[i] > 0)
        to = jnp.where(wanted, jnp.argmin(cached.written), cached.group.shape[0])
        return dataclasses.replace(
            cached,
            tail=jnp.asarray(cached.tail).at[to].set(jnp.asarray(new.tail)[i], mode="drop"),
            group=jnp.asarray(cached.group).at[to].set(groups[i], mode="drop"),
            written=written_last(cached, to),
        )

    return lax.fori_loop(0, groups.shape[0], one, cached)


def copy_blocks(
    store: KVStore,
    src: Int32[AnyArray, " M"],
    dst: Int32[AnyArray, " M"],
    n_copies: Int32[AnyArray, ""],
) -> KVStore:
    """Copies whole blocks in every layer, in place, one after the other; for keys by channel.

    Args:
      store: donated by the jitted caller.
      src: blocks to read. `[M]`
      dst: blocks to write. `[M]`
      n_copies: how many of the M copies are real.
    """

    def one(i: Array, store: KVStore) -> KVStore:
        a, b = jnp.asarray(src)[i], jnp.asarray(dst)[i]
        return put_block(store, b, take_block(store, a))

    return lax.fori_loop(0, n_copies, one, store)


def keep_runs(store: KVStore, held: Bool[AnyArray, " N"]) -> KVStore:
    """Empties places of tails whose blocks nobody holds; see `keep_held`."""
    return map_arrays(lambda x, _: keep_held(x, held) if isinstance(x, PerChannel) else x, store)


def has_runs(store: KVStore) -> bool:
    """Whether keys are quantized by channel in runs, as in an engine's blocks."""
    return any(isinstance(k, PerChannel) and k.run for k in store.k)
