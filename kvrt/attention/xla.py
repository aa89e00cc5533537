"""Attention over runtime block lists, for any XLA device.

The loop bound is a traced value, so one compiled program serves every context length, and only
blocks that hold something for these tokens are read. The step's own tokens join the same softmax;
they are written afterwards, because writing first makes XLA copy every layer.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float
from kvrt.attention import softmax
from kvrt.attention.prefill import pieces
from kvrt.attention.rope import RopeTables
from kvrt.attention.step import side_by_side
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import AnyView, BlockView, SeqView
from kvrt.config import GroupSpec
from kvrt.store import tile as tile_of

# Tiles of one pass of the loop, side by side like heads: half the passes, each with work for more
# threads. A single token takes one: it is bound by reads, and would read a tile that nothing lists.
LANES = 2
# Cells of a tile: one block, or as many smaller ones as have so many cells.
TILE = 256

Arrays = Sequence[Array]


def attend(
    qkv: TokenQKV, kv: LayerKV, view: AnyView, how: LayerAttention
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """See `kvrt.attention.attend`."""
    if isinstance(view, SeqView):
        return _attend_seqs(qkv, kv, view, how)
    return _attend_blocks(qkv, kv, view, how)


def blocks_a_tile(n_cells: int) -> int:
    """Blocks of n_cells that are read side by side, however few a cache has.

    What a tile adds up, and in which order, then depends on the block list alone.
    """
    return max(TILE // n_cells, 1)


def _attend_blocks(
    qkv: TokenQKV, kv: LayerKV, view: BlockView, how: LayerAttention
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """Attention of T tokens over one block list and over themselves."""
    n_tokens, n_kv, group = qkv.q.shape[0], qkv.k.shape[1], how.group
    if n_tokens > 1 and how.grouped is None and (size := pieces.tokens_a_piece(n_tokens)):
        return pieces.attend(qkv, kv, view, how, size)
    sides = _sides(qkv, how)
    heads = [_by_kv_head(x, n_kv) for x, _, _ in sides]
    own = [jnp.transpose(x, (1, 2, 0)).astype(jnp.float32) for _, x, _ in sides]
    values = jnp.transpose(qkv.v, (1, 0, 2)).astype(jnp.float32)
    visible, ropes = jnp.asarray(view.sees_own(group.mask)), [rope for _, _, rope in sides]
    if n_tokens == 1:
        # It begins with itself: nothing is merged, and no constant copied into every layer's loop.
        s = softmax.scores(heads[0], own[0], group.score_scale, group.soft_cap)
        part = softmax.of_one(s, values, visible[None])
        if side_by_side.takes(heads[0], kv, view, how):
            part, n_done = side_by_side.attend(part, heads[0], kv, view, how)
            left = jnp.roll(view.blocks, -n_done), jnp.maximum(view.n_blocks - n_done, 0)
            view = dataclasses.replace(view, blocks=left[0], n_blocks=left[1])
        part = _over_list(part, heads, ropes, kv, view, how)
    else:
        part = _over_list(None, heads, ropes, kv, view, how)
        sees = [x[None] for x in _with_near(visible, view, view.pos, how)]
        part = _add_tile(part, heads, own, values, sees, group)
    sinks = how.sinks
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(n_kv, -1), n_tokens, axis=1)
    out, lse = softmax.finish(part, sinks)
    lse = _by_token(lse[:, :, None], n_tokens)[:, :, 0]
    return _by_token(out, n_tokens).astype(qkv.q.dtype), lse


def _over_list(
    begin: softmax.Partial | None,
    heads: Arrays,
    ropes: Sequence[RopeTables | None],
    kv: LayerKV,
    view: BlockView,
    how: LayerAttention,
) -> softmax.Partial:
    """Softmax over the cells of a block list: after `begin` a tile a pass, else `LANES` of them."""
    (n_kv, n_queries, d), n_side = heads[0].shape, blocks_a_tile(view.block_size)
    n_lanes, rank = LANES if begin is None else 1, how.group.latent_rank

    def one(i: Array) -> tuple[Arrays, Array, list[AnyArray]]:
        ids = blocks[i]
        stored, values = tile_of.keys(kv.k, ids), tile_of.values(kv.v, ids)
        keys = [stored if rope is None else rope.rotate_cells(stored, ids) for rope in ropes]
        k_pos = view.cell_pos[ids].reshape(-1)
        k_seqs = view.cell_seqs[ids].reshape(k_pos.shape[0], -1)
        listed = jnp.repeat(i * n_side + jnp.arange(n_side) < view.n_blocks, view.block_size)
        visible = view.sees(k_pos, k_seqs, how.group.mask) & listed[None]
        return keys, values, _with_near(visible, view, k_pos, how)

    def step(i: Array, part: softmax.Partial) -> softmax.Partial:
        keys, values, sees = zip(*(one(n_lanes * i + j) for j in range(n_lanes)), strict=True)
        keys = [jnp.concatenate(side) for side in zip(*keys, strict=True)]
        sees = [jnp.repeat(jnp.stack(x), n_kv, axis=0) for x in zip(*sees, strict=True)]
        return _add_tile(part, lanes, keys, jnp.concatenate(values), sees, how.group)

    n_pad = -view.blocks.shape[0] % (n_lanes * n_side)
    blocks = jnp.pad(view.blocks, (0, n_pad)).reshape(-1, n_side)
    lanes = [jnp.tile(x, (n_lanes, 1, 1)) for x in heads]
    n_passes = (view.n_blocks + (n_lanes * n_side - 1)) // (n_lanes * n_side)
    part = softmax.empty(n_lanes * n_kv, n_queries, rank or d) if begin is None else begin
    return _join(lax.fori_loop(0, n_passes, step, part), n_kv)


def _with_near(
    visible: AnyArray, view: BlockView, k_pos: AnyArray, how: LayerAttention
) -> list[AnyArray]:
    """What tokens see and, with grouped positions, which pairs are compared by exact ones."""
    return (
        [visible] if how.grouped is None else [visible, how.grouped.is_near(view.pos, k_pos[None])]
    )


def _add_tile(
    part: softmax.Partial,
    queries: Arrays,
    keys: Arrays,
    v: Array,
    sees: Sequence[AnyArray],
    group: GroupSpec,
) -> softmax.Partial:
    """`part` with one more tile; with grouped positions sequences have a second entry for them.

    Args:
      part: softmax over other cells.
      queries: `[L, P, D]` each.
      keys: `[L, D, B]` each.
      v: values. `[L, B, D]`
      sees: as `_with_near`, by tokens. `[L, T, B]`
      group: scale and soft cap.
    """
    visible, *near = (_for_heads(x, queries[0].shape[1] // x.shape[1]) for x in sees)
    compare = functools.partial(softmax.latent_scores, v) if group.latent_rank else softmax.scores
    sources = [
        functools.partial(compare, x, y, group.score_scale, group.soft_cap)
        for x, y in zip(queries, keys, strict=True)
    ]
    s = _one_of_two(sources[0], sources[1], near[0], visible) if near else sources[0]()
    return softmax.add_tile(part, s, v, visible)


def _attend_seqs(
    qkv: TokenQKV, kv: LayerKV, view: SeqView, how: LayerAttention
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """Attention of one token of each of T sequences, each over a list of its own and over itself.

    A pass of the loop takes the next tile of every list at once, so no token reads another's
    blocks; the loop ends with the longest list.
    """
    n_tokens, n_q, d = qkv.q.shape
    n_kv, group = qkv.k.shape[1], how.group
    sides = _sides(qkv, how)
    heads = [x.astype(jnp.float32).reshape(n_tokens * n_kv, n_q // n_kv, d) for x, _, _ in sides]
    part = _over_lists(heads, [rope for _, _, rope in sides], kv, view, how)
    if view.shared is not None:
        part = softmax.merge(part, _over_shared(sides, kv, view, how, n_kv))
    # A token is compared with itself by its exact position.
    own, own_values = (_lanes(x.astype(jnp.float32)) for x in (qkv.k[..., None], qkv.v[:, :, None]))
    s = softmax.scores(heads[0], own, group.score_scale, group.soft_cap)
    part = _add_seq_tile(part, s, own_values, view.sees_own()[:, None])
    sinks = how.sinks
    if sinks is not None:
        sinks = jnp.tile(sinks.astype(jnp.float32).reshape(n_kv, -1), (n_tokens, 1))
    out, lse = softmax.finish(part, sinks)
    return out.reshape(n_tokens, n_q, -1).astype(qkv.q.dtype), lse.reshape(n_tokens, n_q)


def _over_lists(
    heads: Arrays,
    ropes: Sequence[RopeTables | None],
    kv: LayerKV,
    view: SeqView,
    how: LayerAttention,
) -> softmax.Partial:
    """Softmax of T tokens over the cells of a block list each; lanes are tokens and kv heads."""
    (n_lanes, n_group, d), n_cells, group = heads[0].shape, view.block_size, how.group
    n_side, n_tokens = blocks_a_tile(n_cells), view.n_tokens
    lists = jnp.pad(view.blocks, ((0, 0), (0, -view.blocks.shape[1] % n_side)))

    def step(i: Array, part: softmax.Partial) -> softmax.Partial:
        ids = lax.dynamic_slice_in_dim(lists, i * n_side, n_side, axis=1)
        stored, values = tile_of.keys(kv.k, ids), tile_of.values(kv.v, ids)
        k_pos = view.cell_pos[ids].reshape(n_tokens, -1)
        k_seqs = view.cell_seqs[ids].reshape(*k_pos.shape, -1)
        listed = (i * n_side + jnp.arange(n_side))[None] < view.n_blocks[:, None]
        sees = view.sees(k_pos, k_seqs, group.mask) & jnp.repeat(listed, n_cells, axis=1)

        def compared(side: int) -> Array:
            rope, keys = ropes[side], stored
            if rope is not None:
                keys = jax.vmap(rope.rotate_cells)(keys, ids)
            latent = functools.partial(softmax.latent_scores, _lanes(values))
            compare = latent if group.latent_rank else softmax.scores
            return compare(heads[side], _lanes(keys), group.score_scale, group.soft_cap)

        if how.grouped is None:
            return _add_seq_tile(part, compared(0), _lanes(values), sees)
        near, visible = (
            _of_lanes(x, n_lanes) for x in (how.grouped.is_near(view.pos, k_pos), sees)
        )
        exact, grouped = (functools.partial(compared, side) for side in (0, 1))
        s = _one_of_two(exact, grouped, near, visible)
        return _add_seq_tile(part, s, _lanes(values), sees)

    n_passes = (jnp.max(view.n_blocks) + (n_side - 1)) // n_side
    empty = softmax.empty(n_lanes, n_group, group.latent_rank or d)
    return lax.fori_loop(0, n_passes, step, empty)


def _over_shared(
    sides: Sequence[tuple[Array, Array, RopeTables | None]],
    kv: LayerKV,
    view: SeqView,
    how: LayerAttention,
    n_kv: int,
) -> softmax.Partial:
    """Softmax over what sequences share: each run is read once, for the queries of its members."""
    shared, n_tokens = view.shared, view.n_tokens
    assert shared is not None, "a view that shares blocks"
    heads, ropes = [_by_kv_head(q, n_kv) for q, _, _ in sides], [rope for _, _, rope in sides]
    n_queries = heads[0].shape[1]

    def add(width: int, i: Array, part: softmax.Partial) -> softmax.Partial:
        at = shared.members[i, :width]
        # Queries of padding lie beyond the last one.
        at = jnp.where(at < n_tokens, at, n_queries)[None]
        rows = (jnp.arange(0, n_queries, n_tokens, dtype=jnp.int32)[:, None] + at).reshape(-1)

        def taken(x: Array) -> Array:
            return x.at[:, rows].get(mode="fill", fill_value=0)

        few = _over_list(None, [taken(x) for x in heads], ropes, kv, view.run(i, width), how)
        few = softmax.merge(jax.tree.map(taken, part), few)
        return jax.tree.map(lambda x, new: x.at[:, rows].set(new, mode="drop"), part, few)

    branches = [functools.partial(add, width) for width in shared.widths]
    part = lax.fori_loop(
        0,
        shared.n_runs,
        lambda i, part: lax.switch(shared.width(i), branches, i, part),
        softmax.empty(heads[0].shape[0], n_queries, how.group.latent_rank or heads[0].shape[2]),
    )

    def lanes(x: Float[Array, "H P ..."]) -> Float[Array, "L G ..."]:
        x = x.reshape(n_kv, -1, n_tokens, *x.shape[2:])
        return _lanes(jnp.moveaxis(x, 2, 0))

    return jax.tree.map(lanes, part)


def _sides(qkv: TokenQKV, how: LayerAttention) -> list[tuple[Array, Array, RopeTables | None]]:
    """Queries, keys and RoPE of cells by exact positions, and by grouped ones where there are."""
    sides = [(qkv.q, qkv.k, how.rope)]
    if how.grouped is not None and qkv.grouped is not None:
        sides.append((*qkv.grouped, how.grouped.rope))
    return sides


def _add_seq_tile(
    part: softmax.Partial, s: Float[Array, "L G B"], values: Array, sees: AnyArray
) -> softmax.Partial:
    """`part` with one more tile of each of T lists; lanes are tokens and kv heads.

    Args:
      part: softmax over other cells.
      s: scores. `[L, G, B]`
      values: `[L, B, D]`
      sees: which cells each token sees. `[T, B]`
    """
    visible = jnp.broadcast_to(_of_lanes(sees, s.shape[0]), s.shape)
    return softmax.add_tile(part, s, values, visible)


def _of_lanes(x: Bool[AnyArray, "T B"], n_lanes: int) -> Bool[Array, "L 1 B"]:
    """What holds of each token's cells, for each of its kv heads."""
    return jnp.repeat(x, n_lanes // x.shape[0], axis=0)[:, None]


def _one_of_two(
    of_near: Callable[[], Array],
    of_grouped: Callable[[], Array],
    near: Bool[AnyArray, "#L #P B"],
    visible: Bool[AnyArray, "#L #P B"],
) -> Float[Array, "L P B"]:
    """Scores of each pair as it is compared; a product that no visible pair needs is left out."""
    some_near, some_grouped = jnp.any(near & visible), jnp.any(~near & visible)
    which = some_grouped.astype(jnp.int32) * (1 + some_near.astype(jnp.int32))
    return lax.switch(
        which, [of_near, of_grouped, lambda: jnp.where(near, of_near(), of_grouped())]
    )


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
    by_lane = jax.tree.map(lambda x: x.reshape(-1, n_kv, *x.shape[1:]), part)
    lanes = [jax.tree.map(operator.itemgetter(i), by_lane) for i in range(by_lane.m.shape[0])]
    return functools.reduce(softmax.merge, lanes)


def _lanes(x: Float[Array, "T H ..."]) -> Float[Array, "L ..."]:
    """Tokens and heads as one axis."""
    return x.reshape(-1, *x.shape[2:])
