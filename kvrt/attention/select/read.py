"""Attention over the units that were chosen, and over each token itself, as one softmax."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Float, state
from kvrt.attention import softmax
from kvrt.attention.select.choose import UnitView, choose_units
from kvrt.attention.select.labels import LabelArray, gather_units
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import AnyView, SeqView
from kvrt.options.select import DoubleSparsity, Select
from kvrt.store.codec import decode

Arguments = tuple[TokenQKV, LayerKV, AnyView, LayerAttention]


@state
class Selection:
    """What a layer's tokens choose by: its labels, and the units that they see."""

    labels: LabelArray
    units: UnitView


def attend_chosen(
    args: Arguments,
    chosen_by: Selection,
    select: Select,
    layer: int,
    dense: Callable[..., tuple[Array, Array]],
) -> Float[Array, "T Q D"]:
    """Output for one token of each of T sequences; those that fit the budget read densely.

    Args:
      args: of `kvrt.attention.attend`.
      chosen_by: labels and units.
      select: how units are chosen.
      layer: whose channels.
      dense: `kvrt.attention.attend`.
    """

    def all_cells() -> Array:
        return dense(*args)[0]

    def some_cells() -> Array:
        qkv, how = args[0], args[3]
        q = _by_head(qkv.q, qkv.k.shape[1])
        labels = chosen_by.labels
        if how.rope is not None and isinstance(select, DoubleSparsity):
            labels = how.rope.rotate_channels(decode(labels, -2), select.channels[layer])
        found = choose_units(select, layer, q, labels, chosen_by.units, how.group)
        return over_units(args, q, found, chosen_by.units)

    return lax.cond(chosen_by.units.fits, all_cells, some_cells)


def over_units(
    args: Arguments, q: Float[Array, "H T G D"], found: Array, units: UnitView
) -> Float[Array, "T Q D"]:
    """Exact attention of each token over the units `found` [H, T, K] and over itself."""
    qkv, kv, view, how = args
    (n_heads, n_tokens, n_group, d), group = q.shape, how.group
    unit, n_lanes = units.cells.shape[2], n_heads * n_tokens
    keys = decode(gather_units(kv.k, found, unit, 3), -2)
    if how.rope is not None:
        keys = how.rope.rotate_units(keys, found)
    values = decode(gather_units(kv.v, found, unit, 2), -1)
    visible = units.cells[jnp.arange(n_tokens, dtype=jnp.int32)[None, :, None], found]
    s = jnp.einsum("htgd,htkdb->htgkb", q, keys) * jnp.float32(group.score_scale)
    s = softmax.capped(s, group.soft_cap).reshape(n_lanes, n_group, -1)

    def own(x: Array) -> Array:
        return jnp.moveaxis(x.astype(jnp.float32), 1, 0).reshape(n_lanes, -1)

    itself = view.sees_own() if isinstance(view, SeqView) else view.sees_own(group.mask)[0]
    own_s = softmax.scores(
        q.reshape(n_lanes, n_group, d), own(qkv.k)[:, :, None], group.score_scale, group.soft_cap
    )
    sees_own = jnp.tile(itself, n_heads)[:, None, None]
    part = softmax.of_one(own_s, own(qkv.v)[:, None], sees_own)
    values = values.reshape(n_lanes, -1, values.shape[-1])
    part = softmax.add_tile(part, s, values, visible.reshape(n_lanes, 1, -1))
    sinks = how.sinks
    if sinks is not None:
        by_head = sinks.astype(jnp.float32).reshape(n_heads, 1, n_group)
        sinks = jnp.broadcast_to(by_head, (n_heads, n_tokens, n_group)).reshape(n_lanes, n_group)
    out, _ = softmax.finish(part, sinks)
    out = jnp.moveaxis(out.reshape(n_heads, n_tokens, n_group, -1), 0, 1)
    return out.reshape(n_tokens, n_heads * n_group, -1).astype(qkv.q.dtype)


def _by_head(q: Float[Array, "T Q D"], n_heads: int) -> Float[Array, "H T G D"]:
    """Queries by kv head."""
    n_tokens, n_q, d = q.shape
    q = q.astype(jnp.float32).reshape(n_tokens, n_heads, n_q // n_heads, d)
    return jnp.moveaxis(q, 1, 0)


# Layers of one group are traced once.
jitted = jax.jit(attend_chosen, static_argnums=(2, 3, 4))
