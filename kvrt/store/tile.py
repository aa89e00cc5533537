"""Tiles: blocks of a layer side by side, in float32, as attention reads them."""

from typing import TypeVar

import jax
import jax.numpy as jnp

from kvrt.arrays import Array, Float, Int32
from kvrt.store import per_channel
from kvrt.store.codec import KVArray, decode
from kvrt.store.per_channel import KeyArray, PerChannel

AnyOf = TypeVar("AnyOf", bound=KVArray)


def keys(k: KeyArray, ids: Int32[Array, "*S M"]) -> Float[Array, "*S H D _"]:
    """Keys of blocks, their cells in the order of `ids`; block lists by leading axes."""
    if isinstance(k, PerChannel):
        return per_channel.read_keys(k, _side_by_side(k.quantized, ids, 3), ids)
    return decode(_side_by_side(k, ids, 3), -2)


def values(v: KVArray, ids: Int32[Array, "*S M"]) -> Float[Array, "*S H _ D"]:
    """Values of blocks, likewise."""
    return decode(_side_by_side(v, ids, 2), -1)


def behind_latent(
    keys: Float[Array, "*S H D _"], latent: Float[Array, "*S H _ R"]
) -> Float[Array, "*S H _ _"]:
    """Keys as queries see them, behind the latent that `values` gives."""
    return jnp.concatenate([jnp.swapaxes(latent, -1, -2), keys], axis=-2)


def _side_by_side(cached: AnyOf, ids: Array, cell_axis: int) -> AnyOf:
    def joined(x: Array) -> Array:
        if ids.shape[-1] == 1:
            # A slice, which the product may read in place.
            return x[ids[..., 0]]
        at = cell_axis + ids.ndim - 2
        found = jnp.moveaxis(x[ids], ids.ndim - 1, at)
        n = found.shape[at] * found.shape[at + 1]
        return found.reshape(*found.shape[:at], n, *found.shape[at + 2 :])

    return jax.tree.map(joined, cached)
