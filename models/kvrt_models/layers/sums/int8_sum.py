"""Eight-bit products of few tokens as integer sums, which XLA vectorizes and divides between cores.

Activations are rounded to int16, products are summed in int32. XLA's CPU backend rewrites a plain
integer sum into a window sum over stored products. It leaves a reduction of several operands
alone, and LLVM makes widening multiply-adds of it (vpmaddwd, vpdpwssd). The operands are several
groups of inputs, or several tokens.
"""

import functools
import operator
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import Array, Float, Int

# The numbers of an operand's last axis, over all operands, from which a sum runs at full speed.
_LEAST_INPUTS = 128
# More accumulators than this leave the registers.
_MOST_OPERANDS = 8


def sum_product(
    x: Float[Array, "T I"], values: Int[Array, "G O g"], scale: Float[Array, "G O"]
) -> Float[Array, "T O"]:
    """X times the transpose of the matrix; integer sums are exact, at any size of a group.

    A token has the same bits alone and among others. One with a NaN or an infinity has no finite
    output; the others do not change.
    """
    n_tokens, (n_groups, _, g) = x.shape[0], values.shape
    split = _split(n_tokens, n_groups, g)
    if split is None:
        return sum_product(jnp.concatenate([x, jnp.zeros_like(x)]), values, scale)[:1]
    whole, step = _rounded(x, g)
    sums = integer_sums(whole, values, scale, *split)
    each = [_scaled_sum(of_token, scale) for of_token in sums]
    return jnp.stack(each) * step[:, None]


def integer_sums(
    whole: Int[Array, "T I"],
    values: Int[Array, "G O g"],
    scale: Float[Array, "G O"],
    n: int,
    parts: int,
) -> list[list[Int[Array, " O"]]]:
    """Sums of each token, of each group, by one reduction that reads the values once.

    The activations of one token are the same for all outputs, so LLVM would widen them before its
    loop over outputs, and narrow them for each multiply-add. A zero of each output prevents that.

    Args:
      whole: activations, int16.
      values: the weights, int8.
      scale: of each output in each group.
      n: neighbouring groups that are operands of their own, a divisor of G.
      parts: of a group that are operands of their own, a divisor of g.
    """
    (n_groups, n_outputs, g), n_tokens = values.shape, whole.shape[0]
    v = values.reshape(n_groups // n, n, n_outputs, parts, g // parts)
    x = whole.reshape(n_tokens, n_groups // n, n, 1, parts, g // parts)
    if n_tokens == 1:
        x = x ^ _zeros(scale.reshape(n_groups // n, n, n_outputs)[:, :1])[None, ..., None, None]
    places = [(t, i, p) for t in range(n_tokens) for i in range(n) for p in range(parts)]
    terms = [
        v[:, i, :, p].astype(jnp.int32) * x[t, :, i, :, p].astype(jnp.int32) for t, i, p in places
    ]
    # XLA cuts the outer axis for its cores: of three groups one core would get two, so a token
    # alone has outputs there. With more tokens that takes longer.
    swap = (lambda y: jnp.swapaxes(y, 0, 1)) if n_tokens == 1 else (lambda y: y)
    zeros = (np.int32(0),) * len(terms)
    sums = map(swap, lax.reduce(tuple(map(swap, terms)), zeros, _each(operator.add), (2,)))
    of_place = dict(zip(places, sums, strict=True))

    def of_group(t: int, group: int) -> Array:
        k, i = divmod(group, n)
        return _added([of_place[t, i, p][k] for p in range(parts)])

    return [[of_group(t, group) for group in range(n_groups)] for t in range(n_tokens)]


def largest(x: Float[Array, "T I"]) -> Float[Array, " T"]:
    """The greatest magnitude of each row, NaN where it has one.

    Taken of their bits, which are ordered as they are: on CPU a maximum of floats may skip a NaN.
    """
    bits, half = lax.bitcast_convert_type(jnp.abs(x), jnp.int32), x.shape[1] // 2
    if x.shape[1] % 2 == 0:
        # Of two operands it is one kernel, which computes the bits too.
        two, least = (bits[:, :half], bits[:, half:]), (np.int32(0),) * 2
        most = jnp.maximum(*lax.reduce(two, least, _each(jnp.maximum), (1,)))
    else:
        most = jnp.max(bits, axis=1)
    return lax.bitcast_convert_type(most, jnp.float32)


def levels(g: int) -> int:
    """The integer of a row's greatest activation: no sum over g inputs leaves int32."""
    return min(2**15 - 1, (2**31 - 1) // (127 * g))


def _rounded(x: Array, g: int) -> tuple[Int[Array, "T I"], Float[Array, " T"]]:
    """Activations in int16, and the value of one step of each row."""
    most = largest(x)
    step = most * (1 / levels(g))
    # A conversion makes zero of NaN; the step, which the sums are multiplied with, stays NaN.
    rounded = jnp.round(x / step[:, None]).astype(jnp.int16)
    # XLA computes what is cheap again for each output, a rounding too, but puts no sum into a sum.
    # This one has two terms of which the second is zero, as XLA does not see.
    terms = rounded[:, :, None] & np.array([-1, 0], np.int16)[None, None]
    return lax.reduce(terms, np.int16(0), lax.bitwise_or, (2,)), step


def _zeros(scale: Array) -> Int[Array, "..."]:
    """Zeros of int16 that are not known before run time: no scale is negative."""
    if scale.dtype == jnp.float16:
        return lax.bitcast_convert_type(scale, jnp.int16) >> np.int16(15)
    return (lax.bitcast_convert_type(scale, jnp.int32) >> 31).astype(jnp.int16)


def _split(n_tokens: int, n_groups: int, g: int) -> tuple[int, int] | None:
    """Groups, and parts of a group, that are operands of their own; None without a second one."""
    for n in range(1, _MOST_OPERANDS // n_tokens + 1):
        if n_groups % n == 0 and n * n_tokens > 1 and n * n_tokens * g >= _LEAST_INPUTS:
            return n, 1
    if n_tokens > 1:
        return 1, 1
    return (1, 2) if g % 2 == 0 else None


def _scaled_sum(sums: list[Array], scale: Array) -> Float[Array, " O"]:
    """The sum over groups, one term after the other: a float reduction would not be vectorized."""
    wide = [s.astype(jnp.float32) for s in scale]
    return _added([y.astype(jnp.float32) * s for y, s in zip(sums, wide, strict=True)])


def _each(of_two: Callable[[Array, Array], Array]) -> Callable[..., tuple[Array, ...]]:
    """What reduces several operands at once, each by itself."""
    return lambda a, b: tuple(map(of_two, a, b))


def _added(terms: list[Array]) -> Array:
    return functools.reduce(operator.add, terms)
