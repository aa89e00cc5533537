"""Views: what a step's tokens may see, by position and owner, and the block lists they read."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kvrt.arrays import AnyArray, Array, Bool, Int32, UInt32, state
from kvrt.cells import mask
from kvrt.cells.slots import SharedBlocks
from kvrt.config import MaskSpec
from kvrt.store.shards import CELLS, Shards

ViewT = TypeVar("ViewT", bound="View")


@state
class View:
    """What both kinds of view have; all layers of a group share one.

    Padding tokens have position -1 and no owner. Only the first n_blocks entries of a block list
    are read; the rest may hold anything in range.

    Attributes:
      pos: positions of the tokens. `[T]`
      bits: their owners, as bits. `[T, W]`
      blocks: block lists, see the subclasses.
      n_blocks: how many entries of each list are read.
      cell_pos: positions of all cells of the cache. `[N, B]`
      cell_seqs: their owners. `[N, B, W]`
      own: whether the tokens see themselves and each other; None is yes.
      shards: the devices that divide the cells, each with block lists of its own (`shard_view`).
    """

    pos: Int32[AnyArray, " T"]
    bits: UInt32[AnyArray, "T W"]
    blocks: Int32[AnyArray, "*S M"]
    n_blocks: Int32[AnyArray, "*S"]
    cell_pos: Int32[AnyArray, "N B"]
    cell_seqs: UInt32[AnyArray, "N B W"]
    own: Bool[AnyArray, ""] | None = None
    shards: Shards | None = dataclasses.field(default=None, metadata=dict(static=True))

    @property
    def n_tokens(self) -> int:
        """How many tokens attend."""
        return self.pos.shape[0]

    @property
    def block_size(self) -> int:
        """Cells of a block."""
        return self.cell_pos.shape[1]

    def specs(self: ViewT) -> ViewT:
        """How a divided view lies on a mesh: tokens on every device, cells and lists divided."""
        new: dict[str, Any] = {"pos": P(), "bits": P(), "own": None if self.own is None else P()}
        new |= dict.fromkeys(("blocks", "n_blocks", "cell_pos", "cell_seqs"), P(CELLS))
        return dataclasses.replace(self, **new)

    def of_device(self: ViewT) -> ViewT:
        """Inside `Shards.run`: a divided view as one device has it."""
        blocks, n = self.blocks[0], self.n_blocks[0]
        return dataclasses.replace(self, blocks=blocks, n_blocks=n, shards=None)


@state
class BlockView(View):
    """All tokens read one list: blocks `[M]`, and n_blocks is a scalar."""

    def sees(
        self, k_pos: Int32[AnyArray, " B"], k_seqs: UInt32[AnyArray, "B W"], rule: MaskSpec
    ) -> Bool[AnyArray, "T B"]:
        """Which of some cells each token sees."""
        return mask.visible(rule, k_pos, k_seqs, self.pos, self.bits)

    def sees_own(self, rule: MaskSpec) -> Bool[AnyArray, "T T"]:
        """Which tokens of the step each token sees."""
        found = self.sees(self.pos, self.bits, rule)
        return found if self.own is None else found & self.own


@state
class SeqView(View):
    """Each token is of another sequence and reads a list of its own: blocks `[T, M]`.

    Token i reads the first n_blocks[i] entries of blocks[i]; a token of padding reads none. A
    prefix that several lists share may be in `shared` instead, and is read once for all of them.
    """

    shared: SharedBlocks | None = None

    def run(self, i: Int32[Array, ""], width: int) -> BlockView:
        """What the first `width` members of run i of `shared` see of it, padding among them."""
        assert self.shared is not None, "a view that shares blocks"
        at = self.shared.members[i, :width]
        return BlockView(
            pos=jnp.asarray(self.pos).at[at].get(mode="fill", fill_value=-1),
            bits=jnp.asarray(self.bits).at[at].get(mode="fill", fill_value=0),
            blocks=self.shared.tables[i],
            n_blocks=self.shared.n_blocks[i],
            cell_pos=self.cell_pos,
            cell_seqs=self.cell_seqs,
        )

    def specs(self) -> "SeqView":
        """As of any view; runs are divided as lists are."""
        found: Any = View.specs(self)
        if self.shared is None:
            return found
        new: dict[str, Any] = {"tables": P(CELLS), "n_blocks": P(CELLS), "members": P()}
        return dataclasses.replace(found, shared=dataclasses.replace(self.shared, **new))

    def of_device(self) -> "SeqView":
        """As of any view."""
        found: Any = View.of_device(self)
        shared = self.shared
        if shared is None:
            return found
        tables, n = shared.tables[0], shared.n_blocks[0]
        return dataclasses.replace(
            found, shared=dataclasses.replace(shared, tables=tables, n_blocks=n)
        )

    def sees(
        self, k_pos: Int32[AnyArray, "T B"], k_seqs: UInt32[AnyArray, "T B W"], rule: MaskSpec
    ) -> Bool[AnyArray, "T B"]:
        """Which of its own cells each token sees."""

        def one(k_pos: AnyArray, k_seqs: AnyArray, pos: AnyArray, bits: AnyArray) -> AnyArray:
            return mask.visible(rule, k_pos, k_seqs, pos[None], bits[None])[0]

        return jax.vmap(one)(k_pos, k_seqs, jnp.asarray(self.pos), jnp.asarray(self.bits))

    def sees_own(self) -> Bool[AnyArray, " T"]:
        """Which tokens see themselves; they see no other of the step."""
        found = jnp.asarray(self.pos) >= 0
        return found if self.own is None else found & self.own


AnyView = BlockView | SeqView


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


def shard_view(shards: Shards, view: ViewT) -> ViewT:
    """A view whose lists name, for each shard, the blocks that it holds by their numbers there.

    Made once a step and group; lists get a leading axis for the shards of the cells.
    """
    size = view.cell_pos.shape[0] // shards.n_cells

    def on_one(ids: Array, n: Array) -> tuple[Array, Array]:
        ids, n = shards.listed(ids, n, size)
        return ids[None], n[None]

    run = shards.run(on_one, (P(), P()), (P(CELLS), P(CELLS)))
    blocks, n_blocks = run(view.blocks, view.n_blocks)
    found = dataclasses.replace(view, blocks=blocks, n_blocks=n_blocks, shards=shards)
    if isinstance(found, SeqView) and (shared := found.shared) is not None:
        tables, n = run(shared.tables, shared.n_blocks)
        shared = dataclasses.replace(shared, tables=tables, n_blocks=n)
        return dataclasses.replace(found, shared=shared)
    return found


def by_block(f: Callable[[Any], Any], view: View) -> Any:
    """What f makes of a view, as arrays with an entry for each block; on each device if divided."""
    if view.shards is None:
        return f(view)
    run = view.shards.run(lambda x: f(x.of_device()), (view.specs(),), P(CELLS))
    return run(view)
