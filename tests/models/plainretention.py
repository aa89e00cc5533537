"""Gated retention in NumPy, float64, in its parallel form: every token with all before it."""

import numpy as np

BASE = 100.0


def rotated(x, pos):
    """x [T, H, D] rotated to pos [T], in pairs (2i, 2i + 1)."""
    n = x.shape[2] // 2
    angle = np.multiply.outer(np.asarray(pos), BASE ** (-np.arange(n) / n))[:, None]
    a, b, c, s = x[..., ::2], x[..., 1::2], np.cos(angle), np.sin(angle)
    return np.stack([a * c - b * s, a * s + b * c], -1).reshape(x.shape)


def retention(q, k, v, g):
    """Outputs [T, H, V] of rotated q and k; g [T, H] is the logarithm of what a token leaves.

    Source: arXiv:2405.05254, eq. 8.
    """
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    out = np.zeros(v.shape)
    for n in range(len(q)):
        left = np.ones(g.shape[1])
        for m in range(n, -1, -1):
            out[n] += left[:, None] * (q[n] * k[m]).sum(-1)[:, None] * v[m]
            left = left * np.exp(g[m])
    return out
