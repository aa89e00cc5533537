"""Attention of rows: one token of each of many sequences, each over blocks of its own.

A turn of the loop takes the next tile of every row at once, so no row reads what is another's; the
loop ends with the longest row. One compiled program serves every length, as in `chunked`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Float
from kvrt.attention import softmax, view
from kvrt.attention.chunked import blocks_a_tile
from kvrt.attention.rotation import Rotation
from kvrt.config import GroupSpec
from kvrt.store import tile as tile_of
from kvrt.store.codec import Rows
from kvrt.store.per_channel import KeyRows


def attend_rows(
    q: Float[Array, "S Q D"],
    k: Float[Array, "S H D"],
    v: Float[Array, "S H D"],
    k_rows: KeyRows,
    v_rows: Rows,
    sight: view.RowView,
    group: GroupSpec,
    turn: Rotation | None,
    sinks: Float[Array, " Q"] | None,
) -> tuple[Float[Array, "S Q D"], Float[Array, "S Q"]]:
    """Attention of S tokens, each over the blocks of its row and over itself.

    Args:
      q: rotated queries, one a row.
      k: the tokens' own keys, rotated.
      v: the tokens' own values.
      k_rows: key rows of the layer, [N, H, D, B] or codes of them, before the step's write.
      v_rows: value rows, [N, H, B, D], likewise.
      sight: positions, owners and the rows' blocks.
      group: mask, scale and soft cap of the layer.
      turn: turns stored keys to their positions where they are stored raw; None without RoPE.
      sinks: a logit a query head, or None.

    Returns:
      Output in q's dtype and log-sum-exp in float32.
    """
    n_rows, n_q, d = q.shape
    n_kv, n_cells = k.shape[1], sight.cell_pos.shape[1]
    n_side = blocks_a_tile(n_cells)
    tables = jnp.pad(sight.tables, ((0, 0), (0, -sight.tables.shape[1] % n_side)))
    heads = q.astype(jnp.float32).reshape(n_rows * n_kv, n_q // n_kv, d)

    def tile(part: softmax.Partial, keys: Array, values: Array, sees: AnyArray) -> softmax.Partial:
        s = softmax.scores(heads, keys, group.score_scale, group.soft_cap)
        sees = jnp.broadcast_to(jnp.repeat(sees, n_kv, axis=0)[:, None], s.shape)
        return softmax.add_tile(part, s, values, sees)

    def step(i: Array, part: softmax.Partial) -> softmax.Partial:
        ids = lax.dynamic_slice_in_dim(tables, i * n_side, n_side, axis=1)
        keys = tile_of.keys(k_rows, ids)
        if turn is not None:
            keys = jax.vmap(turn.cells)(keys, ids)
        values = tile_of.values(v_rows, ids)
        k_pos = sight.cell_pos[ids].reshape(n_rows, -1)
        k_seqs = sight.cell_seqs[ids].reshape(*k_pos.shape, -1)
        listed = (i * n_side + jnp.arange(n_side))[None] < sight.n_blocks[:, None]
        sees = view.row_sees(sight, k_pos, k_seqs, group.mask)
        sees &= jnp.repeat(listed, n_cells, axis=1)
        return tile(part, _lanes(keys), _lanes(values), sees)

    part = softmax.empty(n_rows * n_kv, n_q // n_kv, d)
    n_turns = (jnp.max(sight.n_blocks) + (n_side - 1)) // n_side
    part = lax.fori_loop(0, n_turns, step, part)
    own, own_values = (_lanes(x.astype(jnp.float32)) for x in (k[..., None], v[:, :, None]))
    part = tile(part, own, own_values, view.row_sees_own(sight)[:, None])
    if sinks is not None:
        sinks = jnp.tile(sinks.astype(jnp.float32).reshape(n_kv, -1), (n_rows, 1))
    out, lse = softmax.finish(part, sinks)
    return out.reshape(n_rows, n_q, d).astype(q.dtype), lse.reshape(n_rows, n_q)


def _lanes(x: Float[Array, "S H _ _"]) -> Float[Array, "L _ _"]:
    """Rows and heads as one axis."""
    return x.reshape(-1, *x.shape[2:])
