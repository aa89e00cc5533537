"""Root-mean-square norms, in float32 whatever comes in."""

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Float


def unit_norm(x: Float[Array, "... D"], eps: float) -> Array:
    """Root-mean-square norm without weights.

    Source: arXiv:1910.07467.
    """
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Array:
    """Root-mean-square norm, each channel times its weight."""
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return unit_norm(x, eps) * weight
