"""What a step's tokens may look at: their own positions and owners, and a list of blocks."""

import dataclasses

import jax
import jax.numpy as jnp

from kvrt.arrays import AnyArray, Bool, Int32, UInt32, state
from kvrt.cells import mask
from kvrt.config import MaskSpec
from kvrt.store.shards import Shards


@state
class View:
    """Metadata of one step, shared by all layers.

    Padding tokens have position -1 and no owner. Only the first n_blocks entries of `blocks` are
    read; the rest may hold anything in range. `own` says whether the tokens see themselves and
    each other, None is yes; `shards` that lists and cells are divided, see `attention.sharded`.
    """

    pos: Int32[AnyArray, " T"]
    bits: UInt32[AnyArray, "T W"]
    blocks: Int32[AnyArray, " N"]
    n_blocks: Int32[AnyArray, ""]
    cell_pos: Int32[AnyArray, "N B"]
    cell_seqs: UInt32[AnyArray, "N B W"]
    own: Bool[AnyArray, ""] | None = None
    shards: Shards | None = dataclasses.field(default=None, metadata=dict(static=True))


@state
class RowView:
    """Metadata of rows: one token of each of S sequences, which reads blocks of its own.

    Row i reads the first n_blocks[i] entries of tables[i]; the others may hold anything in range.
    A row of padding has position -1, no owner and no blocks. `own` and `shards` as in `View`.
    """

    pos: Int32[AnyArray, " S"]
    bits: UInt32[AnyArray, "S W"]
    tables: Int32[AnyArray, "S M"]
    n_blocks: Int32[AnyArray, " S"]
    cell_pos: Int32[AnyArray, "N B"]
    cell_seqs: UInt32[AnyArray, "N B W"]
    own: Bool[AnyArray, ""] | None = None
    shards: Shards | None = dataclasses.field(default=None, metadata=dict(static=True))


def blocked(
    pos: Int32[AnyArray, " C"], seqs: UInt32[AnyArray, "C W"], n_blocks: int, block_size: int
) -> tuple[Int32[AnyArray, "N B"], UInt32[AnyArray, "N B W"]]:
    """Positions and owners by block; the cells that a part-filled last block lacks are empty."""
    lacking = n_blocks * block_size - pos.shape[0]
    if lacking:
        pos = jnp.pad(pos, (0, lacking), constant_values=-1)
        seqs = jnp.pad(seqs, ((0, lacking), (0, 0)))
    shape = (n_blocks, block_size)
    return pos.reshape(shape), seqs.reshape(*shape, seqs.shape[1])


def sees_cells(
    view: View, k_pos: Int32[AnyArray, " B"], k_seqs: UInt32[AnyArray, "B W"], rule: MaskSpec
) -> Bool[AnyArray, "T B"]:
    """Which of some cells each token sees."""
    return mask.visible(rule, k_pos, k_seqs, view.pos, view.bits)


def row_sees(
    view: RowView, k_pos: Int32[AnyArray, "S B"], k_seqs: UInt32[AnyArray, "S B W"], rule: MaskSpec
) -> Bool[AnyArray, "S B"]:
    """Which of its own cells each row sees."""

    def one(k_pos: AnyArray, k_seqs: AnyArray, pos: AnyArray, bits: AnyArray) -> AnyArray:
        return mask.visible(rule, k_pos, k_seqs, pos[None], bits[None])[0]

    return jax.vmap(one)(k_pos, k_seqs, jnp.asarray(view.pos), jnp.asarray(view.bits))


def sees_own(view: View, rule: MaskSpec) -> Bool[AnyArray, "T T"]:
    """Which tokens of the step each token sees."""
    sees = mask.visible(rule, view.pos, view.bits, view.pos, view.bits)
    return sees if view.own is None else sees & view.own


def row_sees_own(view: RowView) -> Bool[AnyArray, " S"]:
    """Which rows see their own token."""
    sees = jnp.asarray(view.pos) >= 0
    return sees if view.own is None else sees & view.own
