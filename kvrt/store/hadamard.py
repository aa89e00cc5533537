"""Hadamard transform of channels before they are quantized: outliers of a few spread over many.

An orthonormal Walsh-Hadamard matrix multiplies each run of n channels. It is its own inverse and
leaves dot products as they are, so queries that are transformed like the keys give the same scores,
and an output that is transformed once more is that of values that were not.

Source: llama.cpp `ggml_mul_mat_aux` and `llama_kv_cache`, pull request 21038; arXiv:2404.00456.
"""

import numpy as np
from jax import lax

from kvrt.arrays import Array, Float
from kvrt.store.hadamard_size import size_k, size_v

__all__ = ["matrix", "size_k", "size_v", "transform", "transform_block"]


def matrix(n: int) -> np.ndarray:
    """The matrix of n channels, a power of two; symmetric, its own inverse."""
    out = np.ones((1, 1), np.float32)
    while len(out) < n:
        out = np.block([[out, out], [out, -out]])
    return (out / np.sqrt(n)).astype(np.float32)


def transform(x: Float[Array, "... D"], n: int) -> Float[Array, "... D"]:
    """Transforms each run of n channels of the last axis, in float32; n = 0 changes nothing."""
    if n == 0:
        return x
    runs = x.astype("float32").reshape(*x.shape[:-1], x.shape[-1] // n, n)
    last = ((runs.ndim - 1,), (0,)), ((), ())
    # Else a TPU would round to bfloat16 first.
    out = lax.dot_general(runs, matrix(n), last, precision=lax.Precision.HIGHEST)
    return out.reshape(x.shape).astype(x.dtype)


def transform_block(x: Float[Array, "H D B"], n: int) -> Float[Array, "H D B"]:
    """As `transform`, for keys of a block, whose channels stand before its cells."""
    if n == 0:
        return x
    h, d, b = x.shape
    runs = x.reshape(h, d // n, n, b)
    out = lax.dot_general(
        runs, matrix(n), (((2,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
    )
    return out.swapaxes(2, 3).reshape(h, d, b)
