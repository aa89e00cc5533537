"""Gated retention: what is kept of all tokens decays by what each of them says.

    S = exp(g) S + k v
    o = q S

Queries and keys are rotated by RoPE, to the number of tokens before them: the state counts these.

Source: arXiv:2405.05254, sec. 2.4.1 (gated retention); arXiv:2307.08621 (its three forms).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvrt.arrays import Array, Float, Int
from kvrt.attention.contract import Attend, ChunkedStep, Inputs, State
from kvrt_models.layers.delta.chunk import CHUNK, by_head, dot
from kvrt_models.layers.linear import Linear, Matrix, unit_norm
from kvrt_models.layers.mamba import RecurrentMixer
from kvrt_models.layers.table import Add
from kvrt_models.spec import SsmSpec

# What the logarithms of the decays are divided by, so that they are near one.
_DECAY_DIVISOR = 16.0


def retention_step(
    s: Float[Array, "H K V"],
    qkv: tuple[Float[Array, "H K"], Float[Array, "H K"], Float[Array, "H V"]],
    g: Float[Array, " H"],
) -> tuple[Float[Array, "H K V"], Float[Array, "H V"]]:
    """The state after one token, and what the token reads; all in float32.

    Args:
      s: the state before it.
      qkv: query, key and value by head, rotated.
      g: logarithm of the decay of each head, at most 0.

    Returns:
      The state, and the output of each head.

    Source: arXiv:2405.05254, eq. 9.
    """
    q, k, v = qkv
    s = s * jnp.exp(g)[:, None, None] + k[:, :, None] * v[:, None, :]
    return s, jnp.sum(q[:, :, None] * s, axis=1)


def retention_chunk(
    s: Float[Array, "H K V"],
    qkv: tuple[Float[Array, "T H K"], Float[Array, "T H K"], Float[Array, "T H V"]],
    g: Float[Array, "T H"],
    n: Int[Array, ""],
) -> tuple[Float[Array, "H K V"], Float[Array, "T H V"]]:
    """The state after n tokens, and what each token reads; equal to `retention_step` n times.

    Args:
      s: the state before the first.
      qkv: queries, keys and values by token and head, float32; T is static, at most 64 or so.
      g: logarithms of the decays, at most 0 and perhaps -inf.
      n: tokens that count, from the first on; the others leave no trace, whatever they hold.

    Returns:
      The state, and the outputs.

    Source: arXiv:2405.05254, eq. 10.
    """
    counts = jnp.arange(g.shape[0]) < n
    # Tokens that do not count may be another sequence's, and damaged.
    k, v = (jnp.where(counts[:, None, None], x, 0.0) for x in qkv[1:])
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in (qkv[0], k, v))
    g = jnp.where(counts[:, None], g, 0.0).T[:, :, None]
    _, seen, left = by_head(q, k, g)
    grown = jnp.exp(jnp.cumsum(g, axis=1))
    out = dot(q * grown, s) + dot(seen, v)
    s = s * jnp.swapaxes(grown[:, -1:], 1, 2) + dot(jnp.swapaxes(left, 1, 2), v)
    return s, jnp.swapaxes(out, 0, 1)


def rotated(x: Float[Array, "T H K"], pos: Float[Array, " T"], base: float) -> Array:
    """Queries or keys rotated to positions, in pairs (2i, 2i + 1) of all channels."""
    n = x.shape[2] // 2
    angle = pos[:, None] * (base ** (-jnp.arange(n, dtype=jnp.float32) / n))[None]
    c, s = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[:, :, ::2], x[:, :, 1::2]
    return jnp.stack([a * c - b * s, a * s + b * c], axis=-1).reshape(x.shape)


class GatedRetention(RecurrentMixer):
    """A mixer whose heads keep a matrix each, normed and multiplied by a gate."""

    def __init__(self, of: SsmSpec, layer: int, weights: Mapping[str, Matrix], eps: float):
        """Takes `ssm_gt` of the decays beside what all mixers have."""
        super().__init__(of, layer, weights, eps)
        self.decay = Linear.named(weights, f"{self.at}gt")

    @staticmethod
    def add_tensors(add: Add, of: SsmSpec, n_embd: int) -> None:
        """Adds the tensors of a layer; queries, keys, values and gates have as many channels."""
        n_in = 2 * (of.n_heads * of.d_state + of.d_inner)
        add("ssm_in", [f"self_attn.{x}_proj" for x in "qkvg"], n_in, n_embd)
        add("ssm_gt", "self_attn.gt_proj", of.n_heads, n_embd)
        add("ssm_out", "self_attn.o_proj", n_embd, of.d_inner)

    def __call__(self, h: Float[Array, "T E"], attend: Attend) -> Float[Array, "T E"]:
        """The layer's part of the residual stream."""
        of, n = self.of, h.shape[0]
        n_keys = of.n_heads * of.d_state
        x, z = jnp.split(self.projection(h), (2 * n_keys + of.d_inner,), axis=1)
        g = jax.nn.log_sigmoid(self.decay(h)) / _DECAY_DIVISOR
        many = ChunkedStep(run=self._chunk, size=CHUNK)
        y = attend.recur(self.layer, self._step, (x, g), chunk=many)
        y = unit_norm(y, self.eps) * jax.nn.silu(z).reshape(y.shape)
        return self.out(y.reshape(n, -1))

    def _step(self, state: State, inputs: Inputs) -> tuple[State, Array]:
        """One token."""
        (n_before, s), (x, g) = state, inputs
        q, k, v = (y[0] for y in self._heads(x[None], n_before))
        s, out = retention_step(s, (q, k, v), g)
        return (n_before + 1, s), out

    def _chunk(self, state: State, inputs: Inputs, n: Array) -> tuple[State, Array]:
        """Several tokens."""
        (n_before, s), (x, g) = state, inputs
        pos = n_before + jnp.arange(x.shape[0], dtype=jnp.float32)
        s, out = retention_chunk(s, self._heads(x, pos), g, n)
        return (n_before + n.astype(jnp.float32), s), out

    def _heads(self, x: Float[Array, "T C"], pos: Float[Array, " T"]) -> tuple[Array, Array, Array]:
        """Rotated queries and scaled keys, and values, by head."""
        of, n_keys = self.of, self.of.n_heads * self.of.d_state
        parts = jnp.split(x, (n_keys, 2 * n_keys), axis=1)
        q, k, v = (y.reshape(x.shape[0], of.n_heads, -1) for y in parts)
        q, k = rotated(q, pos, of.rope_base), rotated(k * of.d_state**-0.5, pos, of.rope_base)
        return q, k, v
