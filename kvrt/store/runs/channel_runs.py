"""Keys quantized by channel in an engine's blocks: copies of blocks, and runs that end early.

A run of cells stays float16 until its last cell is written (`PerChannel.run`), so the tail has room
for one run of every sequence. Whoever ends a sequence within a run has to say so, with `keep_held`:
otherwise its place would go to another sequence only when a run that is still being written has
lost its own.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Int32
from kvrt.store.codec import KVArray, Quantized
from kvrt.store.kv import KVStore, put_part, take_part
from kvrt.store.per_channel import KeyArray, PerChannel, tail_places, without_places


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


def copy_block(cached: PerChannel, src: Array, dst: Array) -> PerChannel:
    """Copies a block to another one, bit by bit, with what the tail has of it.

    Args:
      cached: donated by the jitted caller.
      src: the block to read.
      dst: the block to write; what the tail has of it is dropped.
    """
    cached = forget_blocks(cached, dst[None])
    quantized = cached.quantized

    def copied(x: AnyArray) -> Array:
        one = lax.dynamic_index_in_dim(x, src, 0)
        return lax.dynamic_update_slice_in_dim(x, one, dst, 0)

    assert quantized.zero_point is not None, "keys quantized by channel have zero points"
    cached = dataclasses.replace(
        cached,
        quantized=Quantized(
            data=copied(quantized.data),
            scale=copied(quantized.scale),
            zero_point=copied(quantized.zero_point),
            codec=quantized.codec,
        ),
    )
    n = quantized.scale.shape[3]

    def tail_too(i: Array, cached: PerChannel) -> PerChannel:
        held, of = tail_places(cached, src * n + i)
        # Beyond the last place nothing is written.
        to = jnp.where(held, jnp.argmin(cached.written), cached.group.shape[0])
        keys = jnp.asarray(cached.tail)[of]
        newest = jnp.max(cached.written) + 1
        return dataclasses.replace(
            cached,
            tail=jnp.asarray(cached.tail).at[to].set(keys, mode="drop"),
            group=jnp.asarray(cached.group).at[to].set(dst * n + i, mode="drop"),
            written=jnp.asarray(cached.written).at[to].set(newest, mode="drop"),
        )

    return lax.fori_loop(0, n, tail_too, cached)


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
        a, b, whole = jnp.asarray(src)[i], jnp.asarray(dst)[i], jnp.int32(0)

        def copied(x: KVArray) -> KVArray:
            return put_part(x, take_part(x, a, whole, 1), b, whole)

        def copied_keys(k: KeyArray) -> KeyArray:
            is_by_channel = isinstance(k, PerChannel)
            return copy_block(k, a, b) if is_by_channel else copied(k)

        return KVStore(k=tuple(map(copied_keys, store.k)), v=tuple(map(copied, store.v)))

    return lax.fori_loop(0, n_copies, one, store)


def keep_runs(store: KVStore, held: Bool[AnyArray, " N"]) -> KVStore:
    """Empties places of tails whose blocks nobody holds; see `keep_held`."""

    def one(k: KeyArray) -> KeyArray:
        return keep_held(k, held) if isinstance(k, PerChannel) else k

    return KVStore(k=tuple(map(one, store.k)), v=store.v)


def has_runs(store: KVStore) -> bool:
    """Whether keys are quantized by channel in runs, as in an engine's blocks."""
    return any(isinstance(k, PerChannel) and k.run for k in store.k)
