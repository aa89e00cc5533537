"""Attention in plain jnp over all cells at once: slow, obvious, and the judge of the others."""

from typing import Any

import jax
import jax.numpy as jnp

from kvrt.arrays import Array, Bool, Float
from kvrt.attention import softmax
from kvrt.attention.rope import RopeTables
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import AnyView, BlockView, SeqView
from kvrt.cells import mask
from kvrt.store import tile


def attend(
    qkv: TokenQKV, kv: LayerKV, view: AnyView, how: LayerAttention
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """See `kvrt.attention.attend`: one [T, C + T] score matrix a head."""
    if isinstance(view, SeqView):
        return _attend_seqs(qkv, kv, view, how)
    return _attend_blocks(qkv, kv, view, how)


def _attend_blocks(
    qkv: TokenQKV, kv: LayerKV, view: BlockView, how: LayerAttention
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """Blocks that are not listed are masked, as the loop of the XLA path never reads them."""
    n, b = view.cell_pos.shape
    group, blocks = how.group, jnp.arange(n, dtype=jnp.int32)[:, None]
    stored, cached = tile.keys(kv.k, blocks), tile.values(kv.v, blocks)

    def all_keys(rope: RopeTables | None, own: Array) -> Array:
        keys = stored
        if rope is not None:
            keys = jax.vmap(rope.rotate_cells)(keys, blocks)
        keys = tile.behind_latent(keys, cached) if group.latent_rank else keys
        keys = jnp.transpose(keys, (0, 3, 1, 2)).reshape(n * b, *own.shape[1:])
        return jnp.concatenate([keys, own.astype(jnp.float32)])

    values = jnp.transpose(cached, (0, 2, 1, 3)).reshape(n * b, *qkv.v.shape[1:])
    cell_pos = jnp.where(_listed(view, n)[:, None], view.cell_pos, -1).reshape(-1)
    cell_seqs = view.cell_seqs.reshape(n * b, -1)
    sees = jnp.concatenate(
        [
            mask.visible(group.mask, cell_pos, cell_seqs, view.pos, view.bits),
            view.sees_own(group.mask),
        ],
        axis=1,
    )
    values = jnp.concatenate([values, qkv.v.astype(jnp.float32)])
    values = jnp.where(jnp.any(sees, axis=0)[:, None, None], values, 0.0)
    s = _scores(qkv.q, all_keys(how.rope, qkv.k), group.score_scale, group.soft_cap)
    if how.grouped is not None and qkv.grouped is not None:
        k_pos = jnp.concatenate([cell_pos, jnp.asarray(view.pos)])
        near = how.grouped.is_near(view.pos, k_pos[None])
        grouped_q, grouped_k = qkv.grouped
        grouped_scores = _scores(
            grouped_q, all_keys(how.grouped.rope, grouped_k), group.score_scale, group.soft_cap
        )
        s = jnp.where(near[:, None, :], s, grouped_scores)
    return _softmax(s, values, sees, how.sinks)


def _listed(view: BlockView, n: int) -> Bool[Array, " N"]:
    """Which of all n blocks are read."""
    none = jnp.zeros(n, bool)
    real = jnp.arange(view.blocks.shape[0]) < view.n_blocks
    return none.at[view.blocks].max(real, mode="drop")


def _attend_seqs(
    qkv: TokenQKV, kv: LayerKV, view: SeqView, how: LayerAttention
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """Each token is a step of its own."""

    def one(i: int) -> tuple[Array, Array]:
        at = slice(i, i + 1)
        alone = BlockView(
            pos=view.pos[at],
            bits=view.bits[at],
            **_list_of(view, i),
            cell_pos=view.cell_pos,
            cell_seqs=view.cell_seqs,
            own=view.own,
        )
        token = jax.tree.map(lambda x: x[at], qkv)
        return _attend_blocks(token, kv, alone, how)

    out, lse = zip(*(one(i) for i in range(view.n_tokens)), strict=True)
    return jnp.concatenate(out), jnp.concatenate(lse)


def _list_of(view: SeqView, i: int) -> dict[str, Any]:
    """The blocks that a token reads, those that it shares behind its own."""
    if view.shared is None:
        return {"blocks": view.blocks[i], "n_blocks": view.n_blocks[i]}
    tables, m = view.shared.tables, view.blocks.shape[1]
    n_shared = jnp.where(jnp.any(view.shared.members == i, axis=1), view.shared.n_blocks, 0)
    nth = jnp.arange(max(m, tables.shape[1]))
    own, shared = nth[:m] < view.n_blocks[i], nth[None, : tables.shape[1]] < n_shared[:, None]
    ids, real = (
        jnp.concatenate([a, b.reshape(-1)]) for a, b in ((view.blocks[i], tables), (own, shared))
    )
    return {"blocks": ids[jnp.argsort(~real, stable=True)], "n_blocks": jnp.sum(real)}


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
