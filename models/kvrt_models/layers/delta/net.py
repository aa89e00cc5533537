"""Mixers of the gated delta rule: a convolution, the rule, and a norm with a gate.

Source: arXiv:2412.06464, sec. 3.4, and Qwen3-Next; arXiv:2510.26692, sec. 4, and Kimi-Linear.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import Array, Float
from kvrt.attention.contract import Attend, ChunkedStep, Inputs, State
from kvrt_models.layers.delta.chunk import CHUNK, CHUNK_BY_CHANNEL, delta_chunk
from kvrt_models.layers.delta.step import delta_step
from kvrt_models.layers.linear import Linear, Matrix, rms_norm
from kvrt_models.layers.mamba import RecurrentMixer
from kvrt_models.layers.table import Add, decays, reshaped
from kvrt_models.spec import SsmSpec

# As in transformers, and in the kernels that models were trained with.
_EPS = 1e-6


class DeltaMixer(RecurrentMixer):
    """Matrix states of heads, several of which may share a query and a key.

    What makes decays and gates is each family's own.
    """

    def _read(self, attend: Attend, inputs: Inputs, size: int) -> Float[Array, "T H V"]:
        """What tokens read of the states, normed; at most `size` of them at once."""
        many = ChunkedStep(run=self._chunk, size=size)
        y = attend.recur(self.layer, self._step, inputs, chunk=many)
        return rms_norm(y, self.norm[...], self.eps)

    def _step(self, state: State, inputs: Inputs) -> tuple[State, Array]:
        """One token."""
        x, g, beta = inputs
        window, x = self.conv(state[0], x)
        q, k, v = (y[0] for y in self._heads(x[None]))
        s, out = delta_step(state[1], (q, k, v), g, beta)
        return (window, s), out

    def _chunk(self, state: State, inputs: Inputs, n: Array) -> tuple[State, Array]:
        """Several tokens."""
        x, g, beta = inputs
        window, x = self.conv.many(state[0], x, n)
        s, out = delta_chunk(state[1], self._heads(x), g, beta, n)
        return (window, s), out

    def _heads(self, x: Float[Array, "T C"]) -> tuple[Array, Array, Array]:
        """Queries and keys of length one, and values, by head."""
        of, n = self.of, x.shape[0]
        n_keys = of.n_groups * of.d_state
        q, k, v = jnp.split(x, (n_keys, 2 * n_keys), axis=1)

        def unit(y: Array) -> Array:
            y = y.reshape(n, of.n_groups, of.d_state)
            y = y * lax.rsqrt(jnp.sum(y * y, axis=2, keepdims=True) + _EPS)
            return jnp.repeat(y, of.n_heads // of.n_groups, axis=1)

        return unit(q) * of.d_state**-0.5, unit(k), v.reshape(n, of.n_heads, -1)


class GatedDeltaNet(DeltaMixer):
    """A decay for each head (Qwen3-Next)."""

    def __init__(self, of: SsmSpec, layer: int, weights: Mapping[str, Matrix], eps: float):
        """Takes `ssm_ba`, of what is written and what decays, beside what all mixers have."""
        super().__init__(of, layer, weights, eps)
        self.gates = Linear.named(weights, f"{self.at}ba")

    @staticmethod
    def add_tensors(add: Add, of: SsmSpec, n_embd: int) -> None:
        """Adds the tensors of a layer; a folder has the projections' parts key by key."""
        at, n, heads = "linear_attn.", of.n_heads, of.d_inner // of.n_groups
        sizes = (of.d_state, of.d_state, heads, heads)
        make = functools.partial(_parts_together, of.n_groups, sizes)
        add("ssm_in", f"{at}in_proj_qkvz", of.d_inner + of.n_conv, n_embd, make=make)
        make = functools.partial(_parts_together, of.n_groups, (n // of.n_groups,) * 2)
        add("ssm_ba", f"{at}in_proj_ba", 2 * n, n_embd, make=make)
        add("ssm_conv1d", f"{at}conv1d", of.n_conv, of.d_conv)
        add("ssm_dt", f"{at}dt_bias", n, ends=(".bias", ""))
        add("ssm_a", f"{at}A_log", n, 1, ends=("", ""), make=decays)
        add("ssm_norm", f"{at}norm", of.d_inner // n)
        add("ssm_out", f"{at}out_proj", n_embd, of.d_inner)

    def __call__(self, h: Float[Array, "T E"], attend: Attend) -> Float[Array, "T E"]:
        """The layer's part of the residual stream."""
        x, z = jnp.split(self.projection(h), (self.of.n_conv,), axis=1)
        b, a = jnp.split(self.gates(h), 2, axis=1)
        g = self.decay[...].T * jax.nn.softplus(a + self.dt_bias[...][None])
        y = self._read(attend, (x, g, jax.nn.sigmoid(b)), CHUNK)
        y = y * jax.nn.silu(z).reshape(y.shape)
        return self.out(y.reshape(y.shape[0], -1))


class KimiDelta(DeltaMixer):
    """A decay for each channel of a head's keys (Kimi-Linear)."""

    def __init__(self, of: SsmSpec, layer: int, weights: Mapping[str, Matrix], eps: float):
        """Takes `ssm_beta`, `ssm_f_*` of the decays and `ssm_g_*` of the gates beside those."""
        super().__init__(of, layer, weights, eps)
        self.beta = Linear.named(weights, f"{self.at}beta")
        self.f_a, self.f_b = (Linear.named(weights, f"{self.at}f_{x}") for x in "ab")
        self.g_a, self.g_b = (Linear.named(weights, f"{self.at}g_{x}") for x in "ab")

    @staticmethod
    def add_tensors(add: Add, of: SsmSpec, n_embd: int) -> None:
        """Adds the tensors of a layer; decays and gates come through the channels of one head."""
        at, n, n_low = "self_attn.", of.n_heads, of.d_inner // of.n_heads
        add("ssm_in", [f"{at}{x}_proj" for x in "qkv"], of.n_conv, n_embd)
        add("ssm_conv1d", [f"{at}{x}_conv1d" for x in "qkv"], of.n_conv, of.d_conv)
        for x in "fg":
            add(f"ssm_{x}_a", f"{at}{x}_a_proj", n_low, n_embd)
            add(f"ssm_{x}_b", f"{at}{x}_b_proj", of.d_inner, n_low)
        add("ssm_beta", f"{at}b_proj", n, n_embd)
        add("ssm_dt", f"{at}dt_bias", of.d_inner, ends=(".bias", ""))
        add("ssm_a", f"{at}A_log", n, 1, ends=("", ""), make=decays)
        add("ssm_norm", f"{at}o_norm", n_low)
        add("ssm_out", f"{at}o_proj", n_embd, of.d_inner)

    def __call__(self, h: Float[Array, "T E"], attend: Attend) -> Float[Array, "T E"]:
        """The layer's part of the residual stream."""
        n, n_heads = h.shape[0], self.of.n_heads
        f = self.f_b(self.f_a(h)) + self.dt_bias[...][None]
        g = self.decay[...][None] * jax.nn.softplus(f).reshape(n, n_heads, -1)
        inputs = self.projection(h), g, jax.nn.sigmoid(self.beta(h))
        y = self._read(attend, inputs, CHUNK_BY_CHANNEL)
        y = y * jax.nn.sigmoid(self.g_b(self.g_a(h))).reshape(y.shape)
        return self.out(y.reshape(n, -1))


def _parts_together(
    n_groups: int, sizes: tuple[int, ...], found: Sequence[np.ndarray], shape: tuple[int, ...]
) -> np.ndarray:
    """All queries first, then all keys and so on, of what stands side by side for each key."""
    x = reshaped(found, shape)
    if x.shape != shape:
        return x
    by_key = x.reshape(n_groups, -1, x.shape[1])
    split = np.split(by_key, np.cumsum(sizes)[:-1], axis=1)
    return np.concatenate([part.reshape(-1, x.shape[1]) for part in split])
