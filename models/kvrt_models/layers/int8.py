"""Matrices of eight bits a weight, and products with them in the forms that XLA runs fast.

Consecutive inputs of an output are a group with one scale. Every form multiplies the same integers
with activations of at least 15 bits, so that a token's logits hardly depend on how many tokens came
with it: prefill, decoding and the verification of drafts agree. Few tokens on a CPU are multiplied
with weights that are widened in registers (`lanes.py`), each with the same bits whatever came with
it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import Array, Float, Int, state
from kvrt_models.layers.lanes import LANES, in_lanes, in_rows, lane_product, n_pieces, zero_after

# Inputs that share a scale, at least and at most.
_LEAST_INPUTS, _MOST_INPUTS = 64, 320
# Of a file's blocks.
_BLOCK = 32
# Tokens up to which weights are widened in registers; for more they are widened in memory, and up
# to the second number the matrix comes first in the product.
MOST_IN_LANES, _MOST_MATRIX_FIRST = 16, 32
# Weights that are widened in memory at a time: 2 MB of float32.
MOST_WIDENED = 1 << 19
# The steps of a remainder in one step of an activation's first eight bits.
_STEPS = 254


@state
class Int8Matrix:
    """A matrix [O, I] as integers in G groups of g inputs; weight = value * scale of its group.

    CPUs have P times L neighbouring outputs innermost, see `lanes.py`. GPUs and TPUs have groups
    first, since they multiply a batch of small matrices that are each contiguous. Experts have one
    more axis in front.

    Attributes:
      values: from -127 to 127, and -128 where a file has that.
      scale: of each output in each group, not negative; float16 where a file has those.
    """

    values: Int[Array, "*N P G g L"] | Int[Array, "*N G O g"]
    scale: Float[Array, "*N G O"]

    @property
    def in_lanes(self) -> bool:
        """Whether neighbouring outputs are innermost."""
        return self.values.ndim == self.scale.ndim + 2

    @property
    def n_outputs(self) -> int:
        """O."""
        return self.scale.shape[-1]

    @property
    def n_inputs(self) -> int:
        """I."""
        return self.scale.shape[-2] * self.values.shape[-2 if self.in_lanes else -1]


def inputs_per_scale(n_inputs: int) -> int:
    """Inputs that share a scale: 64, or the next multiple of 16 to 320 that divides them, or all.

    On Zen 4 a token's products take as long with 64 as with 288, and lose half as much.
    """
    sizes = range(_LEAST_INPUTS, _MOST_INPUTS + 1, 16)
    return next((g for g in sizes if n_inputs % g == 0), n_inputs)


def quantize(weight: Float[np.ndarray, "*N O I"], group: int | None = None) -> Int8Matrix:
    """Rounds a matrix on the host; the greatest weight of each group becomes 127 or -127.

    The result has groups first; `for_device` gives it as the device has it.

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


def for_device(matrix: Int8Matrix) -> Int8Matrix:
    """A matrix of `quantize` as JAX's default device multiplies it, still on the host."""
    if jax.default_backend() != "cpu":
        return matrix
    values: Any = in_lanes(np.asarray(matrix.values))
    return Int8Matrix(values=values, scale=matrix.scale)


def shapes(size: tuple[int, ...], in_blocks: bool = False) -> Int8Matrix:
    """A matrix of this size as the device has it, by `quantize` or of a file, without numbers."""
    *outer, n_outputs, n_inputs = size
    g = _BLOCK if in_blocks else inputs_per_scale(n_inputs)
    groups = (*outer, n_inputs // g, n_outputs)
    if jax.default_backend() == "cpu":
        whole = (*outer, -(-n_outputs // LANES), n_inputs // g, g, LANES)
    else:
        whole = (*groups, g)
    values: Any = jax.ShapeDtypeStruct(whole, jnp.int8)
    scale: Any = jax.ShapeDtypeStruct(groups, jnp.float16 if in_blocks else jnp.float32)
    return Int8Matrix(values=values, scale=scale)


def dequantize(matrix: Int8Matrix) -> Float[Array, "O I"]:
    """The matrix that all forms multiply with, in float32."""
    values = matrix.values
    rows = in_rows(values, matrix.n_outputs) if matrix.in_lanes else values
    return _widened(rows, matrix.scale)


def rows_of(matrix: Int8Matrix, ids: Int[Array, " T"]) -> Float[Array, "T I"]:
    """Some rows of the matrix in float32: the embeddings of tokens."""
    if matrix.in_lanes:
        values = matrix.values[ids // LANES, :, :, ids % LANES].swapaxes(0, 1)
    else:
        values = matrix.values[:, ids]
    return _widened(values, matrix.scale[:, ids])


def _widened(values: Int[Array, "G R g"], scale: Float[Array, "G R"]) -> Float[Array, "R I"]:
    wide = values.astype(jnp.float32) * scale.astype(jnp.float32)[:, :, None]
    return wide.swapaxes(0, 1).reshape(wide.shape[1], -1)


# Traced once for all layers whose matrices have one shape.
@jax.jit
def int8_product(
    x: Float[Array, "T I"], matrix: Int8Matrix, expert: Int[Array, ""] | None = None
) -> Float[Array, "T O"]:
    """X times the transpose of the matrix, or of an expert's, in float32.

    GPUs and TPUs multiply integers of eight bits themselves: there nothing is widened.
    """
    if not matrix.in_lanes:
        return _by_int8(x, matrix if expert is None else _of_expert(matrix, expert))
    return (by_lanes if x.shape[0] <= MOST_IN_LANES else by_widened)(x, matrix, expert)


def by_lanes(
    x: Float[Array, "T I"], matrix: Int8Matrix, expert: Int[Array, ""] | None = None
) -> Float[Array, "T O"]:
    """The product with weights that are widened in registers."""
    *_, n_parts, n_groups, g, _ = matrix.values.shape
    # An expert is not cut out: that would copy it.
    values = matrix.values.reshape(-1, n_groups, g, LANES)
    first = jnp.int32(0) if expert is None else expert * n_parts
    scale = matrix.scale if expert is None else _of_expert(matrix, expert).scale
    n = n_pieces(n_parts, x.shape[0], x.shape[1], g)
    return _in_pieces(n, x, scale, lambda s, at: lane_product(x, values, s, first + at))


def by_widened(
    x: Float[Array, "T I"], matrix: Int8Matrix, expert: Int[Array, ""] | None = None
) -> Float[Array, "T O"]:
    """The product with weights that are widened in memory, as many at a time as stay in cache."""
    of = matrix if expert is None else _of_expert(matrix, expert)

    def multiply(scale: Array, at: int | Array) -> Array:
        n_parts = scale.shape[1] // LANES
        return _by_widened(x, lax.dynamic_slice_in_dim(of.values, at, n_parts), scale)

    return _in_pieces(of.values.shape[0] // piece_size(of), x, of.scale, multiply)


def _of_expert(matrix: Int8Matrix, expert: Int[Array, ""]) -> Int8Matrix:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, expert, keepdims=False), matrix)


def piece_size(matrix: Int8Matrix) -> int:
    """Parts of L outputs that are widened in memory at a time.

    A matrix that is widened whole goes to memory and comes back; and a program whose temporaries
    are larger than what malloc keeps gets them anew at each call, page by page.
    """
    n_parts = matrix.values.shape[-4]
    most = MOST_WIDENED // (matrix.n_inputs * LANES)
    if n_parts <= most:
        return n_parts
    sizes = (*range(most, most // 8, -1), *range(most + 1, min(8 * most, n_parts)))
    return next((n for n in sizes if n and n_parts % n == 0), n_parts)


def _by_int8(x: Array, matrix: Int8Matrix) -> Array:
    """Integer products of the activations' first eight bits and of what those leave.

    On CPU YNNPACK takes no product with a single column, and up to four cost the same.
    """
    most = _largest(x)
    scaled = _grouped(x * jnp.where(most > 0, 127 / most, 0.0)[:, None], matrix)
    first = jnp.round(scaled)
    rest = jnp.round((scaled - first) * _STEPS)
    sums = _products(matrix.values, (first, rest)).astype(jnp.float32)
    first, rest = jnp.split(sums, 2, axis=2)
    y = _scaled_sum(first * _STEPS + rest, matrix.scale.astype(jnp.float32))
    return y.T * (most * (1 / (127 * _STEPS)))[:, None]


def _by_widened(x: Array, values: Array, scale: Array) -> Array:
    """The product with weights that are widened for it alone."""
    rows = in_rows(values, scale.shape[1])
    # Without the dependency XLA widens every matrix when the program begins, and holds them all.
    wide = _widened(rows, scale.astype(jnp.float32) + zero_after(x))
    whole, columns = lax.optimization_barrier(wide), (((1,), (1,)), ((), ()))
    if x.shape[0] > _MOST_MATRIX_FIRST:
        return lax.dot_general(x, whole, columns)
    # The barrier keeps XLA from exchanging the two again.
    return lax.optimization_barrier(lax.dot_general(whole, x, columns)).T


def _in_pieces(
    n: int, x: Array, scale: Float[Array, "G O"], multiply: Callable[[Array, int | Array], Array]
) -> Float[Array, "T O"]:
    """The product in `n` pieces of as many outputs, from their scales and their first part.

    The last part is filled up with outputs whose scale is 0.
    """
    n_outputs = scale.shape[1]
    n_parts = -(-n_outputs // LANES)
    size, missing = n_parts // n * LANES, n_parts * LANES - n_outputs
    scale = jnp.pad(scale, ((0, 0), (0, missing))) if missing else scale
    if n == 1:
        return multiply(scale, 0)[:, :n_outputs]

    def piece(i: Array, out: Array) -> Array:
        of_piece = lax.dynamic_slice_in_dim(scale, i * size, size, axis=1)
        y = multiply(of_piece, i * (n_parts // n))
        return lax.dynamic_update_slice_in_dim(out, y, i * size, axis=1)

    # A constant would be copied for every product when the program begins.
    out = jnp.broadcast_to(zero_after(x), (x.shape[0], n * size))
    return lax.fori_loop(0, n, piece, out)[:, :n_outputs]


def _largest(x: Float[Array, "T I"]) -> Float[Array, " T"]:
    """The greatest magnitude of each row, NaN where it has one."""
    return lax.bitcast_convert_type(
        jnp.max(lax.bitcast_convert_type(jnp.abs(x), jnp.int32), axis=1), jnp.float32
    )


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
