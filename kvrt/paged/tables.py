"""Block tables as arrays: from rows and positions to slots, and to the blocks that are read."""

from collections.abc import Sequence

import numpy as np

from kvrt.arrays import Int32
from kvrt.paged.layout.spec import NULL, PagedGroup


class Tables:
    """The tables of one group, a row a sequence.

    A row begins with its first block that is not null, so that windows stay narrow: entry j of row
    r is block lo[r] + j of its sequence.
    """

    def __init__(self, group: PagedGroup, n_rows: int, n_entries: int):
        """Empty tables.

        Args:
          group: whose tables.
          n_rows: sequences.
          n_entries: blocks, from the first that is not null on, that a sequence has at most.
        """
        self.block_size = group.block_size
        self._kind, self._size = group.kind, group.size
        self._ids = np.zeros((n_rows, n_entries), np.int32)
        self._lo = np.zeros(n_rows, np.int32)
        self._end = np.zeros(n_rows, np.int32)

    def put(self, row: int, table: Sequence[int]) -> Int32[np.ndarray, " n"]:
        """Takes over a table that has grown at its end or become null at its beginning.

        What was its last entry may have moved on, so that it is null now.

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
        last = max(end - 1, lo)
        ids[last - lo : len(table) - lo] = table[last:]
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
        """The blocks that the token after the first n_tokens of each row sees.

        Args:
          rows: sequences.
          n_tokens: tokens of each that are there.
          size: rows of the result (R); those beyond S have no blocks.

        Returns:
          The blocks of each row in their order, and how many they are.
        """
        # What is not read may hold anything in range.
        tables = np.zeros((size, self._ids.shape[1]), np.int32)
        n_blocks = np.zeros(size, np.int32)
        start, n = self._seen(rows, n_tokens)
        if start.any():
            # A window has moved on within what is held; few rows at a time do.
            for i, (row, first, count) in enumerate(zip(rows, start, n, strict=True)):
                tables[i, :count] = self._ids[row, first : first + count]
        else:
            width = int(n.max(initial=0))
            tables[: len(rows), :width] = self._ids[rows, :width]
        n_blocks[: len(rows)] = n
        return tables, n_blocks

    def listed(self, row: int, n_tokens: int) -> Int32[np.ndarray, " n"]:
        """The blocks that the token after the first n_tokens of a row sees, in their order."""
        start, n = self._seen(np.array([row]), np.array([n_tokens], np.int32))
        return self._ids[row, start[0] : start[0] + n[0]]

    def adopted(self, row: int, n_tokens: int) -> tuple[Int32[np.ndarray, " n"], int]:
        """The blocks that hold the first n_tokens of a row, and the index of the first of them."""
        lo = int(self._lo[row])
        return self._ids[row, : max(-(-n_tokens // self.block_size) - lo, 0)], lo

    def _seen(self, rows: np.ndarray, n_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each row, the first entry that is seen, and how many are."""
        lo, b = self._lo[rows], np.int32(self.block_size)
        first = np.maximum(lo, self._floor(n_tokens) // b)
        ends = np.minimum(-(-n_tokens // b), self._end[rows])
        return first - lo, np.maximum(ends - first, 0)

    def _floor(self, n_tokens: np.ndarray) -> np.ndarray:
        """The least position that the token at each of some positions sees."""
        if self._kind == "window":
            return np.maximum(n_tokens - np.int32(self._size - 1), 0)
        if self._kind == "chunked":
            return n_tokens // np.int32(self._size) * np.int32(self._size)
        return np.zeros_like(n_tokens)
