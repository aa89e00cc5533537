"""Gated feed-forward networks: activation times up, and the network that all tokens take."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from kvrt.arrays import Array, Float
from kvrt_models.layers.linear import Linear, Matrix
from kvrt_models.spec import Clamped, DecoderSpec

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
ActAndMul = Callable[[Array, Array], Array]


@functools.cache
def act_and_mul(of: DecoderSpec) -> ActAndMul:
    """The activation of a network's gate, times up; one function object a spec.

    So two decoders of one spec are the same graph, and can run the same compiled programs.
    """
    if isinstance(of.activation, Clamped):
        return functools.partial(_clamped, of.activation)
    return functools.partial(_times_up, of.activation)


def _times_up(activation: str, gate: Array, up: Array) -> Array:
    return _ACTIVATIONS[activation](gate) * up


def _clamped(of: Clamped, gate: Array, up: Array) -> Array:
    gate = jnp.minimum(gate, of.limit)
    up = jnp.clip(up, -of.limit, of.limit)
    return gate * jax.nn.sigmoid(of.alpha * gate) * (up + 1.0)


class Gated(nnx.Module, pytree=False):
    """A gated network; its two inner matrices are one, with the rows of the gate first."""

    def __init__(self, of: DecoderSpec, weights: Mapping[str, Matrix], at: str, end: str = ""):
        """Takes `{at}ffn_gate_up{end}` and `{at}ffn_down{end}`."""
        self.act_and_mul = act_and_mul(of)
        self.cutoff = of.ffn_cutoffs[int(at.split(".")[1])] if of.ffn_cutoffs else None
        self.gate_up = Linear.named(weights, f"{at}ffn_gate_up{end}")
        self.down = Linear.named(weights, f"{at}ffn_down{end}")

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """The network's output for each token."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=1)
        gate = gate if self.cutoff is None else _above(gate, self.cutoff)
        return self.down(self.act_and_mul(gate, up))


def _above(x: Float[Array, "T F"], cutoff: float) -> Float[Array, "T F"]:
    """By how much each is above the mean of its token by `cutoff` deviations; zero below.

    Source: transformers `Gemma3nTextMLP._gaussian_topk`.
    """
    mean = jnp.mean(x, axis=1, keepdims=True)
    deviation = jnp.std(x, axis=1, keepdims=True)
    return jax.nn.relu(x - (mean + deviation * cutoff))
