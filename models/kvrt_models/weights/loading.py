"""From a source to the weights of a decoder: their shapes at once, their numbers as they come."""

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import ml_dtypes
import numpy as np

from kvrt_models.layers.int8 import Int8Matrix
from kvrt_models.layers.linear import Matrix
from kvrt_models.layers.tensors import is_matrix, weight_parts, weight_shape
from kvrt_models.weights import int8_weights
from kvrt_models.weights.int8_weights import Watch
from kvrt_models.weights.shapes import weight_shapes
from kvrt_models.weights.source import WeightSource
from kvrt_models.weights.types import WeightType

_ROUNDED = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
# NumPy reads and rounds without the interpreter's lock: two threads halve the wait.
_N_THREADS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of a decoder that are still being read.

    Attributes:
      dtype: of the matrices.
      in_bf16: matrices that have no eight bits although dtype says so, and why.
      shapes: of all weights, by name.
    """

    dtype: WeightType
    in_bf16: Mapping[str, str]
    shapes: Mapping[str, Matrix]
    _futures: Mapping[str, Future[Matrix]]

    @property
    def as_stored(self) -> int:
        """Matrices that have the eight bits of the file."""
        of = [x for x in self.shapes.values() if isinstance(x, Int8Matrix)]
        return sum(x.scale.dtype == np.float16 for x in of)

    def wait(self, progress: Callable[[int, int], None] | None = None) -> dict[str, Matrix]:
        """The weights, once they are there; `progress` gets how many are, of how many.

        Raises:
          BadModelFile: a tensor is damaged.
        """
        out: dict[str, Matrix] = {}
        for name, future in self._futures.items():
            if progress:
                progress(len(out), len(self._futures))
            out[name] = future.result()
        return out


def read_weights(
    source: WeightSource, name: str, dtype: WeightType, *, on_host: bool, watch: Watch
) -> Weights:
    """Starts to read the weights of a model; eight bits are made before this returns.

    Args:
      source: that they are read from.
      name: of the model.
      dtype: of the matrices.
      on_host: leaves them in NumPy.
      watch: is told of what takes long or goes wrong.

    Raises:
      BadModelFile: a tensor is damaged.
    """
    in_bf16 = dict[str, str]()
    if dtype == "int8":
        made = int8_weights.open_or_make(source, name, watch)
        in_bf16, read = dict(made.in_bf16), made.read
    else:
        read = _reader(source, dtype)
    shapes = weight_shapes(source.spec, dtype, in_bf16, source.blocks)

    def weight(name: str) -> Matrix:
        found: Any = read(name)
        # On a CPU JAX takes NumPy's memory as it is, if it is aligned.
        return found if on_host else jax.tree.map(jax.device_put, found)

    pool = ThreadPoolExecutor(_N_THREADS)
    futures = {name: pool.submit(weight, name) for name in shapes}
    pool.shutdown(wait=False)
    return Weights(dtype=dtype, in_bf16=in_bf16, shapes=shapes, _futures=futures)


def _reader(source: WeightSource, dtype: WeightType) -> Callable[[str], np.ndarray]:
    """Reads a weight of a float type."""
    parts = weight_parts(source.spec)

    def read(name: str) -> np.ndarray:
        shape = weight_shape(source.spec, parts[name])
        kind = _ROUNDED.get(dtype) if is_matrix(name, shape) else None
        return source.weight(parts[name], kind)

    return read
