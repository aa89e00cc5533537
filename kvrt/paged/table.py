"""Block tables as arrays: from rows and positions to slots, and to the blocks that are read."""

from collections.abc import Sequence

import numpy as np

from kvrt.arrays import Int32
from kvrt.paged.spec import NULL


class Tables:
    """The tables of one group, a row a sequence.

    A row begins with its first block that is not null, so that windows stay narrow: entry j of row
    r is block lo[r] + j of its sequence.
    """

    def __init__(self, n_rows: int, n_entries: int, block_size: int):
        """Empty tables.

        Args:
          n_rows: sequences.
          n_entries: blocks, from the first that is not null on, that a sequence has at most.
          block_size: tokens a block.
        """
        self.block_size = block_size
        self._ids = np.zeros((n_rows, n_entries), np.int32)
        self._lo = np.zeros(n_rows, np.int32)
        self._end = np.zeros(n_rows, np.int32)

    def put(self, row: int, table: Sequence[int]) -> Int32[np.ndarray, " n"]:
        """Takes over a table that has grown at its end or become null at its beginning.

        Returns:
          The blocks that slid out.
        """
        old, end = int(self._lo[row]), int(self._end[row])
        lo = old
        while lo < len(table) and table[lo] == NULL:
            lo += 1
        ids = self._ids[row]
        gone = ids[: min(lo, end) - old].copy()
        if lo > old:
            n_kept = max(end - lo, 0)
            ids[:n_kept] = ids[lo - old : lo - old + n_kept].copy()
            self._lo[row], end = lo, max(end, lo)
        ids[end - lo : len(table) - lo] = table[end:]
        self._end[row] = len(table)
        return gone[gone != NULL]

    def clear(self, row: int) -> Int32[np.ndarray, " n"]:
        """Empties a row; the blocks that it had."""
        had = self.held(row)
        self._lo[row] = self._end[row] = 0
        return had

    def held(self, row: int) -> Int32[np.ndarray, " n"]:
        """Blocks of a row."""
        ids = self._ids[row, : self._end[row] - self._lo[row]]
        return ids[ids != NULL]

    def first(self, row: int) -> int:
        """Index in its sequence of a row's first block."""
        return int(self._lo[row])

    def block(self, row: int, index: int) -> int:
        """The block at an index of a row's sequence."""
        return int(self._ids[row, index - self._lo[row]])

    def slots(
        self, rows: Int32[np.ndarray, " T"], pos: Int32[np.ndarray, " T"]
    ) -> Int32[np.ndarray, " T"]:
        """The slot mapping: where the token of each row at each position lies."""
        index, inside = np.divmod(pos, np.int32(self.block_size))
        ids = self._ids[rows, index - self._lo[rows]]
        return ids * np.int32(self.block_size) + inside

    def read(
        self, rows: Int32[np.ndarray, " S"], n_tokens: Int32[np.ndarray, " S"], size: int
    ) -> tuple[Int32[np.ndarray, "R M"], Int32[np.ndarray, " R"]]:
        """The blocks that hold the first n_tokens of each row, for `size` rows, and how many."""
        tables = np.zeros((size, self._ids.shape[1]), np.int32)
        n_blocks = np.zeros(size, np.int32)
        tables[: len(rows)] = self._ids[rows]
        n_blocks[: len(rows)] = self._n_read(rows, n_tokens)
        return tables, n_blocks

    def listed(self, row: int, n_tokens: int) -> Int32[np.ndarray, " n"]:
        """The blocks that hold the first n_tokens of a row, in their order."""
        at = np.array([row])
        return self._ids[row, : self._n_read(at, np.array([n_tokens], np.int32))[0]]

    def _n_read(self, rows: np.ndarray, n_tokens: np.ndarray) -> np.ndarray:
        ends = -(-n_tokens // self.block_size)
        return np.maximum(np.minimum(ends, self._end[rows]) - self._lo[rows], 0)
