"""The gated delta rule, several tokens at once: products of matrices in place of many small steps.

With G_i the sum of g up to token i, and D_ij = exp(G_i - G_j) what is left of token j at token i:

    (1 + beta_i tril(k_i D_ij k_j, -1)) u = beta (v - k exp(G) S)      the UT transform
    o = q exp(G) S + tril(q_i D_ij k_j) u
    S = exp(G_n) S + (k_j D_nj) u

The triangular system stands for the chain of corrections within the chunk. G_i - G_j is summed
from j to i, never subtracted: a token that forgets everything leaves no rounding error behind.

Source: arXiv:2412.06464, sec. 3.3; with a decay for each channel of the keys arXiv:2510.26692,
sec. 4.
"""

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Float, Int

# Tokens of a chunk: with a decay for each channel all pairs of tokens are compared one by one.
CHUNK, CHUNK_BY_CHANNEL = 64, 32
# Tokens whose system is solved by substitution; between these blocks there are products.
_BLOCK = 16


def delta_chunk(
    s: Float[Array, "H K V"],
    qkv: tuple[Float[Array, "T H K"], Float[Array, "T H K"], Float[Array, "T H V"]],
    g: Float[Array, "T H"] | Float[Array, "T H K"],
    beta: Float[Array, "T H"],
    n: Int[Array, ""],
) -> tuple[Float[Array, "H K V"], Float[Array, "T H V"]]:
    """The state after n tokens, and what each token reads; equal to `delta_step` n times.

    Args:
      s: the state before the first.
      qkv: queries, keys and values by token and head, float32; T is static, at most 64 or so.
      g: logarithms of the decays, at most 0 and perhaps -inf: of a head, or of each channel.
      beta: how much of the difference is written, in [0, 2].
      n: tokens that count, from the first on; the others leave no trace, whatever they hold.

    Returns:
      The state, and the outputs.

    Source: arXiv:2412.06464, sec. 3.3.
    """
    counts = jnp.arange(beta.shape[0]) < n
    beta = jnp.where(counts[:, None], beta, 0.0).T[:, :, None]
    # Tokens that do not count may be another sequence's, and damaged.
    k, v = (jnp.where(counts[:, None, None], x, 0.0) for x in qkv[1:])
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in (qkv[0], k, v))
    # Where nothing is added the last token has the sum of all that count.
    g = jnp.where(counts[:, None, None], g.reshape(*g.shape[:2], -1), 0.0)
    g = jnp.swapaxes(g, 0, 1)
    # What is the same for all products is made once: XLA would make it again inside each of them.
    q, k, v, g, beta = lax.optimization_barrier((q, k, v, g, beta))
    by_channel = g.shape[2] > 1
    read, seen, left = (_by_channel if by_channel else by_head)(q, k, g)
    grown = jnp.exp(jnp.cumsum(g, axis=1))
    u = _solved(beta * read, beta * (v - dot(k * grown, s)))
    out = dot(q * grown, s) + dot(seen, u)
    s = s * jnp.swapaxes(grown[:, -1:], 1, 2) + dot(jnp.swapaxes(left, 1, 2), u)
    return s, jnp.swapaxes(out, 0, 1)


def by_head(q: Array, k: Array, g: Float[Array, "H T 1"]) -> tuple[Array, Array, Array]:
    """Products k_i D_ij k_j of j < i, q_i D_ij k_j of j <= i [H, T, T]; k_j D_nj [H, T, K]."""
    n = g.shape[1]
    i, j = jnp.arange(n)[:, None], jnp.arange(n)[None]
    d = jnp.exp(jnp.cumsum(jnp.where((i > j)[None], g, 0.0), axis=1))
    d, to = jnp.where((i >= j)[None], d, 0.0), jnp.swapaxes(k, 1, 2)
    return jnp.tril(dot(k, to) * d, -1), dot(q, to) * d, k * d[:, -1][:, :, None]


def _by_channel(q: Array, k: Array, g: Float[Array, "H T K"]) -> tuple[Array, Array, Array]:
    """As `by_head`: token after token, with all keys before it as far as they have decayed."""

    def one(left: Array, at: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        i, q, k, decay = at
        left = left * decay[:, None]
        read = jnp.sum(k[:, None] * left, axis=2)
        left = lax.dynamic_update_index_in_dim(left, k, i, 1)
        return left, (read, jnp.sum(q[:, None] * left, axis=2))

    each = (jnp.swapaxes(x, 0, 1) for x in (q, k, jnp.exp(g)))
    left, (read, seen) = lax.scan(one, jnp.zeros_like(k), (jnp.arange(k.shape[1]), *each))
    return jnp.swapaxes(read, 0, 1), jnp.swapaxes(seen, 0, 1), left


def _solved(lower: Float[Array, "H T T"], x: Float[Array, "H T V"]) -> Float[Array, "H T V"]:
    """The u of (1 + lower) u = x, where lower is 0 on and above its diagonal.

    By substitution alone: powers of `lower`, which other forms have, grow beyond all bounds where
    keys are alike. LAPACK's solver has threads that fight with XLA's.
    """
    n, size = x.shape[1], min(_BLOCK, x.shape[1])
    m = -(-n // size)
    pad = ((0, 0), (0, m * size - n), (0, 0))
    lower, x = jnp.pad(lower, (*pad[:2], pad[1])), jnp.pad(x, pad)
    blocks = lower.reshape(lower.shape[0], m, size, m, size)
    diagonal = jnp.stack([blocks[:, i, :, i] for i in range(m)], axis=1)
    eye = jnp.eye(size, dtype=x.dtype)

    def row(i: Array, inverse: Array) -> Array:
        mine = lax.dynamic_index_in_dim(diagonal, i, 2, keepdims=False)
        new = eye[i][None, None] - jnp.sum(mine[..., None] * inverse, axis=2)
        return lax.dynamic_update_index_in_dim(inverse, new, i, 2)

    inverse = lax.fori_loop(0, size, row, jnp.zeros_like(diagonal))
    found: list[Array] = []
    for i in range(m):
        rest = x[:, i * size : (i + 1) * size]
        if found:
            before = lower[:, i * size : (i + 1) * size, : i * size]
            rest = rest - dot(before, jnp.concatenate(found, axis=1))
        found.append(dot(inverse[:, i], rest))
    return jnp.concatenate(found, axis=1)[:, :n]


def dot(a: Float[Array, "H I J"], b: Float[Array, "H J K"]) -> Float[Array, "H I K"]:
    """Products of the matrices of each head, in float32."""
    return lax.dot_general(
        a,
        b,
        (((2,), (1,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
