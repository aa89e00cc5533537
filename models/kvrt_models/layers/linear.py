"""Products with weights, in the form that XLA runs fastest for their dtype and the device."""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax import lax

from kvrt.arrays import Array, Float, Int
from kvrt_models.layers import int8
from kvrt_models.layers.int8 import Int8Matrix
from kvrt_models.layers.lanes import row_product

# What a product takes: `Int8Matrix` holds the same numbers in fewer bytes.
Matrix = Array | Int8Matrix
# Tokens up to which a float32 product on CPU has the matrix first: measured, 1.9 times faster at 8
# tokens, 1.7 at 16 and 32, 1.2 at 64, slower at 128.
_MOST_TRANSPOSED = 64


class Linear(nnx.Module, pytree=False):
    """A weight [O, I] and, where the model has one, a bias [O]; experts have theirs in one."""

    def __init__(self, weight: Matrix, bias: Array | None = None):
        """Wraps arrays, or their shapes when a program is compiled before weights are read."""
        eight_bits = isinstance(weight, Int8Matrix)
        self.weight = nnx.Param(weight.values if eight_bits else weight)
        self.scale = nnx.Param(weight.scale) if eight_bits else None
        self.bias = None if bias is None else nnx.Param(bias)

    @classmethod
    def named(cls, weights: Mapping[str, Matrix], name: str) -> "Linear":
        """Takes `{name}.weight` and, if there is one, `{name}.bias`."""
        bias = weights.get(f"{name}.bias")
        assert not isinstance(bias, Int8Matrix)
        return cls(weights[f"{name}.weight"], bias)

    @property
    def matrix(self) -> Matrix:
        """The weight, with its scales where it has eight bits."""
        if self.scale is None:
            return self.weight[...]
        return Int8Matrix(values=self.weight[...], scale=self.scale[...])

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        """The product, in float32."""
        y = linear(x, self.matrix)
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)[None]


def linear(x: Float[Array, "T I"], weight: Matrix) -> Float[Array, "T O"]:
    """X times the transpose of weight, summed in float32; with half-precision weights x is rounded.

    A single token on CPU is multiplied and summed without being rounded: a dot product would first
    convert the whole matrix.
    """
    if isinstance(weight, Int8Matrix):
        return int8.int8_product(x, weight)
    n = x.shape[0]
    if weight.dtype == jnp.float32 and 1 < n <= _MOST_TRANSPOSED:
        return lax.platform_dependent(x, weight, cpu=_transposed_dot, default=_dot)
    if weight.dtype == jnp.float32:
        return _dot(x, weight)
    if n > 1:
        return _dot(x.astype(weight.dtype), weight)
    # Without the barrier the sum may take what made x into its loop, once for each output.
    x = lax.optimization_barrier(x)
    return lax.platform_dependent(
        x, weight, cpu=_multiply_and_sum, default=lambda x, w: _dot(x.astype(w.dtype), w)
    )


def embed(weight: Matrix, tokens: Int[Array, " T"]) -> Float[Array, "T E"]:
    """Embeddings of tokens, in float32.

    Gathering from a half-precision array would convert all of it on CPU; its bits are gathered
    instead and only those of the tokens are converted.
    """
    if isinstance(weight, Int8Matrix):
        return int8.rows_of(weight, tokens)
    if weight.dtype == jnp.float32:
        return weight[tokens]
    bits = lax.bitcast_convert_type(weight, jnp.uint16)[tokens]
    return lax.bitcast_convert_type(bits, weight.dtype).astype(jnp.float32)


def unit_norm(x: Float[Array, "... D"], eps: float) -> Array:
    """Root-mean-square norm in float32, without weights.

    Source: arXiv:1910.07467.
    """
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, " D"], eps: float) -> Array:
    """Root-mean-square norm in float32."""
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return unit_norm(x, eps) * weight


def layer_norm(
    x: Float[Array, "... D"], weight: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> Array:
    """Norm about the mean, in float32."""
    x = x.astype(jnp.float32)
    weight, bias = (
        y.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + y.shape) for y in (weight, bias)
    )
    return unit_norm(x - jnp.mean(x, axis=-1, keepdims=True), eps) * weight + bias


def _dot(x: Array, weight: Array) -> Array:
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _transposed_dot(x: Array, weight: Array) -> Array:
    """With few tokens XLA's CPU backend is up to twice as fast where the matrix comes first."""
    y = lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    # The barrier keeps the two from being exchanged again.
    return lax.optimization_barrier(y).T


def _multiply_and_sum(x: Array, weight: Array) -> Array:
    y = row_product(x, weight) if weight.dtype == jnp.float16 else None
    return jnp.sum(weight.astype(jnp.float32) * x, axis=1)[None] if y is None else y
