"""Positions and owners of the cells of one pool, changed in place: a block at a time.

The device's copy follows by itself where a step writes, and empties blocks that are taken (see
`Places.fresh`). It has to be told of the rest: `stale`. Blocks that nobody holds may lag behind,
for nothing reads them before they are taken or found again.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvrt.arrays import Int32
from kvrt.cells import Cells, apply, create
from kvrt.cells.edits import SeqEdit


class PoolCells:
    """Cells of `n_blocks` blocks.

    Attributes:
      cells: positions and owners.
      stale: whether the device's copy is out of date.
      pending: whether keys await their K-shift.
    """

    def __init__(self, n_blocks: int, block_size: int, n_seq_max: int):
        """All are empty, here and on the device."""
        self.cells: Cells = create(n_blocks * block_size, n_seq_max)
        self.stale = self.pending = False
        self._inside = np.arange(block_size, dtype=np.int32)
        self._fresh: list[int] = []

    def take(self, blocks: Int32[np.ndarray, " n"]) -> None:
        """Blocks were taken that nobody held: they are empty from the next step on."""
        self._fresh += blocks.tolist()

    def adopt(
        self,
        blocks: Int32[np.ndarray, " n"],
        index: Int32[np.ndarray, " n"],
        n_tokens: int,
        seq_id: int,
    ) -> None:
        """A sequence holds blocks, the index-th of its own, that have tokens up to n_tokens."""
        if not len(blocks):
            return
        pos = self._which(index)
        here = pos < n_tokens
        which = self._which(blocks)[here]
        self.cells.pos[which] = pos[here]
        self.cells.seqs[which, seq_id >> 5] |= np.uint32(1 << (seq_id & 31))
        self._fresh = [x for x in self._fresh if x not in set(blocks.tolist())]
        self.stale = True

    def fork(self, of: tuple[np.ndarray, int], to: tuple[np.ndarray, int]) -> None:
        """A sequence that has others' tokens holds blocks: theirs, or copies of those.

        Args:
          of: blocks of the sequence that it began with, and its number.
          to: in the same order its own blocks, and its number.
        """
        (src, mine), (dst, seq_id) = (self._which(of[0]), of[1]), (self._which(to[0]), to[1])
        here = (self.cells.seqs[src, mine >> 5] >> np.uint32(mine & 31)) & np.uint32(1) > 0
        src, dst = src[here], dst[here]
        self.cells.pos[dst], self.cells.delta[dst] = self.cells.pos[src], self.cells.delta[src]
        self.cells.seqs[dst, seq_id >> 5] |= np.uint32(1 << (seq_id & 31))
        self._fresh = [x for x in self._fresh if x not in set(to[0].tolist())]
        self.stale = True

    def leave(self, blocks: Int32[np.ndarray, " n"], seq_id: int) -> None:
        """A sequence releases blocks."""
        if not len(blocks):
            return
        which = self._which(blocks)
        self.cells.seqs[which, seq_id >> 5] &= ~np.uint32(1 << (seq_id & 31))
        left = self.cells.seqs[which].any(axis=1)
        gone = which[~left]
        self.cells.pos[gone] = -1
        if self.pending:
            # Keys that are copied there before the K-shift are not to be rotated by it.
            self.cells.delta[gone], self.stale = 0, True
        # Another sequence lists what is shared, and must not show it to who gets this seq_id next.
        self.stale |= bool(left.any())

    def drop(
        self,
        dropped: Int32[np.ndarray, " n"],
        moved: Int32[np.ndarray, " m"],
        n: int,
        *,
        rotates: bool,
    ) -> None:
        """A sequence dropped the tokens of some cells of its own, and moved others down by n.

        With `rotates` the keys of those await their K-shift: `pending`.
        """
        self.cells.pos[dropped], self.cells.seqs[dropped] = -1, 0
        self.cells.delta[dropped] = 0
        self.cells.pos[moved] -= np.int32(n)
        if rotates:
            self.cells.delta[moved] -= np.int32(n)
            self.pending = True
        self.stale = True

    def move(
        self, slots: Int32[np.ndarray, " n"], edits: Sequence[SeqEdit], *, rotates: bool
    ) -> None:
        """A sequence changed positions of some cells, all its own; `rotates` as in `drop`."""
        old = self.cells.pos[slots]
        mine = Cells(pos=old, delta=np.zeros_like(old), seqs=np.ones((len(old), 1), np.uint32))
        for edit in edits:
            mine = apply(mine, dataclasses.replace(edit, seq_id=0))
        self.cells.pos[slots] = mine.pos
        if rotates:
            self.cells.delta[slots] += mine.delta
            self.pending = True
        self.stale = True

    def settle(self) -> None:
        """The K-shift ran."""
        self.cells.delta[:] = 0
        self.pending = False

    def write(
        self,
        slots: Int32[np.ndarray, " T"],
        pos: Int32[np.ndarray, " T"],
        seq_ids: Int32[np.ndarray, " T"],
    ) -> None:
        """A step wrote tokens, here as on the device."""
        self.cells.pos[slots] = pos
        self.cells.seqs[slots] = 0
        bits = np.left_shift(np.uint32(1), (seq_ids & 31).astype(np.uint32))
        self.cells.seqs[slots, seq_ids >> 5] = bits

    def fresh(self, size: int) -> Int32[np.ndarray, " F"]:
        """Blocks that the next step empties, padded; `stale` is set if they are too many."""
        found, self._fresh = self._fresh, []
        out = np.full(size, len(self.cells.pos) // len(self._inside), np.int32)
        if len(found) > size:
            self.stale = True
            return out
        out[: len(found)] = found
        return out

    def _which(self, blocks: np.ndarray) -> np.ndarray:
        return (blocks[:, None] * np.int32(len(self._inside)) + self._inside).reshape(-1)
