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
from jax.sharding import PartitionSpec as P

from kvrt.arrays import Array, Float
from kvrt.attention.softmax import MASKED
from kvrt.attention.view import RowView, View
from kvrt.store.shards import CELLS, HEADS, TOKENS, Shards


def divided(shards: Shards | None, view: View | RowView) -> View | RowView:
    """A view whose lists name, for each shard, the blocks that it holds by their numbers there.

    Made once a step and group; lists get a leading axis for the shards of the cells.
    """
    if shards is None:
        return view
    lists = view.blocks if isinstance(view, View) else view.tables
    size = view.cell_pos.shape[0] // shards.n_cells

    def own(ids: Array, n: Array) -> tuple[Array, Array]:
        ids, n = shards.listed(ids, n, size)
        return ids[None], n[None]

    run = shards.run(own, (P(), P()), (P(CELLS), P(CELLS)))
    return _with_lists(view, *run(lists, view.n_blocks), shards=shards)


def by_block(f: Callable[[View | RowView], Any], view: View | RowView) -> Any:
    """What f makes of a divided view, as arrays with an entry for each block."""
    assert view.shards is not None, "a view that is not divided"

    def own(view: View | RowView) -> Any:
        return f(_own(view))

    return view.shards.run(own, (_specs(view),), P(CELLS))(view)


def attend(
    on_one: Callable[..., tuple[Array, Array]],
    q: Float[Array, "T Q D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    k_rows: Any,
    v_rows: Any,
    sight: View | RowView,
    turn: Any,
    far: Any,
    sinks: Float[Array, " Q"] | None,
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """Attention over a divided view by `on_one`, which serves the blocks of one device."""
    shards = sight.shards
    assert shards is not None, "a view that is not divided"
    kv = P(None, shards.head_axis(k.shape[1]))
    of_q = P(None, _query_axis(shards, q.shape[1], k.shape[1]))

    def own(
        q: Array, k: Array, v: Array, k_rows: Any, v_rows: Any, sight: Any, *rest: Any
    ) -> tuple[Array, Array]:
        turn, far, sinks = rest
        first = shards.is_first()
        if sinks is not None:
            sinks = jnp.where(first, sinks.astype(jnp.float32), MASKED)
        sight = dataclasses.replace(_own(sight), own=first)
        return _merged(shards, *on_one(q, k, v, k_rows, v_rows, sight, turn, far, sinks))

    cells = shards.layers((k_rows, v_rows))
    rest = _turn_specs(turn), _far_specs(far, of_q, kv), sinks if sinks is None else P(of_q[1])
    specs = of_q, kv, kv, *cells, _specs(sight), *rest
    run = shards.run(own, specs, (of_q, of_q))
    out, lse = run(q, k, v, k_rows, v_rows, sight, turn, far, sinks)
    return by_tokens(shards, out, of_q[1]), lse


def by_tokens(shards: Shards | None, x: Array, *spec: Any) -> Array:
    """X with its tokens divided over the axis of sequences, where they can be."""
    if shards is None:
        return x
    n = shards.mesh.shape[TOKENS]
    return shards.constrain(x, TOKENS if n > 1 and x.shape[0] % n == 0 else None, *spec)


def _merged(shards: Shards, out: Array, lse: Array) -> tuple[Array, Array]:
    """Outputs over disjoint cells as one; a token that nobody let see anything stays at zero."""
    if shards.n_cells == 1:
        return out, lse
    m = lax.pmax(lse, CELLS)
    weight = jnp.exp(lse - m)
    total = lax.psum(weight, CELLS)
    summed = lax.psum(out.astype(jnp.float32) * weight[:, :, None], CELLS)
    lse = jnp.where(m > MASKED, m + jnp.log(total), MASKED)
    return (summed / total[:, :, None]).astype(out.dtype), lse


def _query_axis(shards: Shards, n_q: int, n_kv: int) -> str | None:
    """Query heads go with their kv heads; a single kv head serves whoever has some of them."""
    alone = n_kv == 1 and n_q % shards.n_heads == 0
    return HEADS if alone else shards.head_axis(n_kv)


def _with_lists(view: View | RowView, ids: Any, n: Any, **new: Any) -> Any:
    name = "blocks" if isinstance(view, View) else "tables"
    return dataclasses.replace(view, n_blocks=n, **{name: ids}, **new)


def _own(view: View | RowView) -> View | RowView:
    """The view of one device, inside `run`."""
    ids = view.blocks if isinstance(view, View) else view.tables
    return _with_lists(view, ids[0], view.n_blocks[0], shards=None)


def _specs(view: View | RowView) -> View | RowView:
    cells = P(CELLS)
    new = {"pos": P(), "bits": P(), "cell_pos": cells, "cell_seqs": cells}
    return _with_lists(view, cells, cells, **new)


def _turn_specs(turn: Any) -> Any:
    if turn is None:
        return None
    cells = None if turn.cell_cos is None else P(CELLS)
    return dataclasses.replace(turn, cos=P(), sin=P(), cell_cos=cells, cell_sin=cells)


def _far_specs(far: Any, of_q: P, kv: P) -> Any:
    if far is None:
        return None
    return dataclasses.replace(far, q=of_q, k=kv, turn=_turn_specs(far.turn))
