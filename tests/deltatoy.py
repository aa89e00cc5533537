"""A recurrence for toys by the gated delta rule: a window of three inputs and a matrix a head."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.attention import ChunkedStep
from kvrt_models.layers.delta.chunk import CHUNK, delta_chunk
from kvrt_models.layers.delta.step import delta_step
from tests.models.plaindelta import delta


def shapes(width, n_heads):
    """Of a state."""
    return ((3, width), (n_heads, width // n_heads, width // n_heads))


def recur(attend, layer, x, mix, n_heads):
    """Outputs [T, W] of inputs [T, W]; mix [3, W] weighs the window, oldest token first."""
    of = x.reshape(x.shape[0], n_heads, -1)
    d = of.shape[2]
    k = of * lax.rsqrt(jnp.sum(of * of, axis=2, keepdims=True) + 1e-6)
    q, g, beta = of[:, ::-1] * d**-0.5, -jax.nn.softplus(of[:, :, 0]), jax.nn.sigmoid(of[:, :, 1])

    def step(state, row):
        x, q, k, g, beta = row
        window = jnp.concatenate([state[0][1:], x[None]])
        v = jnp.tanh(jnp.sum(window * mix, axis=0)).reshape(n_heads, d)
        s, out = delta_step(state[1], (q, k, v), g, beta)
        return (window, s), out.reshape(-1)

    def chunk(state, rows, n):
        x, q, k, g, beta = rows
        size, seen = x.shape[0], jnp.concatenate([state[0], x])
        mixed = sum(seen[1 + i : 1 + i + size] * mix[i][None] for i in range(3))
        v = jnp.tanh(mixed).reshape(size, n_heads, d)
        s, out = delta_chunk(state[1], (q, k, v), g, beta, n)
        return (lax.dynamic_slice_in_dim(seen, n, 3), s), out.reshape(size, -1)

    many = ChunkedStep(run=chunk, size=CHUNK)
    return attend.recur(layer, step, (x, q, k, g, beta), chunk=many)


def plain(window, s, x, mix):
    """Window, state and output after one input, in NumPy and float64."""
    window = np.concatenate([window[1:], x[None]])
    of = x.reshape(s.shape[0], -1)
    k = of / np.sqrt((of * of).sum(1, keepdims=True) + 1e-6)
    q, g, beta = of[::-1] * of.shape[1] ** -0.5, -np.log1p(np.exp(of[:, 0])), of[:, 1]
    v = np.tanh((window * mix).sum(0)).reshape(of.shape)
    s, out = delta(s, *(y[None] for y in (q, k, v, g, 1 / (1 + np.exp(-beta)))))
    return window, s, out.ravel()
