"""Shapes and bytes of a decoder's weights in memory, before any of them is read."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kvrt.kv_types import FLOAT_DTYPES
from kvrt_models.layers import int8
from kvrt_models.layers.int8 import Int8Matrix
from kvrt_models.layers.lanes import LANES
from kvrt_models.layers.linear import Matrix
from kvrt_models.layers.tensors import is_matrix, weight_parts, weight_shape
from kvrt_models.spec import DecoderSpec
from kvrt_models.weights.types import WeightType


def weight_shapes(
    of: DecoderSpec,
    dtype: WeightType,
    in_bf16: Iterable[str] = (),
    blocks: Container[str] = (),
) -> dict[str, Matrix]:
    """Shapes and types of the decoder's weights.

    Args:
      of: the decoder.
      dtype: of its matrices.
      in_bf16: matrices that stay in bfloat16 where the others have eight bits.
      blocks: tensors that a file has in blocks of eight bits.
    """
    left_out, parts = set(in_bf16), weight_parts(of)

    def shape(name: str, size: tuple[int, ...]) -> Any:
        if not is_matrix(name, size):
            return jax.ShapeDtypeStruct(size, jnp.float32)
        if dtype != "int8" or name in left_out:
            kind = "bf16" if dtype == "int8" else dtype
            return jax.ShapeDtypeStruct(size, FLOAT_DTYPES[kind])
        in_blocks = all(tensor in blocks for tensor in parts[name])
        return int8.shapes(size, in_blocks)

    return {name: shape(name, weight_shape(of, tensors)) for name, tensors in parts.items()}


def n_bytes(weights: Mapping[str, Matrix]) -> int:
    """Bytes that weights take in memory."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(dict(weights)))


def widened_bytes(weights: Mapping[str, Matrix]) -> int:
    """Bytes of the largest matrix in float32, or of a piece of it: a prompt's products hold those.

    0 where no matrix has eight bits, or the device multiplies them as they are.
    """
    matrices = [x for x in weights.values() if isinstance(x, Int8Matrix)]
    # Of experts one at a time.
    sizes = [int8.piece_size(x) * LANES * x.n_inputs for x in matrices if x.in_lanes]
    return 4 * max(sizes, default=0)
