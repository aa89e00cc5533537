"""Matrices of eight bits made of a source's rows, a few at a time, and how much they lose."""

import dataclasses
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import ml_dtypes
import numpy as np

from kvrt.arrays import Float
from kvrt_models.layers import int8
from kvrt_models.layers.int8 import Int8Matrix
from kvrt_models.layers.lanes import LANES
from kvrt_models.layers.tensors import tensor_shape, weight_shape
from kvrt_models.weights.source import WeightSource

# The greatest relative error, by the Frobenius norm, that eight bits may make in a matrix. Those of
# SmolLM2 make 0.7 to 1.1 %, those of Gemma 3 0.7 to 1.4 %, most of both 0.8 %.
MOST_ERROR = 0.02
# Weights that are in memory as float32 at a time, a few times over.
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounded:
    """A matrix as it is kept.

    Attributes:
      matrix: of eight bits; in bfloat16 where those would lose too much.
      error: of the eight bits, relative; infinite where weights are not finite.
    """

    matrix: Int8Matrix | np.ndarray
    error: float

    @property
    def why_not(self) -> str | None:
        """Why it is not of eight bits; None where it is."""
        if self.error <= MOST_ERROR:
            return None
        if math.isinf(self.error):
            return "weights that are not finite"
        return f"an error of {100 * self.error:.1f} %"


def round_matrix(source: WeightSource, tensors: Sequence[str], pool: Executor) -> Rounded:
    """Quantizes the tensors that are the rows of one matrix.

    Args:
      source: that has them.
      tensors: their names, in order.
      pool: whose threads read and round chunks of rows.

    Raises:
      BadModelFile: a tensor is damaged.
    """
    shape = weight_shape(source.spec, tuple(tensors))
    *outer, n_outputs, _ = shape
    in_blocks = all(name in source.blocks for name in tensors)
    like = int8.shapes(shape, in_blocks)
    values = _pages((math.prod(outer), *like.values.shape[len(outer) :]), np.int8)
    scale = _pages((math.prod(outer), *like.scale.shape[len(outer) :]), like.scale.dtype)
    rounded = _as_stored if in_blocks else _quantize

    def chunk(at: int, rows: np.ndarray) -> tuple[float, float]:
        expert, first = divmod(at, n_outputs)
        of_rows = slice(first, first + len(rows))
        made, lost, all_of_it = rounded(rows)
        if like.in_lanes:
            at_lane = np.divmod(np.arange(n_outputs)[of_rows], LANES)
            values[expert, at_lane[0], :, :, at_lane[1]] = made.values.swapaxes(0, 1)
        else:
            values[expert, :, of_rows] = made.values
        scale[expert, :, of_rows] = made.scale
        return lost, all_of_it

    lost, all_of_it = 0.0, 0.0
    rows = source.blocks.__getitem__ if in_blocks else source.rows
    for more_lost, more in _each_chunk(source, tensors, rows, chunk, pool):
        lost, all_of_it = lost + more_lost, all_of_it + more
    error = math.sqrt(lost / all_of_it) if all_of_it > 0 else lost
    error = error if math.isfinite(error) else math.inf
    # NumPy's arrays stand for those of a device until they are bound to one.
    of_scale: Any = scale.reshape(*outer, *scale.shape[1:])
    of_values: Any = values.reshape(*outer, *values.shape[1:])
    if error <= MOST_ERROR:
        return Rounded(matrix=Int8Matrix(values=of_values, scale=of_scale), error=error)
    del values, scale, of_values, of_scale
    return Rounded(matrix=_in_bf16(source, tensors, shape, pool), error=error)


def _quantize(rows: Float[np.ndarray, "R I"]) -> tuple[Int8Matrix, float, float]:
    """Rounds rows; also returns the sums of squares of the errors and of the weights."""
    flat = rows.reshape(-1)
    # Weights near the greatest number and the least have no square or no inverse: they count as
    # lost.
    with np.errstate(all="ignore"):
        squares = float(np.dot(flat, flat))
        made = int8.quantize(rows if math.isfinite(squares) else np.zeros_like(rows))
        if not math.isfinite(squares):
            return made, math.inf, math.inf
        wide = np.asarray(made.values) * np.asarray(made.scale)[..., None]
        n_groups, n_rows, g = wide.shape
        wide -= rows.reshape(n_rows, n_groups, g).swapaxes(0, 1)
        flat = wide.reshape(-1)
        lost = float(np.dot(flat, flat))
    return made, (lost if math.isfinite(lost) else math.inf), squares


def _as_stored(blocks: np.ndarray) -> tuple[Int8Matrix, float, float]:
    """Takes a file's blocks [R, G] as they are, so that nothing is lost.

    Products take no negative scale, so that values get its sign; -128 then becomes 127.
    """
    negative = np.signbit(blocks["scale"])[..., None]
    signed = np.where(negative, -np.maximum(blocks["values"], np.int8(-127)), blocks["values"])
    values: Any = signed.swapaxes(0, 1)
    scale: Any = np.abs(blocks["scale"]).T
    lost = 0.0 if np.isfinite(scale).all() else math.inf
    return Int8Matrix(values=values, scale=scale), lost, 1.0


def _pages(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array in pages of its own: JAX takes it without a copy, and none stay when it is gone."""
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, n_bytes), dtype).reshape(shape)


def _in_bf16(
    source: WeightSource, tensors: Sequence[str], shape: tuple[int, ...], pool: Executor
) -> np.ndarray:
    out = _pages((math.prod(shape[:-1]), shape[-1]), ml_dtypes.bfloat16)

    def chunk(at: int, rows: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            out[at : at + len(rows)] = rows.astype(ml_dtypes.bfloat16)

    for _ in _each_chunk(source, tensors, source.rows, chunk, pool):
        pass
    return out.reshape(shape)


def _each_chunk(
    source: WeightSource,
    tensors: Sequence[str],
    rows: Callable[[str], Callable[[int, int], np.ndarray]],
    do: Callable[[int, np.ndarray], Any],
    pool: Executor,
) -> Iterator[Any]:
    """What `do` gives for each chunk of rows: its first row in the matrix, and the rows.

    A chunk ends with its expert; `rows` opens a tensor.
    """
    first = 0
    for name in tensors:
        shape = tensor_shape(source.spec, name)
        n_rows, n_outputs, read = math.prod(shape[:-1]), shape[-2], rows(name)
        n = min(max(_CHUNK // shape[-1], 1), n_outputs)
        starts = [e + at for e in range(0, n_rows, n_outputs) for at in range(0, n_outputs, n)]

        def one(at: int, read=read, n=n, n_outputs=n_outputs, first=first) -> Any:
            end = min(at + n, (at // n_outputs + 1) * n_outputs)
            return do(first + at, read(at, end))

        yield from pool.map(one, starts)
        first += n_rows
