"""Attention over a runtime list of blocks, for any XLA device.

The loop bound is a traced value, so one compiled program serves every context length, and only
blocks that hold something for these tokens are read. The step's own tokens join the same softmax;
they are written afterwards, because writing first makes XLA copy every layer.
"""

import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float
from kvrt.attention import softmax, view
from kvrt.attention.grouped import Far
from kvrt.attention.rotation import Rotation
from kvrt.config import GroupSpec
from kvrt.store import tile as tile_of
from kvrt.store.codec import Rows
from kvrt.store.per_channel import KeyRows

# Tiles of one turn, side by side like heads: half the turns, each with work for more threads.
LANES = 2
# Cells of a tile: one block, or as many smaller ones as have so many cells.
TILE = 256

Arrays = Sequence[Array]


def attend_chunked(
    q: Float[Array, "T Q D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    k_rows: KeyRows,
    v_rows: Rows,
    sight: view.View,
    group: GroupSpec,
    turn: Rotation | None,
    far: Far | None,
    sinks: Float[Array, " Q"] | None,
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """Attention of T tokens over the blocks of `sight` and over themselves.

    Args:
      q: rotated queries.
      k: the tokens' own keys, rotated.
      v: the tokens' own values.
      k_rows: key rows of the layer, [N, H, D, B] or codes of them, before the step's write.
      v_rows: value rows, [N, H, B, D], likewise.
      sight: positions, owners and blocks.
      group: mask, scale and soft cap of the layer.
      turn: turns stored keys to their positions where they are stored raw; None without RoPE.
      far: the tokens at grouped positions for SelfExtend, or None.
      sinks: a logit a query head, or None.

    Returns:
      Output in q's dtype and log-sum-exp in float32.
    """
    n_tokens, n_q, d = q.shape
    n_kv = k.shape[1]
    # Exact positions, and grouped ones where a far key is compared by those.
    sides = [(q, k, turn)] if far is None else [(q, k, turn), (far.q, far.k, far.turn)]
    heads = [_by_kv_head(x, n_kv) for x, _, _ in sides]

    def seen(visible: AnyArray, k_pos: AnyArray) -> list[AnyArray]:
        return [visible] if far is None else [visible, far.is_near(sight.pos, k_pos)]

    def tile(
        part: softmax.Partial, queries: Arrays, keys: Arrays, v: Array, sees: Sequence[AnyArray]
    ) -> softmax.Partial:
        visible, *near = (_for_heads(x, n_q // n_kv) for x in sees)
        sources = [
            functools.partial(softmax.scores, x, y, group.score_scale, group.soft_cap)
            for x, y in zip(queries, keys, strict=True)
        ]
        s = _one_of_two(sources[0], sources[1], near[0], visible) if near else sources[0]()
        return softmax.add_tile(part, s, v, visible)

    def one(i: Array) -> tuple[Arrays, Array, list[AnyArray]]:
        ids = blocks[i]
        raw = tile_of.keys(k_rows, ids)
        keys = [raw if t is None else t.cells(raw, ids) for _, _, t in sides]
        k_pos = sight.cell_pos[ids].reshape(-1)
        k_seqs = sight.cell_seqs[ids].reshape(k_pos.shape[0], -1)
        listed = jnp.repeat(i * n_side + jnp.arange(n_side) < sight.n_blocks, n_cells)
        visible = view.sees_cells(sight, k_pos, k_seqs, group.mask) & listed[None]
        return keys, tile_of.values(v_rows, ids), seen(visible, k_pos)

    def step(i: Array, part: softmax.Partial) -> softmax.Partial:
        keys, values, sees = zip(*(one(LANES * i + j) for j in range(LANES)), strict=True)
        keys = [jnp.concatenate(side) for side in zip(*keys, strict=True)]
        sees = [jnp.repeat(jnp.stack(x), n_kv, axis=0) for x in zip(*sees, strict=True)]
        return tile(part, lanes, keys, jnp.concatenate(values), sees)

    n_cells = sight.cell_pos.shape[1]
    n_side = blocks_a_tile(n_cells)
    n_pad = -sight.blocks.shape[0] % (LANES * n_side)
    blocks = jnp.pad(sight.blocks, (0, n_pad)).reshape(-1, n_side)
    lanes = [jnp.tile(x, (LANES, 1, 1)) for x in heads]
    part = softmax.empty(LANES * n_kv, heads[0].shape[1], d)
    n_turns = (sight.n_blocks + (LANES * n_side - 1)) // (LANES * n_side)
    part = _join(lax.fori_loop(0, n_turns, step, part), n_kv)
    own = [jnp.transpose(x, (1, 2, 0)).astype(jnp.float32) for _, x, _ in sides]
    own_values = jnp.transpose(v, (1, 0, 2)).astype(jnp.float32)
    sees = [x[None] for x in seen(view.sees_own(sight, group.mask), sight.pos)]
    part = tile(part, heads, own, own_values, sees)
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(n_kv, -1), n_tokens, axis=1)
    out, lse = softmax.finish(part, sinks)
    return _by_token(out, n_tokens).astype(q.dtype), _by_token(lse[:, :, None], n_tokens)[:, :, 0]


def blocks_a_tile(n_cells: int) -> int:
    """Blocks of n_cells that are read side by side, however few a cache has.

    What a tile adds up, and in which order, then depends on nothing but the list of blocks.
    """
    return max(TILE // n_cells, 1)


def _one_of_two(
    of_near: Callable[[], Array],
    of_far: Callable[[], Array],
    near: Bool[AnyArray, "#L P B"],
    visible: Bool[AnyArray, "#L P B"],
) -> Float[Array, "L P B"]:
    """Scores of each pair as it is compared; a product that no visible pair needs is left out."""
    some_near, some_far = jnp.any(near & visible), jnp.any(~near & visible)
    which = some_far.astype(jnp.int32) * (1 + some_near.astype(jnp.int32))
    return lax.switch(which, [of_near, of_far, lambda: jnp.where(near, of_near(), of_far())])


def _by_kv_head(q: Float[Array, "T Q D"], n_kv: int) -> Float[Array, "H P D"]:
    """Queries of one kv head side by side, heads before tokens: [T, H*G, D] to [H, G*T, D]."""
    n_tokens, n_q, d = q.shape
    q = q.astype(jnp.float32).reshape(n_tokens, n_kv, n_q // n_kv, d)
    return jnp.transpose(q, (1, 2, 0, 3)).reshape(n_kv, n_q // n_kv * n_tokens, d)


def _by_token(x: Float[Array, "H P D"], n_tokens: int) -> Float[Array, "T Q D"]:
    """The inverse of `_by_kv_head`."""
    n_kv, n, d = x.shape
    x = x.reshape(n_kv, n // n_tokens, n_tokens, d)
    return jnp.transpose(x, (2, 0, 1, 3)).reshape(n_tokens, n_kv * (n // n_tokens), d)


def _for_heads(sees: Bool[AnyArray, "L T B"], n_heads: int) -> Bool[Array, "L P B"]:
    """The tokens' mask for every query head of a kv head."""
    n, n_tokens, b = sees.shape
    wide = jnp.broadcast_to(sees[:, None], (n, n_heads, n_tokens, b))
    return wide.reshape(n, n_heads * n_tokens, b)


def _join(part: softmax.Partial, n_kv: int) -> softmax.Partial:
    """The lanes of a partial result as one."""
    by_lane = jax.tree.map(lambda x: x.reshape(LANES, n_kv, *x.shape[1:]), part)
    lanes = [jax.tree.map(operator.itemgetter(i), by_lane) for i in range(LANES)]
    return functools.reduce(softmax.merge, lanes)
