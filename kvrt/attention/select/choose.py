"""Which units of cells a query reads: by labels, within a budget, sinks and recent ones first."""

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.attention.select.labels import LabelArray
from kvrt.attention.select.threshold import as_ordered, nth_greatest
from kvrt.attention.softmax import MASKED
from kvrt.attention.view import AnyView, SeqView
from kvrt.cells import mask
from kvrt.config import MAX_POS, GroupSpec
from kvrt.options.select import DoubleSparsity, Select
from kvrt.store.codec import decode

# Above every sum of weights, of which there is at most one a query head.
_KEPT = 1e9


@state
class UnitView:
    """What T tokens of a step see of a group's units; all its layers share one.

    Attributes:
      cells: visible cells, by unit. `[T, U, unit]`
      seen: units with one. `[T, U]`
      kept: units with a visible sink or recent cell. `[T, U]`
      order: units by the first position that is visible in them, those not seen last. `[T, U]`
      fits: whether no token sees more units than are chosen.
    """

    cells: Bool[Array, "T U _"]
    seen: Bool[Array, "T U"]
    kept: Bool[Array, "T U"]
    order: Int32[Array, "T U"]
    fits: Bool[Array, ""]


def unit_view(view: AnyView, group: GroupSpec, select: Select) -> UnitView:
    """The units of a step's tokens, by positions and owners of their cells and by block lists."""
    pos = jnp.asarray(view.cell_pos).reshape(-1)
    seqs = jnp.asarray(view.cell_seqs).reshape(pos.shape[0], -1)
    at = jnp.asarray(view.pos)
    visible = mask.visible(group.mask, pos, seqs, at, jnp.asarray(view.bits))
    visible &= jnp.repeat(_listed(view), view.block_size, axis=1)
    near = pos[None] >= at[:, None] - select.n_recent
    kept = visible & ((pos < select.n_sink)[None] | near)

    def by_unit(x: AnyArray) -> Array:
        return jnp.asarray(x).reshape(x.shape[0], -1, select.unit)

    cells, kept = by_unit(visible), jnp.any(by_unit(kept), axis=2)
    seen = jnp.any(cells, axis=2)
    n_seen = jnp.max(jnp.sum(seen.astype(jnp.int32), axis=1))
    first = jnp.min(by_unit(jnp.where(visible, pos, MAX_POS)), axis=2)
    order, fits = jnp.argsort(first, axis=1).astype(jnp.int32), n_seen <= select.n_units
    return UnitView(cells=cells, seen=seen, kept=kept, order=order, fits=fits)


def _listed(view: AnyView) -> Bool[Array, "T N"]:
    """The blocks that each token's list has, those of shared prefixes among them."""
    n_blocks = view.cell_pos.shape[0]
    lists, n = jnp.asarray(view.blocks), jnp.asarray(view.n_blocks)
    if not isinstance(view, SeqView):
        lists, n = lists[None], n[None]
    n_tokens = lists.shape[0]
    found = jnp.zeros((n_tokens, n_blocks), bool)

    def counted(lists: Array, n: Array) -> Array:
        listed = jnp.arange(lists.shape[1], dtype=jnp.int32)[None] < n[:, None]
        return jnp.where(listed, lists, n_blocks)

    rows = jnp.arange(n_tokens, dtype=jnp.int32)[:, None]
    found = found.at[rows, counted(lists, n)].set(True, mode="drop")
    if isinstance(view, SeqView) and (shared := view.shared) is not None:
        tables = counted(jnp.asarray(shared.tables), jnp.asarray(shared.n_blocks))
        members = jnp.asarray(shared.members)
        found = found.at[members[:, :, None], tables[:, None]].set(True, mode="drop")
    return found


def choose_units(
    select: Select,
    layer: int,
    q: Float[Array, "H T G D"],
    labels: LabelArray,
    units: UnitView,
    group: GroupSpec,
) -> Int32[Array, "H T K"]:
    """The units that each token reads of each kv head; those that it does not see come last.

    Of equal ones those of the lower positions, wherever they lie.

    Args:
      select: how.
      layer: whose labels.
      q: queries as they are compared with keys.
      labels: of the layer.
      units: what the tokens see.
      group: of the layer.
    """
    weights = unit_weights(select, layer, q, labels, units, group)
    weights = jnp.where(units.kept[None], _KEPT, weights)
    weights = jnp.where(units.seen[None], weights, MASKED)
    order = jnp.broadcast_to(units.order[None], weights.shape)
    weights, n = jnp.take_along_axis(weights, order, axis=2), min(select.n_units, order.shape[2])
    found = _greatest(weights, n) if select.unit == 1 else lax.top_k(weights, n)[1]
    return jnp.take_along_axis(order, found, axis=2)


def unit_weights(
    select: Select,
    layer: int,
    q: Float[Array, "H T G D"],
    labels: LabelArray,
    units: UnitView,
    group: GroupSpec,
) -> Float[Array, "H T U"]:
    """What a unit counts: softmax of its label scores, summed over the queries of a kv head.

    The logarithm of that: so weights that vanish differ.
    """
    n_heads, n_tokens, n_group, _ = q.shape
    q = q.astype(jnp.float32)
    pooled = isinstance(select, DoubleSparsity)
    if pooled:
        at = jnp.asarray(select.channels[layer], jnp.int32)[:, None, None]
        q = jnp.take_along_axis(q, jnp.broadcast_to(at, (*q.shape[:3], at.shape[-1])), axis=3)
    else:
        # max(q * high, q * low) is q * high where q is positive, q * low where it is not.
        q = jnp.concatenate([jnp.maximum(q, 0.0), jnp.minimum(q, 0.0)], axis=3)
    flat = q.reshape(n_heads, n_tokens * n_group, -1)
    s = lax.dot_general(flat, decode(labels, -2), (((2,), (1,)), ((0,), (0,))))
    s = s.reshape(n_heads, n_tokens, n_group, -1) * jnp.float32(group.score_scale)
    visible = units.cells.reshape(n_tokens, -1) if pooled else units.seen
    # What is no number has to be read, so that the output says so.
    s = jnp.where(jnp.isnan(s), -MASKED, jnp.clip(s, MASKED, -MASKED))
    s = jnp.where(visible[None, :, None], s, MASKED)
    if pooled and select.unit > 1:
        # Before softmax: a sixteenth of the exponentials, and units as good.
        s = jnp.max(s.reshape(*s.shape[:3], -1, select.unit), axis=4)
    return jax.nn.logsumexp(jax.nn.log_softmax(s, axis=3), axis=2)


def _greatest(x: Float[Array, "H T U"], n: int) -> Int32[Array, "H T K"]:
    """Indices of the n greatest, ascending, lower ones first of equals; without a sort."""
    ordered = as_ordered(x)
    low = nth_greatest(ordered, n)
    above, equal = ordered > low[..., None], ordered == low[..., None]
    n_above = jnp.sum(above.astype(jnp.int32), axis=2, keepdims=True)
    rank = jnp.cumsum(equal.astype(jnp.int32), axis=2)
    taken = above | (equal & (rank <= n - n_above))
    at = jnp.where(taken, jnp.cumsum(taken.astype(jnp.int32), axis=2) - 1, n)
    heads, tokens = (jnp.arange(m, dtype=jnp.int32) for m in x.shape[:2])
    index = jnp.broadcast_to(jnp.arange(x.shape[2], dtype=jnp.int32), x.shape)
    found = jnp.zeros((*x.shape[:2], n), jnp.int32)
    return found.at[heads[:, None, None], tokens[:, None], at].set(index, mode="drop")
