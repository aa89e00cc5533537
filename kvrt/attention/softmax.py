"""Online softmax: attention over disjoint tiles of cells as one, merged by log-sum-exp.

A `Partial` holds unnormalised sums; tiles may come in any order. Scores, weights and sums are
float32 whatever the KV dtype is. H kv heads, Q = G * T queries of a kv head, B cells of a tile.

Source: arXiv:2205.14135, sec. 3.1; arXiv:1805.02867.
"""

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Bool, Float, state

# Finite, so that a query with nothing visible stays finite: exp(MASKED - MASKED) never makes NaN.
MASKED = float(jnp.finfo(jnp.float32).min)


@state
class Partial:
    """Softmax over some cells: greatest score, sum of weights, weighted sum of values."""

    m: Float[Array, "H Q"]
    l: Float[Array, "H Q"]  # noqa: E741 (the letter of the papers)
    acc: Float[Array, "H Q D"]


def empty(n_heads: int, n_queries: int, head_dim: int) -> Partial:
    """The partial result over no cells."""
    return Partial(
        m=jnp.full((n_heads, n_queries), MASKED, jnp.float32),
        l=jnp.zeros((n_heads, n_queries), jnp.float32),
        acc=jnp.zeros((n_heads, n_queries, head_dim), jnp.float32),
    )


def of_one(
    s: Float[Array, "H Q 1"], v: Float[Array, "H 1 D"], visible: Bool[Array, "#H #Q 1"]
) -> Partial:
    """The partial result over one cell: its weight is 1 whatever its score, unless that is NaN."""
    weight = jnp.where(visible, jnp.exp(s - s), 0.0)
    m, value = jnp.where(visible, s, MASKED), jnp.where(visible, v, 0.0)
    return Partial(m=m[:, :, 0], l=weight[:, :, 0], acc=weight * value)


def scores(
    q: Float[Array, "H Q D"], k: Float[Array, "H D B"], scale: float, soft_cap: float | None
) -> Float[Array, "H Q B"]:
    """Scaled, optionally capped dot products in float32."""
    s = lax.dot_general(
        q, k, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    ) * jnp.float32(scale)
    return capped(s, soft_cap)


def latent_scores(
    latent: Float[Array, "L B R"], q: Array, k: Array, scale: float, cap: float | None
) -> Float[Array, "L P B"]:
    """As `scores`, of keys that a cache has behind a latent, or of whole ones.

    In two products: with few queries as here making one array of both parts takes longer.
    """
    rank = q.shape[2] - k.shape[1]
    if not rank:
        return scores(q, k, scale, cap)
    s = lax.dot_general(
        q[:, :, :rank],
        latent,
        (((2,), (2,)), ((0,), (0,))),
        preferred_element_type=jnp.float32,
    )
    s = s * jnp.float32(scale) + scores(q[:, :, rank:], k, scale, None)
    return capped(s, cap)


def capped(s: Float[Array, "..."], soft_cap: float | None) -> Float[Array, "..."]:
    """Scores that come no further than the cap, where there is one; also runs in a kernel."""
    return s if soft_cap is None else jnp.tanh(s / soft_cap) * soft_cap


def add_tile(
    part: Partial,
    s: Float[Array, "H Q B"],
    v: Float[Array, "H B D"],
    visible: Bool[Array, "#H #Q B"],
) -> Partial:
    """`part` with one more tile of cells.

    A value that no query sees is replaced by zero before the product, since 0 * NaN is NaN: what
    a released or foreign cell holds never matters.
    """
    s = jnp.where(visible, s, MASKED)
    m = jnp.maximum(part.m, jnp.max(s, axis=2))
    # The second condition keeps a query that has seen nothing at weight zero instead of exp(0).
    p = jnp.where(visible, jnp.exp(s - m[:, :, None]), 0.0)
    v = jnp.where(jnp.any(visible, axis=1)[:, :, None], v, 0.0)
    old = jnp.exp(part.m - m)
    pv = lax.dot_general(p, v, (((2,), (1,)), ((0,), (0,))))
    return Partial(m=m, l=part.l * old + jnp.sum(p, axis=2), acc=part.acc * old[:, :, None] + pv)


def merge(a: Partial, b: Partial) -> Partial:
    """The partial result over the cells of both, which must be disjoint."""
    m = jnp.maximum(a.m, b.m)
    wa, wb = jnp.exp(a.m - m), jnp.exp(b.m - m)
    acc = a.acc * wa[:, :, None] + b.acc * wb[:, :, None]
    return Partial(m=m, l=a.l * wa + b.l * wb, acc=acc)


def finish(
    part: Partial, sinks: Float[Array, "H Q"] | None = None
) -> tuple[Float[Array, "H Q D"], Float[Array, "H Q"]]:
    """Normalised output and log-sum-exp; a query that saw nothing gives zeros and `MASKED`.

    Args:
      part: sums over all cells.
      sinks: a score per query that joins the softmax with a value of zero, or None.
    """
    m, l, acc = part.m, part.l, part.acc  # noqa: E741
    if sinks is not None:
        top = jnp.maximum(m, sinks)
        old = jnp.exp(m - top)
        m, l, acc = top, l * old + jnp.exp(sinks - top), acc * old[:, :, None]  # noqa: E741
    some = l != 0  # NaN is passed on: keys that are not numbers must not count as none
    safe = jnp.where(some, l, 1.0)
    out = jnp.where(some[:, :, None], acc / safe[:, :, None], 0.0)
    return out, jnp.where(some, m + jnp.log(safe), MASKED)


def merge_outputs(
    a: tuple[Float[Array, "T Q D"], Float[Array, "T Q"]],
    b: tuple[Float[Array, "T Q D"], Float[Array, "T Q"]],
) -> Float[Array, "T Q D"]:
    """The output over the cells of both, which must be disjoint, from outputs and log-sum-exps."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    m = jnp.maximum(lse_a, lse_b)
    wa, wb = jnp.exp(lse_a - m)[:, :, None], jnp.exp(lse_b - m)[:, :, None]
    return (out_a.astype(jnp.float32) * wa + out_b * wb) / (wa + wb)
