"""Products with weights, in the form that XLA runs fastest for their dtype and the device."""

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Float, Int


def linear(x: Float[Array, "T I"], weight: Float[Array, "O I"]) -> Float[Array, "T O"]:
    """X times the transpose of weight, summed in float32.

    On CPU a product with half-precision weights would first convert the whole matrix, so one token
    is a fused multiply and sum instead; more tokens pay for the conversion.
    """
    if weight.dtype == jnp.float32:
        return _dot(x, weight)
    return lax.platform_dependent(x, weight, cpu=_linear_cpu, default=_linear_half)


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


def _linear_half(x: Array, weight: Array) -> Array:
    return _dot(x.astype(weight.dtype), weight)


def _linear_cpu(x: Array, weight: Array) -> Array:
    if x.shape[0] == 1:
        return jnp.sum(weight.astype(jnp.float32) * x, axis=1)[None]
    return _dot(x, weight.astype(jnp.float32))
