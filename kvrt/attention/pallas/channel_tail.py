"""Keys by channel for a kernel: what is quantized, and the float16 tail as blocks of its own.

A kernel reads the tail as plain keys, in blocks of as many cells as share a scale; where it reads
quantized keys the cells of these groups are empty. A list has what is in the tail of its own
blocks. Blocks that several lists begin with are whole, and so no part of them is in the tail: see
`kvrt.store.runs.channel_runs`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Int32
from kvrt.attention.rope import RopeTables
from kvrt.attention.types import LayerAttention, LayerKV
from kvrt.attention.view import SeqView, View, ViewT
from kvrt.store.per_channel import PerChannel


def without_tail(kv: LayerKV, keys: PerChannel, view: ViewT) -> tuple[LayerKV, ViewT]:
    """The quantized keys, and a view to which the cells of the tail are empty."""
    shape, n = view.cell_pos.shape, keys.n_cells
    in_tail = _in_tail(keys)[:, :, None]
    pos = view.cell_pos.reshape(shape[0], -1, n)
    hidden = jnp.where(in_tail, -1, pos).reshape(shape)
    return dataclasses.replace(kv, k=keys.quantized), dataclasses.replace(view, cell_pos=hidden)


def tail_part(
    kv: LayerKV, keys: PerChannel, view: ViewT, how: LayerAttention
) -> tuple[LayerKV, ViewT, LayerAttention]:
    """The same of the tail, a block for each place: those of the blocks that a list has."""
    places, n_places = _listed(keys, view)
    pos, seqs = (_of_groups(keys, x, 1) for x in (view.cell_pos, view.cell_seqs))
    found = dataclasses.replace(
        view,
        cell_pos=jnp.where(jnp.asarray(keys.group)[:, None] >= 0, pos, -1),
        cell_seqs=seqs,
        blocks=places,
        n_blocks=n_places,
    )
    if isinstance(found, SeqView):
        found = dataclasses.replace(found, shared=None)
    grouped = how.grouped and dataclasses.replace(how.grouped, rope=_tables(keys, how.grouped.rope))
    values = jax.tree.map(lambda x: _of_groups(keys, x, 2), kv.v)
    return (
        LayerKV(k=jnp.asarray(keys.tail), v=values),
        found,
        dataclasses.replace(how, rope=how.rope and _tables(keys, how.rope), grouped=grouped),
    )


def _in_tail(keys: PerChannel) -> Bool[Array, "N n"]:
    """Which groups of each block have a place."""
    n_blocks, _, _, n = keys.quantized.scale.shape
    group = jnp.where(jnp.asarray(keys.group) < 0, n_blocks * n, keys.group)
    held = jnp.zeros(n_blocks * n, bool).at[group].set(True, mode="drop")
    return held.reshape(n_blocks, n)


def _listed(keys: PerChannel, view: View) -> tuple[Int32[Array, "*S P"], Int32[Array, "*S"]]:
    """Places whose blocks are among the first n of each list, side by side, and how many."""
    group, blocks = jnp.asarray(keys.group), jnp.asarray(view.blocks)
    block = jnp.where(group < 0, -1, group // keys.quantized.scale.shape[3])
    nth = lax.broadcasted_iota(jnp.int32, blocks.shape, blocks.ndim - 1)
    read = jnp.where(nth < jnp.asarray(view.n_blocks)[..., None], blocks, -2)[..., None, :]
    mine = jnp.any(read == block.reshape(*[1] * (blocks.ndim - 1), -1, 1), axis=-1)
    order = jnp.argsort(~mine, axis=-1, stable=True).astype(jnp.int32)
    return order, jnp.sum(mine, axis=-1, dtype=jnp.int32)


def _of_groups(keys: PerChannel, x: AnyArray, axis: int) -> Array:
    """The groups of the tail of an array [N, ...] with cells at `axis`; any for an empty place."""
    n = keys.quantized.scale.shape[3]
    group = jnp.maximum(jnp.asarray(keys.group), 0)
    some = jnp.asarray(x)[group // n]
    parted = some.reshape(*some.shape[:axis], n, keys.n_cells, *some.shape[axis + 1 :])
    return jnp.moveaxis(parted, axis, 1)[jnp.arange(len(group)), group % n]


def _tables(keys: PerChannel, tables: RopeTables) -> RopeTables:
    if tables.cells is None:
        return tables
    cos, sin = (_of_groups(keys, x, 2) for x in tables.cells)
    return dataclasses.replace(tables, cell_cos=cos, cell_sin=sin)
