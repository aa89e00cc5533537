"""Blocks as bytes, to leave the device and to come back: cached keys and values, or states.

All arrays of a block lie one after the other, each as the device has it, so that a block is one
piece of memory for whoever keeps it.
"""

import dataclasses
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Int32, UInt8
from kvrt.store.codec import KVArray
from kvrt.store.kv import KVStore, map_arrays
from kvrt.store.per_channel import KeyArray, PerChannel
from kvrt.store.recurrent import StateStore
from kvrt.store.runs import channel_runs

Store = TypeVar("Store", KVStore, StateStore)


def take_blocks(store: Store, ids: Int32[AnyArray, " M"]) -> UInt8[Array, "M _"]:
    """Copies of blocks; those of padding, whose id is beyond the last, are zero.

    Args:
      store: arrays with a block, or a state, for each index of their first axis.
      ids: which.
    """

    def flat(x: Array) -> Array:
        found = x.at[ids].get(mode="fill", fill_value=0)
        return lax.bitcast_convert_type(found, jnp.uint8).reshape(found.shape[0], -1)

    return jnp.concatenate([flat(x) for x in jax.tree.leaves(in_blocks(store))], axis=1)


def put_blocks(store: Store, ids: Int32[AnyArray, " M"], data: UInt8[AnyArray, "M _"]) -> Store:
    """Replaces blocks by what `take_blocks` gave; padding is dropped.

    Args:
      store: donated by the jitted caller.
      ids: which.
      data: their bytes.
    """
    leaves, tree = jax.tree.flatten(in_blocks(store))
    out, start = [], 0
    for x in leaves:
        n = math.prod(x.shape[1:]) * x.dtype.itemsize
        part = jnp.asarray(data)[:, start : start + n]
        # Wider types are made of the bytes of a last axis.
        last = (x.dtype.itemsize,) if x.dtype.itemsize > 1 else ()
        part = part.reshape(part.shape[0], *x.shape[1:], *last)
        out.append(x.at[ids].set(lax.bitcast_convert_type(part, x.dtype), mode="drop"))
        start += n
    return with_blocks(store, ids, jax.tree.unflatten(tree, out))


def in_blocks(store: Store) -> Any:
    """The arrays that have a block for each index: of keys by channel those without the tail.

    A block leaves the device when all of it is written, and then no run of it is in the tail.
    """
    if isinstance(store, StateStore):
        return store
    return map_arrays(lambda x, _: x.quantized if isinstance(x, PerChannel) else x, store)


def with_blocks(store: Store, ids: AnyArray, new: Any) -> Any:
    """The store with such arrays; what the tail had of the blocks `ids` counts no more."""
    if isinstance(store, StateStore):
        return new

    def replaced(old: KeyArray, _: int, new: KVArray) -> KeyArray:
        if not isinstance(old, PerChannel):
            return new
        return channel_runs.forget_blocks(dataclasses.replace(old, quantized=new), ids)

    return map_arrays(replaced, store, new)
