"""Blocks that several sequences begin with, read by a kernel once for all of them.

A run is a block list whose queries are those of its members, so that all runs of a step are the
lists of one call. A sequence may be a member of several runs, and their sums are merged.

Source: Hydragen (arXiv:2402.05099), sec. 3.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Int32
from kvrt.attention import softmax
from kvrt.attention.pallas import common, sides
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import SeqView


def over_shared(
    kernel: common.Kernel, qkv: TokenQKV, kv: LayerKV, view: SeqView, how: LayerAttention
) -> softmax.Partial:
    """Sums over `view.shared`, by token and query head: [T, Q] and [T, Q, D]."""
    shared = view.shared
    assert shared is not None, "a view that shares blocks"
    # As few queries a list as the widest run has members, for a kernel reads it for each tile.
    widest = functools.reduce(
        jnp.maximum, [shared.width(jnp.int32(i)) for i in range(len(shared.tables))]
    )
    branches = [functools.partial(_of_width, kernel, qkv, kv, view, how, n) for n in shared.widths]
    return lax.switch(widest, branches)


def _of_width(
    kernel: common.Kernel,
    qkv: TokenQKV,
    kv: LayerKV,
    view: SeqView,
    how: LayerAttention,
    width: int,
) -> softmax.Partial:
    """The same for runs of so many members at most."""
    shared = view.shared
    assert shared is not None, "a view that shares blocks"
    at = jnp.asarray(shared.members)[:, :width].reshape(-1)

    def taken(x: AnyArray, padding: int = 0) -> Array:
        return jnp.asarray(x).at[at].get(mode="fill", fill_value=padding)

    lists = dataclasses.replace(
        view,
        pos=taken(view.pos, -1),
        bits=taken(view.bits),
        blocks=shared.tables,
        n_blocks=shared.n_blocks,
        shared=None,
    )
    found = sides.sides_of(jax.tree.map(taken, qkv), lists, how)
    work, sums = sides.over_lists(kernel, found, [kv] * len(found), shared.tables, shared.n_blocks)
    return _by_token(common.merged(work, sums), at, view.n_tokens)


def _by_token(part: softmax.Partial, at: Int32[Array, " _"], n_tokens: int) -> softmax.Partial:
    """Sums of each token over all runs that it is a member of; padding lies beyond the last."""
    n_q, d = part.acc.shape[1:]
    none = softmax.empty(n_tokens, n_q, d)
    m = none.m.at[at].max(part.m, mode="drop")
    weight = jnp.exp(part.m - m.at[at].get(mode="fill", fill_value=0))
    return softmax.Partial(
        m=m,
        l=none.l.at[at].add(part.l * weight, mode="drop"),
        acc=none.acc.at[at].add(part.acc * weight[..., None], mode="drop"),
    )
