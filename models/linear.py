"""Products with weights, in the form that XLA runs fastest for their dtype and the device."""

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Float, Int


def linear(x: Float[Array, "T I"], weight: Float[Array, "O I"]) -> Float[Array, "T O"]:
    """X times the transpose of weight, summed in float32; with half-precision weights x is rounded.

    On CPU a product of one half-precision row would first convert the whole matrix, and a second,
    empty row avoids that.
    """
    x = x.astype(weight.dtype)
    if x.shape[0] > 1 or weight.dtype == jnp.float32:
        return _dot(x, weight)
    return lax.platform_dependent(x, weight, cpu=_dot_of_two, default=_dot)


def embed(weight: Float[Array, "V E"], tokens: Int[Array, " T"]) -> Float[Array, "T E"]:
    """Rows of the embedding in float32.

    Gathering from a half-precision array would convert all of it on CPU; its bits are gathered
    instead and only the chosen rows are converted.
    """
    if weight.dtype == jnp.float32:
        return weight[tokens]
    bits = lax.bitcast_convert_type(weight, jnp.uint16)[tokens]
    return lax.bitcast_convert_type(bits, weight.dtype).astype(jnp.float32)


def _dot(x: Array, weight: Array) -> Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _dot_of_two(x: Array, weight: Array) -> Array:
    return _dot(jnp.concatenate([x, jnp.zeros_like(x)]), weight)[:1]
