"""A group of cells with indexes that appends keep up to date, so that no step scans all cells."""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from kvrt.arrays import Int32
from kvrt.cellcache import blocks, window
from kvrt.cellcache import group as groups
from kvrt.cellcache.group import CellGroup, FoundSlots
from kvrt.cells import Cells, blocks_of, owned, place, plan_slots
from kvrt.cells import n_used as count_used
from kvrt.cells.slots import Places, StepTokens, pad, place_one
from kvrt.config import MAX_POS, GroupSpec
from kvrt.options.cache import CacheConfig
from kvrt.sizes import Extent, extent
from kvrt.upkeep import shift


class IndexedGroup:
    """The cells of a group, with the end of each sequence and the blocks that it has cells in.

    Attributes:
      extent: cells and blocks of the group.
      group: the cells.
      n_used: cells in use.
      stale: whether the device's copy of the cells is out of date.
      pending: whether keys await their K-shift.
    """

    def __init__(self, spec: GroupSpec, config: CacheConfig, n_pinned: int | None = None):
        """Empty cells; `n_pinned` as in `CellGroup`."""
        self.extent: Extent = extent(spec, config, n_pinned or 0)
        self.group = groups.open_group(self.extent, spec.mask, config.n_seq_max, n_pinned)
        self.n_used = 0
        self.stale = self.pending = False
        self._unrotated = config.rope == "read"
        # A window says which blocks are read: the same ones, in the same order, whether its cells
        # are used again or all of them are kept, and as in paged mode.
        of_window = spec.mask.kind in ("window", "chunked") and not spec.mask.n_sink
        self._scans = self.group.rolls or of_window
        self._index = BlockIndex(self.extent)
        self._starts = np.arange(0, self.extent.n_cells, self.extent.block_size)
        self._pos_max: dict[int, int] = {}

    @property
    def cells(self) -> Cells:
        """Positions and owners."""
        return self.group.cells

    def replace(self, group: CellGroup) -> None:
        """Replaces the cells; keys stored unrotated have nothing pending."""
        if group.cells is self.cells and group.lost is self.group.lost:
            self.group = group
            return
        if group.cells.delta is not self.cells.delta:
            self.pending = not self._unrotated and bool(group.cells.delta.any())
        self.group = _settled(group) if self._unrotated else group
        self.n_used = int(count_used(group.cells))
        self.stale = True
        self._index.reset()
        self._pos_max.clear()

    def settle(self) -> None:
        """Takes note that the device has rotated all keys."""
        self.group, self.pending = _settled(self.group), False

    def find(self, seq_ids: np.ndarray, first: Mapping[int, int]) -> FoundSlots:
        """Cells for new tokens, the first of each sequence at `first`; raises CacheFull."""
        group, n = self.group, len(seq_ids)
        if group.blocks is not None:
            return groups.find_in_blocks(group, seq_ids, first)
        if group.rolls:
            return groups.find(group, n, first, self.n_used)
        slots = plan_slots(group.cells, group.head, n, n_used=self.n_used)
        return FoundSlots(slots=slots, group=group)

    @property
    def n_free(self) -> int:
        """Tokens of sequences in cells that there is room for."""
        if self.group.blocks is None:
            return len(self.group.cells.pos) - self.n_used
        return groups.n_unreserved(self.group, self.n_used)

    def n_fit(self, seq_id: int) -> int:
        """Tokens that there is room for at the end of a sequence."""
        in_blocks = self.group.blocks
        if in_blocks is None or seq_id not in in_blocks.seqs:
            return self.n_free
        return blocks.n_room(self.cells, in_blocks, seq_id, self.pos_max(seq_id) + 1)

    def append(self, found: FoundSlots, pos: np.ndarray, seq_ids: np.ndarray) -> None:
        """Places tokens that a step has written, as the step did in the device's cells."""
        slots = found.slots[: len(pos)]
        if found.group is not self.group:
            # The device's copy still has cells that were released for these tokens.
            self.stale = True
            self.group = found.group
            self.n_used = int(count_used(self.cells))
        if len(slots) == 1:
            self._append_one(int(slots[0]), int(pos[0]), int(seq_ids[0]))
        else:
            self._append_many(slots, pos, seq_ids)

    def _append_many(self, slots: np.ndarray, pos: np.ndarray, seq_ids: np.ndarray) -> None:
        cells = place(self.group.cells, slots, pos, seq_ids)
        head = int(slots[-1]) + 1 if len(slots) else self.group.head
        self.group = dataclasses.replace(self.group, cells=cells, head=head)
        self.n_used += len(slots)
        seqs = dict.fromkeys(seq_ids.tolist())
        for s in seqs:
            mine = seq_ids == s if len(seqs) > 1 else slice(None)
            if not self._scans:
                self._index.add(s, slots[mine])
            # The group has the tokens by now, so that pos_max may be computed from it.
            self._pos_max[s] = max(self.pos_max(s), int(pos[mine].max()))

    def _append_one(self, slot: int, pos: int, seq_id: int) -> None:
        cells = place_one(self.group.cells, slot, pos, seq_id)
        self.group = dataclasses.replace(self.group, cells=cells, head=slot + 1)
        self.n_used += 1
        if not self._scans:
            self._index.add_one(seq_id, slot)
        self._pos_max[seq_id] = max(self.pos_max(seq_id), pos)

    def first_beyond(self, seq_id: int, n: int, unit: int) -> int:
        """The least position of a sequence in one unit of cells more than n, or MAX_POS."""
        pos = np.where(owned(self.cells, seq_id), self.cells.pos, MAX_POS)
        pos = np.pad(pos, (0, -len(pos) % unit), constant_values=MAX_POS)
        firsts = pos.reshape(-1, unit).min(axis=1)
        return int(np.partition(firsts, n)[n]) if n < len(firsts) else MAX_POS

    def by_position(self, seq_id: int) -> Int32[np.ndarray, " n"]:
        """The cells of a sequence, by their positions."""
        mine = np.flatnonzero(owned(self.cells, seq_id)).astype(np.int32)
        return mine[np.argsort(self.cells.pos[mine])]

    def pos_max(self, seq_id: int) -> int:
        """The position before the next token of a sequence, -1 if it is empty."""
        if seq_id not in self._pos_max:
            self._pos_max[seq_id] = groups.n_past(self.group, seq_id) - 1
        return self._pos_max[seq_id]

    def places(self, slots: np.ndarray, step: StepTokens) -> Places:
        """Slots of a step's tokens, and the blocks that they read."""
        own = slots if step.cached_early else slots[:0]
        if self._scans:
            blocks, n_blocks = self._padded_scan(step.first, own)
        else:
            if len(own):
                self._index.add_early(self.cells, step.first, own)
            blocks, n_blocks = self._index.padded(self.group.cells, step.first)
        slots = step.spread(slots, self.extent.n_slots)
        return Places(slots=slots, blocks=blocks, n_blocks=n_blocks)

    def _padded_scan(
        self, first: Mapping[int, int], slots: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The blocks that `_scanned` finds and those of some slots, padded, and how many."""
        visible = self._scanned(first)
        if len(slots):
            visible = np.union1d(visible, slots // self.extent.block_size)
        return pad(visible, self.extent.n_blocks, 0), np.asarray(len(visible), np.int32)

    def _scanned(self, first: Mapping[int, int]) -> np.ndarray:
        """Blocks with a cell that a token from `first` on may see, by their oldest such cell."""
        pos = self.cells.pos
        seen = np.zeros(len(pos), bool)
        for s, start in first.items():
            seen |= owned(self.cells, s) & (pos >= window.horizon(self.group.mask, start))
        oldest = np.where(seen, pos, np.int32(MAX_POS))
        oldest = np.minimum.reduceat(oldest, self._starts)
        # A block without a cell that is seen comes last.
        n_found = int(np.count_nonzero(oldest < MAX_POS))
        return oldest.argsort(kind="stable")[:n_found]


class BlockIndex:
    """Which blocks hold a cell of which sequence, kept up to date by appends.

    A scan of all cells costs as much as the rest of a step's plan. Appends only add blocks to a
    sequence; any other change of the cells resets the index.
    """

    def __init__(self, extent: Extent):
        """An empty index, in which sequences are scanned for on first use."""
        self._extent = extent
        self._of: dict[int, set[int]] = {}
        self._lists: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def reset(self) -> None:
        """Empties the index, after a change that is no append."""
        self._of.clear()
        self._lists.clear()

    def add(self, seq_id: int, slots: np.ndarray) -> None:
        """Adds the blocks of new cells of a sequence."""
        known = self._of.get(seq_id)
        new = set((slots // self._extent.block_size).tolist())
        if known is not None and not new <= known:
            known |= new
            self._lists.clear()

    def add_early(self, cells: Cells, seq_ids: Iterable[int], slots: np.ndarray) -> None:
        """Adds the blocks of cells that sequences will have, in a step that reads them before."""
        self.padded(cells, seq_ids)
        for s in seq_ids:
            self.add(s, slots)

    def add_one(self, seq_id: int, slot: int) -> None:
        """Adds the block of one new cell."""
        known, new = self._of.get(seq_id), slot // self._extent.block_size
        if known is not None and new not in known:
            known.add(new)
            self._lists.clear()

    def padded(self, cells: Cells, seq_ids: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ascending blocks of the sequences, padded to all blocks, and how many they are."""
        key = tuple(sorted(set(seq_ids)))
        if key not in self._lists:
            for s in set(key) - self._of.keys():
                self._of[s] = set(_blocks(cells, s, self._extent))
            found = sorted(set().union(*(self._of[s] for s in key)))
            self._lists[key] = (
                pad(found, self._extent.n_blocks, 0),
                np.asarray(len(found), np.int32),
            )
        return self._lists[key]


def _blocks(cells: Cells, seq_id: int, extent: Extent) -> list[int]:
    return blocks_of(cells, [seq_id], extent.block_size).tolist()


def _settled(group: CellGroup) -> CellGroup:
    return dataclasses.replace(group, cells=shift.settle(group.cells))
