"""Attention in plain jnp over all cells at once: slow, obvious, and the judge of the others."""

import jax
import jax.numpy as jnp

from kvrt.arrays import Array, Float
from kvrt.attention import softmax, view
from kvrt.attention.grouped import Far
from kvrt.attention.rotation import Rotation
from kvrt.cells import mask
from kvrt.config import GroupSpec
from kvrt.store import tile
from kvrt.store.codec import Rows
from kvrt.store.per_channel import KeyRows


def attend_reference(
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
    """As `attend_chunked`, with one [T, C + T] score matrix a head.

    Blocks that are not listed are masked, as the loop of the other path never reads them.
    """
    n, b = sight.cell_pos.shape
    blocks = jnp.arange(n, dtype=jnp.int32)[:, None]
    raw = tile.keys(k_rows, blocks)
    h, d = raw.shape[1:3]

    def all_keys(turn: Rotation | None, own: Array) -> Array:
        keys = raw
        if turn is not None:
            keys = jax.vmap(turn.cells)(keys, blocks)
        keys = jnp.transpose(keys, (0, 3, 1, 2)).reshape(n * b, h, d)
        return jnp.concatenate([keys, own.astype(jnp.float32)])

    values = jnp.transpose(tile.values(v_rows, blocks), (0, 2, 1, 3)).reshape(n * b, h, d)
    listed = (
        jnp.zeros(n, bool)
        .at[sight.blocks]
        .max(jnp.arange(sight.blocks.shape[0]) < sight.n_blocks, mode="drop")
    )
    cell_pos = jnp.where(listed[:, None], sight.cell_pos, -1).reshape(-1)
    cell_seqs = sight.cell_seqs.reshape(n * b, -1)
    sees = jnp.concatenate(
        [
            mask.visible(group.mask, cell_pos, cell_seqs, sight.pos, sight.bits),
            view.sees_own(sight, group.mask),
        ],
        axis=1,
    )
    values = jnp.concatenate([values, v.astype(jnp.float32)])
    values = jnp.where(jnp.any(sees, axis=0)[:, None, None], values, 0.0)
    s = _scores(q, all_keys(turn, k), group.score_scale, group.soft_cap)
    if far is not None:
        near = far.is_near(sight.pos, jnp.concatenate([cell_pos, jnp.asarray(sight.pos)]))
        beyond = _scores(far.q, all_keys(far.turn, far.k), group.score_scale, group.soft_cap)
        s = jnp.where(near[:, None, :], s, beyond)
    return _softmax(s, values, sees, sinks)


def attend_rows_reference(
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
    """As `attend_rows`: each row is a step of its own."""

    def one(i: int) -> tuple[Array, Array]:
        at = slice(i, i + 1)
        alone = view.View(
            pos=sight.pos[at],
            bits=sight.bits[at],
            blocks=sight.tables[i],
            n_blocks=sight.n_blocks[i],
            cell_pos=sight.cell_pos,
            cell_seqs=sight.cell_seqs,
            own=sight.own,
        )
        return attend_reference(
            q[at], k[at], v[at], k_rows, v_rows, alone, group, turn, None, sinks
        )

    out, lse = zip(*(one(i) for i in range(q.shape[0])), strict=True)
    return jnp.concatenate(out), jnp.concatenate(lse)


def _scores(q: Array, keys: Array, scale: float, cap: float | None) -> Float[Array, "T Q C"]:
    keys = jnp.repeat(keys, q.shape[1] // keys.shape[1], axis=1)
    s = jnp.einsum("tqd,cqd->tqc", q.astype(jnp.float32), keys) * jnp.float32(scale)
    return s if cap is None else jnp.tanh(s / cap) * cap


def _softmax(
    s: Float[Array, "T Q C"], values: Array, sees: Array, sinks: Array | None
) -> tuple[Array, Array]:
    values = jnp.repeat(values, s.shape[1] // values.shape[1], axis=1)
    s = jnp.where(sees[:, None, :], s, softmax.MASKED)
    m = jnp.max(s, axis=2)
    if sinks is not None:
        m = jnp.maximum(m, sinks.astype(jnp.float32)[None])
    p = jnp.where(sees[:, None, :], jnp.exp(s - m[:, :, None]), 0.0)
    total = jnp.sum(p, axis=2)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(jnp.float32)[None] - m)
    some = total != 0  # true of NaN, which is passed on
    safe = jnp.where(some, total, 1.0)
    out = jnp.einsum("tqc,cqd->tqd", p / safe[:, :, None], values)
    return out, jnp.where(some, m + jnp.log(safe), softmax.MASKED)
