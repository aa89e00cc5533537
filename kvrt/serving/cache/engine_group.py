"""A group of cells of an engine: sequences that grow together have home blocks."""

from collections.abc import Mapping

import numpy as np

from kvrt.cellcache.group import FoundSlots
from kvrt.cellcache.indexed_group import IndexedGroup
from kvrt.cells import blocks_of
from kvrt.cells.homes import Ends, n_blocks_wanted, no_homes, plan_home_slots
from kvrt.config import CacheConfig, GroupSpec


class EngineGroup(IndexedGroup):
    """An indexed group in which tokens go to the home block of their sequence.

    Where cells of a window are used again, they are found in ring order as in any other cache.
    """

    def __init__(
        self, spec: GroupSpec, config: CacheConfig, n_owners: int, n_pinned: int | None = None
    ):
        """Empty cells; nobody has a home."""
        super().__init__(spec, config, n_owners, n_pinned)
        self._homes: Ends | None = None if self.group.rolls else no_homes(config.n_seq_max)

    def find(self, seq_ids: np.ndarray, first: Mapping[int, int]) -> FoundSlots:
        """See `IndexedGroup`."""
        if self._homes is None:
            return super().find(seq_ids, first)
        size = self.extent.block_size
        slots = plan_home_slots(self.cells, self._homes, seq_ids, size, self._blocks_of)
        return FoundSlots(slots=slots, group=self.group)

    def append(self, found: FoundSlots, pos: np.ndarray, seq_ids: np.ndarray) -> None:
        """See `IndexedGroup`."""
        super().append(found, pos, seq_ids)
        if self._homes is not None:
            self._homes[seq_ids] = found.slots[: len(pos)] + 1

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

    def _blocks_of(self, seq_id: int) -> np.ndarray:
        if self._scans:
            return blocks_of(self.cells, [seq_id], self.extent.block_size)
        return self._index.of(self.cells, [seq_id])
