"""Matrices of eight bits a weight, and products with them in the forms that XLA runs fast.

Consecutive inputs of an output are a group with one scale. Every form multiplies the same integers
with activations of at least 15 bits, so that a token's logits hardly depend on how many tokens came
with it: prefill, decoding and the verification of drafts agree. Few tokens are summed as integers
(`sums/int8_sum.py`), each with the same bits whatever came with it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import Array, Float, Int, state
from kvrt_models.layers.sums.int8_sum import largest, sum_product

Form = Literal["sum", "int8", "f32"]
# Inputs that share a scale, at least and at most.
_LEAST_INPUTS, _MOST_INPUTS = 64, 320
# Of a file's blocks.
_BLOCK = 32
# Weights that are widened at a time: 1 MB of float32, which a core's second cache holds.
MOST_WIDENED = 1 << 18
# Tokens up to which a widened product has the matrix first: 1.15 to 1.3 times as fast at 16, as
# fast at 64, slower at 128.
_MOST_MATRIX_FIRST = 32
# The steps of a remainder in one step of an activation's first eight bits.
_STEPS = 254
Limits = tuple[tuple[int, Form], ...]


@dataclasses.dataclass(frozen=True)
class Forms:
    """Which form a product takes, by the number of its tokens; hashable, static in jit.

    Attributes:
      limits: each form with the most tokens it is taken for, ascending; the last takes the rest.
    """

    limits: Limits = ((8, "sum"), (1 << 30, "f32"))

    def of(self, n_tokens: int) -> Form:
        """The form of a product of that many tokens."""
        for most, form in self.limits:
            if n_tokens <= most:
                return form
        return self.limits[-1][1]


@state
class Int8Matrix:
    """A matrix [O, I] as integers in G groups of g inputs; weight = value * scale of its group.

    Groups come first, since YNNPACK multiplies a batch of small matrices that are each contiguous
    as fast as a whole one, and nothing else in groups. Experts have one more axis in front.

    Attributes:
      values: from -127 to 127, and -128 where a file has that.
      scale: of each output in each group, not negative; float16 where a file has those.
      forms: how it is multiplied.
    """

    values: Int[Array, "*N G O g"]
    scale: Float[Array, "*N G O"]
    forms: Forms = dataclasses.field(default=Forms(), metadata=dict(static=True))

    @property
    def n_inputs(self) -> int:
        """I."""
        return self.values.shape[-3] * self.values.shape[-1]


Multiply = Callable[[Array, Int8Matrix], Array]


def inputs_per_scale(n_inputs: int) -> int:
    """Inputs that share a scale: 64, or the next multiple of 16 to 320 that divides them, or all.

    On Zen 4 a token's products take as long with 64 as with 288, and lose half as much.
    """
    sizes = range(_LEAST_INPUTS, _MOST_INPUTS + 1, 16)
    return next((g for g in sizes if n_inputs % g == 0), n_inputs)


def quantize(weight: Float[np.ndarray, "*N O I"], group: int | None = None) -> Int8Matrix:
    """Rounds a matrix on the host; the greatest weight of each group becomes 127 or -127.

    Args:
      weight: finite.
      group: inputs that share a scale, a divisor of I; None is `inputs_per_scale`.
    """
    g = group or inputs_per_scale(weight.shape[-1])
    parts = weight.reshape(*weight.shape[:-1], -1, g).swapaxes(-2, -3)
    most = np.maximum(parts.max(axis=-1), -parts.min(axis=-1))
    inverse = np.divide(127, most, out=np.zeros_like(most), where=most > 0)
    # NumPy's arrays stand for those of a device until they are bound to one.
    values: Any = np.rint(parts * inverse[..., None]).astype(np.int8)
    scale: Any = most * np.float32(1 / 127)
    return Int8Matrix(values=values, scale=scale)


def shapes(size: tuple[int, ...], in_blocks: bool = False) -> Int8Matrix:
    """A matrix of this size as `quantize` makes it, or as a file has it, without its numbers."""
    *outer, n_outputs, n_inputs = size
    g = _BLOCK if in_blocks else inputs_per_scale(n_inputs)
    groups = (*outer, n_inputs // g, n_outputs)
    values: Any = jax.ShapeDtypeStruct((*groups, g), jnp.int8)
    scale: Any = jax.ShapeDtypeStruct(groups, jnp.float16 if in_blocks else jnp.float32)
    return Int8Matrix(values=values, scale=scale)


def dequantize(matrix: Int8Matrix) -> Float[Array, "O I"]:
    """The matrix that all forms multiply with, in float32."""
    return _widened(matrix.values, matrix.scale)


def rows_of(matrix: Int8Matrix, ids: Int[Array, " T"]) -> Float[Array, "T I"]:
    """Some rows of the matrix in float32: the embeddings of tokens."""
    return _widened(matrix.values[:, ids], matrix.scale[:, ids])


def _widened(values: Int[Array, "G R g"], scale: Float[Array, "G R"]) -> Float[Array, "R I"]:
    wide = values.astype(jnp.float32) * scale.astype(jnp.float32)[:, :, None]
    return wide.swapaxes(0, 1).reshape(wide.shape[1], -1)


# Traced once for all layers whose matrices have one shape; its operations stay part of the caller.
@functools.partial(jax.jit, inline=True)
def int8_product(x: Float[Array, "T I"], matrix: Int8Matrix) -> Float[Array, "T O"]:
    """X times the transpose of the matrix, in float32.

    On CPU in the form that `matrix.forms` names. GPUs and TPUs multiply integers of eight bits
    themselves: there it is always they, and nothing is widened.
    """
    multiply = FORMS[matrix.forms.of(x.shape[0])]
    return lax.platform_dependent(x, matrix, cpu=multiply, default=_by_int8)


def piece_size(matrix: Int8Matrix) -> int | None:
    """Outputs that are widened at a time; None is all of them.

    A matrix that is widened whole goes to memory and comes back; and a program whose temporaries
    are larger than what malloc keeps gets them anew at each call, page by page.
    """
    n_outputs = matrix.values.shape[-2]
    most = MOST_WIDENED // matrix.n_inputs
    if n_outputs <= most:
        return None
    sizes = (*range(most, most // 8, -1), *range(most + 1, min(8 * most, n_outputs)))
    return next((n for n in sizes if n_outputs % n == 0), None)


def _by_int8(x: Array, matrix: Int8Matrix) -> Array:
    """Integer products of the activations' first eight bits and of what those leave.

    On CPU YNNPACK takes no product with a single column, and up to four cost the same.
    """
    most = largest(x)
    scaled = _grouped(x * jnp.where(most > 0, 127 / most, 0.0)[:, None], matrix)
    first = jnp.round(scaled)
    rest = jnp.round((scaled - first) * _STEPS)
    sums = _products(matrix.values, (first, rest)).astype(jnp.float32)
    first, rest = jnp.split(sums, 2, axis=2)
    y = _scaled_sum(first * _STEPS + rest, matrix.scale.astype(jnp.float32))
    return y.T * (most * (1 / (127 * _STEPS)))[:, None]


def _by_f32(x: Array, matrix: Int8Matrix) -> Array:
    """Products with the matrix in float32; a large one is widened piece by piece."""
    size = piece_size(matrix)
    return _by_widened(x, matrix) if size is None else _in_pieces(size, x, matrix)


def _by_widened(x: Array, matrix: Int8Matrix) -> Array:
    """The product with a matrix that is widened for it alone."""
    scale = matrix.scale.astype(jnp.float32) + _zero_after(x)
    wide = [v.astype(jnp.float32) * s[:, None] for v, s in zip(matrix.values, scale, strict=True)]
    whole = lax.optimization_barrier(jnp.concatenate(wide, axis=1))
    columns = (((1,), (1,)), ((), ()))
    if x.shape[0] > _MOST_MATRIX_FIRST:
        return lax.dot_general(x, whole, columns)
    # The barrier keeps XLA from exchanging the two again.
    return lax.optimization_barrier(lax.dot_general(whole, x, columns)).T


def _in_pieces(size: int, x: Array, matrix: Int8Matrix) -> Array:
    """The product of a large matrix, `size` outputs at a time."""
    n_outputs = matrix.values.shape[1]

    def piece(i: Array, out: Array) -> Array:
        cut = functools.partial(
            lax.dynamic_slice_in_dim, start_index=i * size, slice_size=size, axis=1
        )
        return lax.dynamic_update_slice_in_dim(
            out, _by_widened(x, jax.tree.map(cut, matrix)), i * size, axis=1
        )

    # A constant would be copied for every product when the program begins.
    out = jnp.broadcast_to(_zero_after(x), (x.shape[0], n_outputs))
    return lax.fori_loop(0, n_outputs // size, piece, out)


def _by_sum(x: Array, matrix: Int8Matrix) -> Array:
    return sum_product(x, matrix.values, matrix.scale)


# How a product is computed on CPU.
FORMS: dict[Form, Multiply] = {"sum": _by_sum, "int8": _by_int8, "f32": _by_f32}


def _grouped(x: Array, matrix: Int8Matrix) -> Float[Array, "G T g"]:
    """The inputs group by group.

    Slices that are stacked lie so in memory; a transposition XLA would leave to the product's
    operand, and YNNPACK takes none that does not lie in the order of its axes.
    """
    n_groups, _, g = matrix.values.shape
    if x.shape[0] == 1:
        return x.reshape(n_groups, 1, g)
    return jnp.stack([x[:, i * g : (i + 1) * g] for i in range(n_groups)])


def _products(values: Array, parts: Sequence[Array]) -> Int[Array, "G O P*T"]:
    """Each group's product with the parts of the activations, side by side."""
    # Barriers keep what makes the operands, and what is done with the sums, out of the product.
    columns = lax.optimization_barrier(jnp.concatenate(parts, axis=1).astype(jnp.int8))
    if values.shape[0] == 1:
        y = lax.dot_general(values[0], columns[0], (((1,), (1,)), ((), ())), None, jnp.int32)[None]
    else:
        y = lax.dot_general(values, columns, (((2,), (2,)), ((0,), (0,))), None, jnp.int32)
    return lax.optimization_barrier(y)


def _scaled_sum(sums: Array, scale: Array) -> Float[Array, "O T"]:
    """The sum over groups, one term after the other: a reduction would not be vectorized."""
    return sum(y * s[:, None] for y, s in zip(sums, scale, strict=True))  # pyright: ignore


def _zero_after(x: Array) -> Float[Array, ""]:
    """Zero, known only once x is.

    Without the dependency XLA widens every matrix when the program begins, and holds them all.
    """
    bits = lax.bitcast_convert_type(x[0, 0], jnp.int32)
    return lax.clamp(jnp.int32(0), bits, jnp.int32(0)).astype(jnp.float32)
