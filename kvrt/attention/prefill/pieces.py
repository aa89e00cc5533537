"""Attention of many tokens over one block list: a piece of the tokens after the other.

Scores of a piece and a tile of cells stay in the processor's second cache, where those of a whole
step would go through memory once for each pass over them. A piece that sees a whole tile needs no
mask, and one that sees nothing of it passes it by: so the step's own tokens cost half a square, and
prompts that share a step read little of each other's blocks.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Float
from kvrt.attention import softmax
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import BlockView
from kvrt.cells import mask
from kvrt.config import GroupSpec
from kvrt.store import tile as tile_of

# Tokens of a piece, at most and at least, and cells of a tile: measured with 512 tokens, three kv
# heads and nine query heads of 64. Pieces of 128 took 1.2 times as long, of 64 1.7 times.
MOST, LEAST = 256, 64
TILE = 512


# Positions of tokens or cells, and their owners.
PosAndBits = tuple[Array, ...]


def tokens_a_piece(n_tokens: int) -> int | None:
    """Tokens of a piece, a divisor of n_tokens; None where they are too few."""
    size = math.gcd(n_tokens, MOST)
    return size if size >= LEAST else None


def attend(
    qkv: TokenQKV, kv: LayerKV, view: BlockView, how: LayerAttention, size: int
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """As `kvrt.attention.xla.attend`, `size` tokens at a time."""
    (n_tokens, n_q, d), d_v = qkv.q.shape, qkv.v.shape[2]
    n_kv, n, n_side = qkv.k.shape[1], n_tokens // size, max(TILE // view.block_size, 1)
    # Scaled before the products, for behind them that were one more pass over the scores.
    queries = qkv.q.astype(jnp.float32) * jnp.float32(how.group.score_scale)
    queries = queries.reshape(n, size, n_kv, n_q // n_kv, d)
    queries = jnp.transpose(queries, (0, 2, 3, 1, 4)).reshape(n, n_kv, -1, d)
    own_k, own_v = _own_tiles(qkv.k, n, (0, 2, 3, 1)), _own_tiles(qkv.v, n, (0, 2, 1, 3))
    blocks = jnp.pad(view.blocks, (0, -view.blocks.shape[0] % n_side)).reshape(-1, n_side)
    n_passes = (view.n_blocks + (n_side - 1)) // n_side
    n_own = n if view.own is None else jnp.where(view.own, n, 0)

    def cut(i: Array) -> PosAndBits:
        pos, bits = jnp.asarray(view.pos), jnp.asarray(view.bits)
        return tuple(lax.dynamic_slice_in_dim(x, i * size, size) for x in (pos, bits))

    def one(i: Array, q: Array) -> tuple[Array, Array]:
        piece = cut(i)

        def listed(j: Array, part: softmax.Partial) -> softmax.Partial:
            ids = blocks[j]
            keys, values = tile_of.keys(kv.k, ids), tile_of.values(kv.v, ids)
            keys = keys if how.rope is None else how.rope.rotate_cells(keys, ids)
            keys = tile_of.behind_latent(keys, values) if how.group.latent_rank else keys
            on = jnp.repeat(j * n_side + jnp.arange(n_side) < view.n_blocks, view.block_size)
            pos = jnp.where(on, view.cell_pos[ids].reshape(-1), -1)
            cells = pos, view.cell_seqs[ids].reshape(pos.shape[0], -1)
            return _add(part, q, (keys, values), (piece, cells), how.group)

        def own(j: Array, part: softmax.Partial) -> softmax.Partial:
            return _add(part, q, (own_k[j], own_v[j]), (piece, cut(j)), how.group)

        part = lax.fori_loop(0, n_passes, listed, softmax.empty(n_kv, q.shape[1], d_v))
        part = lax.fori_loop(0, n_own, own, part)
        return _finished(part, piece[0], how)

    out, lse = lax.map(lambda x: one(*x), (jnp.arange(n), queries))
    return out.reshape(n_tokens, n_q, d_v).astype(qkv.q.dtype), lse.reshape(n_tokens, n_q)


def _own_tiles(x: Float[Array, "T H D"], n: int, axes: tuple[int, ...]) -> Float[Array, "N H _ _"]:
    """The step's own keys or values in n tiles, as a store has them."""
    return jnp.transpose(x.astype(jnp.float32).reshape(n, -1, *x.shape[1:]), axes)


def _add(
    part: softmax.Partial,
    q: Array,
    tile: tuple[Array, Array],
    where: tuple[PosAndBits, PosAndBits],
    group: GroupSpec,
) -> softmax.Partial:
    """`part` with one more tile.

    Args:
      part: softmax over other cells.
      q: queries, scaled. `[H, P, D]`
      tile: keys and values. `[H, D, B]`, `[H, B, D]`
      where: the tokens of the queries, and the tile's cells.
      group: mask and soft cap.
    """
    (k, v), (piece, cells) = tile, where

    def whole() -> softmax.Partial:
        return _add_weighted(part, softmax.scores(q, k, 1.0, group.soft_cap), v, None)

    def masked() -> softmax.Partial:
        s = softmax.scores(q, k, 1.0, group.soft_cap)
        sees = mask.visible(group.mask, *cells, *piece)
        seen = jnp.where(jnp.any(sees, axis=0)[None, :, None], v, 0.0)
        n_heads = q.shape[1] // sees.shape[0]
        return _add_weighted(part, s, seen, jnp.tile(sees, (n_heads, 1))[None])

    which = mask.visibility(group.mask, *cells, *piece)
    return lax.switch(which, [lambda: part, masked, whole])


def _add_weighted(
    part: softmax.Partial, s: Array, v: Array, visible: Array | None
) -> softmax.Partial:
    """As `softmax.add_tile`, of values that are zero where no query sees them; None sees all."""
    s = s if visible is None else jnp.where(visible, s, softmax.MASKED)
    m = jnp.maximum(part.m, jnp.max(s, axis=2))
    p = jnp.exp(s - m[:, :, None])
    # A query that has seen nothing yet has weight zero instead of exp(0).
    p = p if visible is None else jnp.where(visible, p, 0.0)
    old = jnp.exp(part.m - m)
    pv = lax.dot_general(p, v, (((2,), (1,)), ((0,), (0,))))
    total = part.l * old + jnp.sum(p, axis=2)
    return softmax.Partial(m=m, l=total, acc=part.acc * old[:, :, None] + pv)


def _finished(part: softmax.Partial, pos: Array, how: LayerAttention) -> tuple[Array, Array]:
    """Output and log-sum-exp of a piece, by tokens; padding has seen nothing."""
    (n_kv, n_queries, d), size = part.acc.shape, pos.shape[0]
    n_heads = n_queries // size
    real = jnp.tile(pos >= 0, n_heads)[None]
    part = jax.tree.map(
        lambda x, nothing: jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, nothing),
        part,
        softmax.empty(n_kv, n_queries, d),
    )
    sinks = how.sinks
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(n_kv, -1), size, axis=1)
    out, lse = softmax.finish(part, sinks)
    out = jnp.transpose(out.reshape(n_kv, n_heads, size, d), (2, 0, 1, 3))
    lse = jnp.transpose(lse.reshape(n_kv, n_heads, size), (2, 0, 1))
    return out.reshape(size, n_kv * n_heads, d), lse.reshape(size, n_kv * n_heads)
