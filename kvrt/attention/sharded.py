"""Attention where devices divide the cache: each over its own blocks, then one softmax of all.

Heads are independent. Blocks are not: each device gives its output and the log-sum-exp of what
it saw, and their weighted sum is the whole. The step's own tokens and the sinks are seen by the
first shard of the cells alone.

Source: arXiv:2311.01282, sec. 3 (partial softmax, as over splits of one device).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Float
from kvrt.attention.softmax import MASKED
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import AnyView
from kvrt.store.shards import CELLS, Shards


def attend(
    on_one: Callable[..., tuple[Array, Array]],
    qkv: TokenQKV,
    kv: LayerKV,
    view: AnyView,
    how: LayerAttention,
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """Attention over a divided view by `on_one`, which takes what one device has of the four."""
    shards = view.shards
    assert shards is not None, "a view that is not divided"

    def on_device(
        qkv: TokenQKV, kv: LayerKV, view: Any, how: LayerAttention
    ) -> tuple[Array, Array]:
        first = shards.is_first()
        if how.sinks is not None:
            sinks = jnp.where(first, how.sinks.astype(jnp.float32), MASKED)
            how = dataclasses.replace(how, sinks=sinks)
        own = first if view.own is None else first & view.own
        view = dataclasses.replace(view.of_device(), own=own)
        return _merged(shards, *on_one(qkv, kv, view, how))

    tokens: Any = qkv.specs(shards)
    heads = tokens.q[1]
    specs = tokens, kv.specs(shards), view.specs(), how.specs(heads)
    out, lse = shards.run(on_device, specs, (tokens.q, tokens.q))(qkv, kv, view, how)
    return shards.constrain(out, None, heads), lse


def _merged(shards: Shards, out: Array, lse: Array) -> tuple[Array, Array]:
    """Outputs over disjoint cells as one; a token that sees nothing on any device stays at zero."""
    if shards.n_cells == 1:
        return out, lse
    m = lax.pmax(lse, CELLS)
    weight = jnp.exp(lse - m)
    total = lax.psum(weight, CELLS)
    summed = lax.psum(out.astype(jnp.float32) * weight[:, :, None], CELLS)
    lse = jnp.where(m > MASKED, m + jnp.log(total), MASKED)
    return (summed / total[:, :, None]).astype(out.dtype), lse
