"""Pinned sequences of a cell cache: kept, and evicted by nobody."""

from collections.abc import Container, Hashable
from typing import NamedTuple

import numpy as np

from kvrt.arrays import Bool
from kvrt.cellcache.checkpoint.checkpoints import Checkpoint
from kvrt.cellcache.indexed_group import IndexedGroup
from kvrt.cells import owned


class PinHandle(NamedTuple):
    """A pin, and how many sequences' windows and states it keeps: none where a checkpoint does."""

    number: int
    n_seqs: int


class CellPins:
    """Which kept sequences pins hold, by handle, and the checkpoints that they end at."""

    def __init__(self) -> None:
        """Nothing is pinned."""
        self._held: dict[PinHandle, tuple[int, Checkpoint | None]] = {}
        self._n_made = 0

    def __len__(self) -> int:
        """Pins."""
        return len(self._held)

    @property
    def seq_ids(self) -> set[int]:
        """Numbers of the sequences."""
        return {seq_id for seq_id, _ in self._held.values()}

    @property
    def n_seqs(self) -> int:
        """Sequences whose windows and states are kept."""
        return sum(x.n_seqs for x in self._held)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """Those that are not to be evicted, each once."""
        return tuple({id(x): x for _, x in self._held.values() if x is not None}.values())

    def cells(self, group: IndexedGroup) -> Bool[np.ndarray, " C"]:
        """Which cells of a group they have."""
        held = np.zeros(len(group.cells.pos), bool)
        for seq_id in self.seq_ids:
            held |= np.asarray(owned(group.cells, seq_id))
        return held

    def add(self, seq_id: int, n_seqs: int, checkpoint: Checkpoint | None) -> PinHandle:
        """Pins a sequence."""
        self._n_made += 1
        handle = PinHandle(self._n_made, n_seqs)
        self._held[handle] = seq_id, checkpoint
        return handle

    def remove(self, handle: Hashable) -> tuple[int | None, int]:
        """Unpins a sequence: its number, None where it has gone; and `PinHandle.n_seqs`."""
        assert isinstance(handle, PinHandle), "from `add`"
        return self._held.pop(handle, (None, None))[0], handle.n_seqs

    def forget(self, seq_ids: Container[int]) -> None:
        """Some sequences have gone, for they were damaged."""
        self._held = {h: x for h, x in self._held.items() if x[0] not in seq_ids}
