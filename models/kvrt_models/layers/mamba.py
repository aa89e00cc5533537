"""Layers that read the past from a state of fixed size: the mixers of Mamba-1 and Mamba-2.

Everything that needs no past runs on all tokens at once. What does need it is handed to the cache
as the recurrence of one token, for the cache alone knows which tokens follow each other.

Source: arXiv:2312.00752 (Mamba-1), arXiv:2405.21060 (Mamba-2), arXiv:2403.19887 (Jamba's norms).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from kvrt.arrays import Array, Float, Int
from kvrt.attention.contract import Attend, Inputs, State
from kvrt_models.layers.int8 import Int8Matrix
from kvrt_models.layers.linear import Linear, Matrix, rms_norm
from kvrt_models.layers.table import Add, decays
from kvrt_models.spec import SsmSpec


class Convolution(nnx.Module, pytree=False):
    """A causal convolution of every channel with itself, then SiLU."""

    def __init__(self, weight: Array, bias: Array | None):
        """Takes a weight [C, K], oldest token first, and a bias [C]."""
        self.weight = nnx.Param(weight)
        self.bias = None if bias is None else nnx.Param(bias)

    @classmethod
    def named(cls, weights: Mapping[str, Matrix], name: str) -> "Convolution":
        """Takes `{name}.weight` and, if there is one, `{name}.bias`."""
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        assert not isinstance(weight, Int8Matrix) and not isinstance(bias, Int8Matrix)
        return cls(weight, bias)

    def __call__(self, window: Float[Array, "K-1 C"], x: Float[Array, " C"]) -> tuple[Array, Array]:
        """The window for the next token, and this token's channels."""
        seen = jnp.concatenate([window, x[None]])
        y = jnp.sum(seen * self.weight[...].T, axis=0)
        y = y if self.bias is None else y + self.bias[...]
        return seen[1:], jax.nn.silu(y)

    def many(
        self, window: Float[Array, "K-1 C"], x: Float[Array, "T C"], n: Int[Array, ""]
    ) -> tuple[Array, Array]:
        """The window after n tokens, and the channels of all."""
        seen, size = jnp.concatenate([window, x]), x.shape[0]
        weight = self.weight[...].T
        y = sum((seen[i : i + size] * w[None] for i, w in enumerate(weight)), jnp.zeros_like(x))
        y = y if self.bias is None else y + self.bias[...][None]
        return lax.dynamic_slice_in_dim(seen, n, window.shape[0]), jax.nn.silu(y)


class RecurrentMixer(nnx.Module, pytree=False):
    """What recurrent layers have alike: a projection of all that a token brings, and one back."""

    def __init__(self, of: SsmSpec, layer: int, weights: Mapping[str, Matrix], eps: float):
        """Takes `blk.{layer}.ssm_in` and `ssm_out`, and what there is of the other `ssm_*`."""
        self.of, self.layer, self.eps = of, layer, eps
        self.at = at = f"blk.{layer}.ssm_"
        self.projection, self.out = (Linear.named(weights, f"{at}{x}") for x in ("in", "out"))
        if of.d_conv:
            self.conv = Convolution.named(weights, f"{at}conv1d")
            self.decay = nnx.Param(weights[f"{at}a"])
        if f"{at}d" in weights:
            self.skip = nnx.Param(weights[f"{at}d"])
        if of.d_conv and of.kind != "mamba1":
            self.dt_bias = nnx.Param(weights[f"{at}dt.bias"])
            self.norm = nnx.Param(weights[f"{at}norm.weight"])


class Mamba1(RecurrentMixer):
    """Selective state space with a decay of its own for each channel and state.

    Source: arXiv:2312.00752, sec. 3; with norms of step size, B and C arXiv:2403.19887, sec. 6.4.
    """

    def __init__(self, of: SsmSpec, layer: int, weights: Mapping[str, Matrix], eps: float):
        """Takes `ssm_x`, `ssm_dt` and norms of what they give beside what all mixers have."""
        super().__init__(of, layer, weights, eps)
        self.x, self.dt = (Linear.named(weights, f"{self.at}{x}") for x in ("x", "dt"))
        norms = [f"{self.at}{name}_norm.weight" for name in ("dt", "b", "c") if of.norms]
        self.norms = nnx.List([nnx.Param(weights[name]) for name in norms])

    @staticmethod
    def add_tensors(add: Add, of: SsmSpec, n_embd: int) -> None:
        """Adds the tensors of a layer."""
        _add_shared(add, of, n_embd, 2 * of.d_inner)
        add("ssm_x", "mamba.x_proj", of.dt_rank + 2 * of.d_state, of.d_inner)
        add("ssm_dt", "mamba.dt_proj", of.d_inner, of.dt_rank, bias=True)
        add("ssm_a", "mamba.A_log", of.d_inner, of.d_state, ends=("", ""), make=decays)
        add("ssm_d", "mamba.D", of.d_inner, ends=("", ""))
        for x, n in (("dt", of.dt_rank), ("b", of.d_state), ("c", of.d_state)):
            if of.norms:
                add(f"ssm_{x}_norm", f"mamba.{x}_layernorm", n)

    def __call__(self, h: Float[Array, "T E"], attend: Attend) -> Float[Array, "T E"]:
        """The layer's part of the residual stream."""
        x, gate = jnp.split(self.projection(h), 2, axis=1)
        y = attend.recur(self.layer, self._step, (x,))
        return self.out(y * jax.nn.silu(gate))

    def _step(self, state: State, inputs: Inputs) -> tuple[State, Array]:
        """One token. Its step size, B and C come from the convolution, so they are made here."""
        window, past = state
        window, x = self.conv(window, *inputs)
        low = jnp.split(self.x(x[None]), (self.of.dt_rank, self.of.dt_rank + self.of.d_state), 1)
        if self.of.norms:
            low = [rms_norm(y, w[...], self.eps) for y, w in zip(low, self.norms, strict=True)]
        dt, b, c = jax.nn.softplus(self.dt(low[0]))[0], low[1], low[2]
        past = past * jnp.exp(dt[:, None] * self.decay[...]) + (dt * x)[:, None] * b
        return (window, past), jnp.sum(past * c, axis=1) + self.skip[...] * x


class Mamba2(RecurrentMixer):
    """Selective state space of heads: one decay a head, B and C shared by a group of heads.

    Source: arXiv:2405.21060, sec. 7.
    """

    @staticmethod
    def add_tensors(add: Add, of: SsmSpec, n_embd: int) -> None:
        """Adds the tensors of a layer, which has no projection to step sizes, only a bias."""
        n = of.n_heads
        _add_shared(add, of, n_embd, of.d_inner + of.n_conv + n)
        add("ssm_dt", "mamba.dt_bias", n, ends=(".bias", ""))
        add("ssm_a", "mamba.A_log", n, 1, ends=("", ""), make=decays)
        add("ssm_d", "mamba.D", n, 1, ends=("", ""))
        add("ssm_norm", "mamba.norm", of.n_groups, of.d_inner // of.n_groups)

    def __call__(self, h: Float[Array, "T E"], attend: Attend) -> Float[Array, "T E"]:
        """The layer's part of the residual stream."""
        d_inner = self.of.d_inner
        gate, x, dt = jnp.split(self.projection(h), (d_inner, d_inner + self.of.n_conv), axis=1)
        dt = jax.nn.softplus(dt + self.dt_bias[...][None])
        y = attend.recur(self.layer, self._step, (x, dt)) * jax.nn.silu(gate)
        # Each group of channels is normed by itself, with its own part of the weight.
        y = y.reshape(y.shape[0], self.of.n_groups, -1)
        scale = jax.lax.rsqrt(jnp.mean(y * y, axis=2, keepdims=True) + self.eps)
        return self.out((y * scale * self.norm[...][None]).reshape(y.shape[0], -1))

    def _step(self, state: State, inputs: Inputs) -> tuple[State, Array]:
        """One token."""
        window, past = state
        channels, dt = inputs
        window, channels = self.conv(window, channels)
        n_groups, d_state = self.of.n_groups, self.of.d_state
        x, b, c = jnp.split(channels, (self.of.d_inner, self.of.d_inner + n_groups * d_state))
        x = x.reshape(self.of.n_heads, -1)
        # [group, head of the group, channel, state]: b and c stand once a group.
        shape = (n_groups, -1, x.shape[1], d_state)
        b, c = b.reshape(n_groups, 1, 1, d_state), c.reshape(n_groups, 1, 1, d_state)
        decay = jnp.exp(dt[:, None] * self.decay[...])
        fresh = (dt[:, None] * x).reshape(n_groups, -1, x.shape[1], 1) * b
        past = past * decay[:, :, None] + fresh.reshape(past.shape)
        y = jnp.sum(past.reshape(shape) * c, axis=3).reshape(x.shape)
        return (window, past), (y + self.skip[...] * x).reshape(-1)


def _add_shared(add: Add, of: SsmSpec, n_embd: int, n_in: int) -> None:
    """Adds what Mamba-1 and Mamba-2 both have."""
    add("ssm_in", "mamba.in_proj", n_in, n_embd, bias=of.proj_bias)
    add("ssm_conv1d", "mamba.conv1d", of.n_conv, of.d_conv, bias=of.conv_bias)
    add("ssm_out", "mamba.out_proj", n_embd, of.d_inner, bias=of.proj_bias)
