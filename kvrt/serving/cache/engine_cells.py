"""The host side of an engine's cells: sequences that grow together have home blocks.

Hundreds of them get a token in each step, so what a step asks for and changes is arrays by sequence
number, and cells are changed in place: contents that were taken before a step are not those before
it any more.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvrt.arrays import Int32
from kvrt.cellcache import group as groups
from kvrt.cellcache.group import CellGroup, FoundSlots
from kvrt.cellcache.host_cells import HostCells
from kvrt.cellcache.indexed_group import IndexedGroup
from kvrt.cells import blocks_of
from kvrt.cells.cells import mask_words
from kvrt.cells.homes import Ends, n_blocks_wanted, no_homes, plan_home_slots
from kvrt.cells.slots import Places, SeqBlocks, StepTokens, pad
from kvrt.config import GroupSpec
from kvrt.options.cache import CacheConfig

# Sequences whose blocks are looked up one by one, rather than those of all at once.
_FEW = 4
_UNKNOWN = -2  # of a sequence's end, which is looked up when it is asked for


class EngineGroup(IndexedGroup):
    """An indexed group in which tokens go to the home block of their sequence.

    Where cells of a window are used again, they are found in ring order as in any other cache.
    """

    def __init__(
        self, spec: GroupSpec, config: CacheConfig, n_owners: int, n_pinned: int | None = None
    ):
        """Empty cells; nobody has a home."""
        super().__init__(spec, config, n_owners, n_pinned)
        n = config.n_seq_max
        self._homes: Ends | None = None if self.group.rolls else no_homes(n)
        self._newest = np.full(n_owners, _UNKNOWN, np.int32)
        # Of sequences that may have tokens: their blocks, if they are known, and the newest one.
        self._tables = np.zeros((n, self.extent.n_blocks), np.int32)
        self._n_blocks, self._known = np.zeros(n, np.int32), np.zeros(n, bool)
        self._last = np.full(n, -1, np.int32)

    def replace(self, group: CellGroup) -> None:
        """See `IndexedGroup`."""
        changed = group.cells is not self.cells or group.lost is not self.group.lost
        super().replace(group)
        if changed:
            self._newest[:], self._known[:], self._last[:] = _UNKNOWN, False, -1

    # --- homes ---------------------------------------------------------------------------------

    def find(self, seq_ids: np.ndarray, first: Mapping[int, int]) -> FoundSlots:
        """See `IndexedGroup`."""
        if self._homes is None:
            return super().find(seq_ids, first)
        size = self.extent.block_size
        slots = plan_home_slots(self.cells, self._homes, seq_ids, size, self._blocks_of)
        return FoundSlots(slots=slots, group=self.group)

    def leave_home(self, seq_id: int) -> None:
        """A sequence ended: whoever gets its number begins without a home."""
        if self._homes is not None:
            self._homes[seq_id] = -1

    def n_cells_wanted(self, seq_ids: np.ndarray) -> int:
        """Cells of the blocks that new tokens would begin, beyond blocks without a token."""
        if self._homes is None:
            return 0
        size = self.extent.block_size
        return size * n_blocks_wanted(self.cells, self._homes, seq_ids, size)

    # --- a step's tokens -----------------------------------------------------------------------

    def pos_max(self, seq_id: int) -> int:
        """See `IndexedGroup`."""
        if self._newest[seq_id] == _UNKNOWN:
            self._newest[seq_id] = groups.n_past(self.group, seq_id) - 1
        return int(self._newest[seq_id])

    def seq_blocks(
        self, seq_ids: Int32[np.ndarray, " n"], pos: Int32[np.ndarray, " n"], size: int
    ) -> SeqBlocks:
        """Blocks that each of some sequences reads at its next position, padded to `size`."""
        # What is not read may hold anything in range.
        tables, n_blocks = (
            np.zeros((size, self.extent.n_blocks), np.int32),
            np.zeros(size, np.int32),
        )
        if self._scans:
            for i, (s, start) in enumerate(zip(seq_ids.tolist(), pos.tolist(), strict=True)):
                visible = self._scanned({s: start})
                tables[i, : len(visible)], n_blocks[i] = visible, len(visible)
            return SeqBlocks(tables=tables, n_blocks=n_blocks)
        unknown = seq_ids[~self._known[seq_ids]].tolist()
        if len(unknown) > _FEW:
            self._list_all()
        for s in unknown if len(unknown) <= _FEW else ():
            mine = self._index.of(self.cells, [s])
            self._tables[s, : len(mine)], self._n_blocks[s], self._known[s] = mine, len(mine), True
        n_blocks[: len(seq_ids)] = self._n_blocks[seq_ids]
        width = int(n_blocks.max(initial=0))
        tables[: len(seq_ids), :width] = self._tables[seq_ids, :width]
        return SeqBlocks(tables=tables, n_blocks=n_blocks)

    def places(self, slots: np.ndarray, step: StepTokens) -> Places:
        """See `IndexedGroup`; sequences that decode read the blocks of theirs."""
        n, size = step.n_single, self.extent.block_size
        blocks = self.visible_blocks(step.first_behind)
        blocks = step.read_blocks(blocks, slots, size)
        return Places(
            slots=step.spread(slots, self.extent.n_slots),
            blocks=pad(blocks, self.extent.n_blocks, 0),
            n_blocks=np.asarray(len(blocks), np.int32),
            seq_blocks=self.seq_blocks(step.seq_ids[:n], step.pos[:n], step.n_lists),
        )

    def _list_all(self) -> None:
        """Blocks of all sequences that may have tokens, in one pass over the cells."""
        n, size = len(self._known), self.extent.block_size
        words = self.cells.seqs[:, : mask_words(n)]
        owners = np.bitwise_or.reduceat(words, np.arange(0, len(words), size), axis=0)
        mine = np.unpackbits(owners.astype("<u4").view(np.uint8), axis=1, bitorder="little")
        seqs, blocks = np.nonzero(mine[:, :n].T)
        self._n_blocks = np.bincount(seqs, minlength=n).astype(np.int32)
        starts = np.cumsum(self._n_blocks) - self._n_blocks
        self._tables[seqs, np.arange(len(seqs)) - starts[seqs]] = blocks
        self._known[:] = True

    def _append_one(self, slot: int, pos: int, seq_id: int) -> None:
        self._append_many(*(np.array([x], np.int32) for x in (slot, pos, seq_id)))

    def _append_many(self, slots: np.ndarray, pos: np.ndarray, seq_ids: np.ndarray) -> None:
        if not len(slots):
            return
        cells = self.cells
        cells.pos[slots], cells.seqs[slots] = pos, 0
        bits = np.left_shift(np.uint32(1), (seq_ids & 31).astype(np.uint32))
        cells.seqs[slots, seq_ids >> 5] = bits
        self.n_used += len(slots)
        # Tokens of a sequence come in order, so that the last one of each counts.
        self._newest[seq_ids] = pos
        if self._homes is None:
            self.group = dataclasses.replace(self.group, head=int(slots[-1]) + 1)
        else:
            self._homes[seq_ids] = slots + 1
        if not self._scans:
            self._index_blocks(seq_ids, slots // self.extent.block_size)

    def _index_blocks(self, seq_ids: np.ndarray, blocks: np.ndarray) -> None:
        """New tokens are in some blocks, mostly in those of the tokens before them."""
        new = np.flatnonzero(blocks != self._last[seq_ids])
        if not len(new):
            return
        self._last[seq_ids], self._known[seq_ids[new]] = blocks, False
        pairs = dict.fromkeys(zip(seq_ids[new].tolist(), blocks[new].tolist(), strict=True))
        for seq_id, block in pairs:
            self._index.add_one(seq_id, block * self.extent.block_size)

    def _blocks_of(self, seq_id: int) -> np.ndarray:
        if self._scans:
            return blocks_of(self.cells, [seq_id], self.extent.block_size)
        return self._index.of(self.cells, [seq_id])


class EngineCells(HostCells):
    """The cells of all groups, without a token history: samples and `CellPrefixes` have tokens.

    They are not packed: others read them while some write.
    """

    packs = has_history = False

    def _opened(self, spec: GroupSpec, config: CacheConfig) -> EngineGroup:
        return EngineGroup(spec, config, self._n_owners, self.n_pinned)
