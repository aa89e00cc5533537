"""The n-th greatest of many numbers, found bit by bit: a sort takes as long as dense attention."""

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Float, Int32

LEAST, MOST = -(2**31), 2**31 - 1


def as_ordered(x: Float[Array, "..."]) -> Int32[Array, "..."]:
    """Integers in the order of float32 numbers, as their bits are; those of both zeros are equal.

    All are above `LEAST`.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, -(bits & jnp.int32(MOST)), bits)


def nth_greatest(ordered: Int32[Array, "*S U"], n: int | Int32[Array, "*S"]) -> Int32[Array, "*S"]:
    """The greatest number that n or more of U are not below; for n of 0 one that none reaches.

    Args:
      ordered: as `as_ordered` gives them; others must be below `MOST`.
      n: at most U.
    """

    def narrower(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends  # at least n are >= low, fewer than n are >= high
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = jnp.sum((ordered >= middle[..., None]).astype(jnp.int32), axis=-1) >= n
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    shape = ordered.shape[:-1]
    ends = jnp.full(shape, LEAST, jnp.int32), jnp.full(shape, MOST, jnp.int32)
    return lax.fori_loop(0, 32, narrower, ends)[0]
