"""Queries that read the cells which an indexer scores highest, a set a token for all heads.

A token's index queries are compared with one index key of every token that it sees: products below
zero count nothing, the others are weighted and summed over index heads. Index keys lie in a group
of their own, whose block lists name the same tokens in the same order as the layer's. So a token is
known by its place: in the list of blocks, or behind it among the step's own tokens.

T tokens of a step, S lists (one, or T) of M blocks of B cells, P = M * B + T places.

Source: DeepSeek-V3.2-Exp, `inference/model.py`, "Indexer".
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.attention import softmax
from kvrt.attention.select.threshold import LEAST, as_ordered, nth_greatest
from kvrt.attention.types import AttendArgs, TokenQKV
from kvrt.attention.view import AnyView, SeqView
from kvrt.config import MaskSpec
from kvrt.store import kv as kv_store
from kvrt.store import tile as tile_of

# Tokens whose scores of all places are held at once.
_PIECE = 64
# Lists of more than so many times the cells that are read have these gathered for each token; in
# shorter ones all cells are read once for all tokens, and those that were not chosen are masked.
# About where both take as long on a CPU: `python -m scripts.bench.layers.indexer`.
_GATHERED = 8


@state
class Candidates:
    """What T tokens can choose of; all layers of a group share one.

    Attributes:
      seen: places that a token sees. `[T, P]`
      pos: positions of places. `[S, P]`
      fits: whether no token sees more than are chosen.
    """

    seen: Bool[Array, "T P"]
    pos: Int32[Array, "S P"]
    fits: Bool[Array, ""]


@state
class Index:
    """What a layer's tokens choose by.

    Attributes:
      args: index queries, own index keys, and where the cached ones lie, as attention has them.
      weights: of index heads, with all factors of the scores. `[T, Hi]`
      candidates: what the tokens see.
    """

    args: AttendArgs
    weights: Float[Array, "T Hi"]
    candidates: Candidates


def candidates(view: AnyView, n_cells: int) -> Candidates:
    """The places of a step's tokens, of which each chooses n_cells at most."""
    lists, n_blocks = _lists(view)
    pos = jnp.asarray(view.cell_pos)[lists].reshape(len(lists), -1)
    seqs = jnp.asarray(view.cell_seqs)[lists].reshape(*pos.shape, -1)
    nth = jnp.arange(lists.shape[1], dtype=jnp.int32)[None]
    listed = jnp.repeat(nth < n_blocks[:, None], view.block_size, axis=1)
    if isinstance(view, SeqView):
        seen, own = view.sees(pos, seqs, MaskSpec()), jnp.diag(view.sees_own())
    else:
        seen, own = view.sees(pos[0], seqs[0], MaskSpec()), view.sees_own(MaskSpec())
    seen = jnp.concatenate([jnp.asarray(seen) & listed, jnp.asarray(own)], axis=1)
    of_own = jnp.broadcast_to(jnp.asarray(view.pos)[None], (len(lists), view.n_tokens))
    fits = jnp.max(jnp.sum(seen.astype(jnp.int32), axis=1)) <= n_cells
    return Candidates(seen=seen, pos=jnp.concatenate([pos, of_own], axis=1), fits=fits)


def attend_indexed(
    args: AttendArgs,
    index: Index,
    n_cells: int,
    dense: Callable[..., tuple[Array, Array]],
) -> Float[Array, "T Q D"]:
    """Output for tokens that read n_cells tokens each; those that see no more read them densely.

    Args:
      args: of `kvrt.attention.attend`.
      index: what they choose by.
      n_cells: how many.
      dense: `kvrt.attention.attend`.
    """

    def all_cells() -> Array:
        return dense(*args)[0]

    def some_cells() -> Array:
        chosen, view = _chosen_places(index, n_cells), args[2]
        if isinstance(view, SeqView):
            return _gathered(args, chosen, n_cells)
        few = jnp.asarray(view.n_blocks) * view.block_size <= _GATHERED * n_cells
        gathered = functools.partial(_gathered, args, chosen, n_cells)
        return lax.cond(few, functools.partial(_masked, args, chosen), gathered)

    return lax.cond(index.candidates.fits, all_cells, some_cells)


# Layers of one group are traced once.
jitted = jax.jit(attend_indexed, static_argnums=(2, 3))


def _lists(view: AnyView) -> tuple[Int32[Array, "S M"], Int32[Array, " S"]]:
    """Block lists, and how many entries of each count."""
    lists, n_blocks = jnp.asarray(view.blocks), jnp.asarray(view.n_blocks)
    if isinstance(view, SeqView):
        assert view.shared is None, "refused with an indexer"
        return lists, n_blocks
    return lists[None], n_blocks[None]


def _chosen_places(index: Index, n_cells: int) -> Bool[Array, "T P"]:
    """The places that each token reads."""
    (qkv, _, view, _), found = index.args, index.candidates
    n_tokens, n_places = found.seen.shape
    size = 1 if isinstance(view, SeqView) else math.gcd(n_tokens, _PIECE)

    def one(i: Array) -> Array:
        def cut(x: Array, size: int) -> Array:
            return lax.dynamic_slice_in_dim(x, i * size, size)

        which = jnp.where(len(found.pos) == 1, 0, i)
        q, weights = cut(qkv.q.astype(jnp.float32), size), cut(index.weights, size)
        scores = index_scores(index.args, q, weights, which)
        pos = lax.dynamic_slice_in_dim(found.pos, which, 1)
        return choose_places(scores, cut(found.seen, size), pos, n_cells)

    chosen = lax.map(one, jnp.arange(n_tokens // size, dtype=jnp.int32))
    return chosen.reshape(n_tokens, n_places)


def index_scores(
    args: AttendArgs, q: Float[Array, "N Hi D"], weights: Float[Array, "N Hi"], which: Array
) -> Float[Array, "N P"]:
    """Scores that index queries of one list give its places; those beyond its end are zero.

    Args:
      args: where index keys lie, and those of the step's own tokens.
      q: index queries, as they are compared with keys.
      weights: of index heads.
      which: the list.
    """
    qkv, kv, view, how = args
    lists, n_blocks = _lists(view)
    b, n_tokens = view.block_size, view.n_tokens

    def weighted(keys: Float[Array, "D B"]) -> Float[Array, "N B"]:
        positive = jax.nn.relu(jnp.einsum("nhd,db->nhb", q, keys))
        return jnp.einsum("nh,nhb->nb", weights, positive)

    def block(i: Array, scores: Array) -> Array:
        ids = lists[which, i][None]
        keys, latents = tile_of.keys(kv.k, ids), tile_of.values(kv.v, ids)
        keys = keys if how.rope is None else how.rope.rotate_cells(keys, ids)
        new = weighted(tile_of.behind_latent(keys, latents)[0])
        return lax.dynamic_update_slice_in_dim(scores, new, i * b, axis=1)

    scores = jnp.zeros((len(q), lists.shape[1] * b), jnp.float32)
    scores = lax.fori_loop(0, n_blocks[which], block, scores)
    own = weighted(qkv.k.astype(jnp.float32).reshape(n_tokens, -1).T)
    return jnp.concatenate([scores, own], axis=1)


def choose_places(
    scores: Float[Array, "N P"],
    seen: Bool[AnyArray, "N P"],
    pos: Int32[AnyArray, "#N P"],
    n_cells: int,
) -> Bool[Array, "N P"]:
    """The n_cells places of the highest scores, or all that are seen where these are fewer.

    Of equal scores those of the lower positions, and of equal positions those before others. What
    is no number is chosen first, so that the output says so.
    """
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    ordered = jnp.where(seen, as_ordered(scores), LEAST)
    n = jnp.minimum(jnp.sum(seen, axis=1, dtype=jnp.int32), n_cells)
    low = nth_greatest(ordered, n)[:, None]
    above, equal = ordered > low, jnp.asarray(seen) & (ordered == low)
    left = n - jnp.sum(above, axis=1, dtype=jnp.int32)
    early = jnp.where(equal, -jnp.asarray(pos), LEAST)
    last = nth_greatest(early, left)[:, None]
    before, there = early > last, equal & (early == last)
    left = left - jnp.sum(before, axis=1, dtype=jnp.int32)
    return above | before | (there & (jnp.cumsum(there, axis=1, dtype=jnp.int32) <= left[:, None]))


def _own_tile(qkv: TokenQKV) -> tuple[Array, Array]:
    """Keys and values of the step's own tokens, as a tile of cells."""
    keys = jnp.transpose(qkv.k.astype(jnp.float32), (1, 2, 0))
    return keys, jnp.transpose(qkv.v.astype(jnp.float32), (1, 0, 2))


def _masked(args: AttendArgs, chosen: Bool[Array, "T P"]) -> Float[Array, "T Q D"]:
    """Exact attention over chosen places of one list, all of which is read once."""
    qkv, kv, view, how = args
    (n_tokens, n_q, d), group, b = qkv.q.shape, how.group, view.block_size
    q = qkv.q.astype(jnp.float32).reshape(1, n_tokens * n_q, d)

    def add(part: softmax.Partial, k: Array, v: Array, visible: Array) -> softmax.Partial:
        s = softmax.latent_scores(v, q, k, group.score_scale, group.soft_cap)
        return softmax.add_tile(part, s, v, jnp.repeat(visible, n_q, axis=0)[None])

    def block(i: Array, part: softmax.Partial) -> softmax.Partial:
        ids = view.blocks[i][None]
        keys, values = tile_of.keys(kv.k, ids), tile_of.values(kv.v, ids)
        keys = keys if how.rope is None else how.rope.rotate_cells(keys, ids)
        visible = lax.dynamic_slice_in_dim(chosen, i * b, b, axis=1)
        return add(part, keys, values, visible)

    part = softmax.empty(1, n_tokens * n_q, qkv.v.shape[2])
    part = lax.fori_loop(0, view.n_blocks, block, part)
    part = add(part, *_own_tile(qkv), chosen[:, -n_tokens:])
    sinks = None if how.sinks is None else jnp.tile(how.sinks, n_tokens)[None]
    return softmax.finish(part, sinks)[0].reshape(n_tokens, n_q, -1).astype(qkv.q.dtype)


def _gathered(args: AttendArgs, chosen: Bool[Array, "T P"], n_cells: int) -> Float[Array, "T Q D"]:
    """Exact attention of each token over n_cells cells of its list, and some of the step's own."""
    qkv, kv, view, how = args
    (lists, _), b, group = _lists(view), view.block_size, how.group
    (n_tokens, n_q, _), n_listed = qkv.q.shape, lists.shape[1] * view.block_size
    store = kv_store.KVStore(k=(kv.k,), v=(kv.v,))
    sinks = None if how.sinks is None else how.sinks[None]

    def one(x: tuple[Array, ...]) -> Array:
        i, q, listed, sees = x
        rank = jnp.where(listed, jnp.cumsum(listed, dtype=jnp.int32) - 1, n_cells)
        at = jnp.zeros(n_cells, jnp.int32)
        at = at.at[rank].set(jnp.arange(n_listed, dtype=jnp.int32), mode="drop")
        there = jnp.arange(n_cells) < jnp.sum(listed, dtype=jnp.int32)
        slots = lists[jnp.where(len(lists) == 1, 0, i)][at // b] * b + at % b
        keys, values = (jnp.moveaxis(x, 0, 1) for x in kv_store.read_kv(store, 0, slots))
        keys = jnp.swapaxes(keys, 1, 2)
        keys = keys if how.rope is None else how.rope.rotate_slots(keys, slots)
        part = softmax.empty(1, n_q, values.shape[2])
        for (k, v), visible in (((keys, values), there), (_own_tile(qkv), sees)):
            s = softmax.latent_scores(v, q[None], k, group.score_scale, group.soft_cap)
            part = softmax.add_tile(part, s, v, jnp.broadcast_to(visible, s.shape))
        return softmax.finish(part, sinks)[0][0]

    tokens = jnp.arange(n_tokens, dtype=jnp.int32)
    parts = chosen[:, :n_listed], chosen[:, n_listed:]
    out = lax.map(one, (tokens, qkv.q.astype(jnp.float32), *parts))
    return out.astype(qkv.q.dtype)
