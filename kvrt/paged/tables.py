"""Block tables as arrays: from sequences and positions to slots, and to block lists."""

from collections.abc import Sequence

import numpy as np

from kvrt.arrays import Int32
from kvrt.paged.layout.spec import NULL, PagedGroup


class BlockTables:
    """The block tables of one group, one a sequence.

    A table begins with its first block that is not null, so that windows stay narrow: entry j of
    table s is block lo[s] + j of sequence s.
    """

    def __init__(self, group: PagedGroup, n_seq: int, n_entries: int):
        """Empty tables.

        Args:
          group: whose tables.
          n_seq: sequences.
          n_entries: blocks, from the first that is not null on, that a sequence has at most.
        """
        self.block_size = group.block_size
        self._kind, self._size = group.kind, group.size
        self._ids = np.zeros((n_seq, n_entries), np.int32)
        self._lo = np.zeros(n_seq, np.int32)
        self._end = np.zeros(n_seq, np.int32)
        # Positions from `start` on lie `gap` cells further on, after those of dropped tokens.
        self._start, self._gap = np.zeros(n_seq, np.int32), np.zeros(n_seq, np.int32)
        self._any_gap = False

    def put(self, seq: int, table: Sequence[int]) -> Int32[np.ndarray, " n"]:
        """Takes over a table that has grown at its end or become null at its beginning.

        What was its last entry may have moved to a later one, so that it is null now.

        Returns:
          The blocks that slid out of it.
        """
        old, end = int(self._lo[seq]), int(self._end[seq])
        lo = old
        while lo < len(table) and table[lo] == NULL:
            lo += 1
        ids = self._ids[seq]
        gone = ids[: min(lo, end) - old].copy()
        if lo > old:
            n_kept = max(end - lo, 0)
            ids[:n_kept] = ids[lo - old : lo - old + n_kept].copy()
            self._lo[seq], end = lo, max(end, lo)
        last = max(end - 1, lo)
        ids[last - lo : len(table) - lo] = table[last:]
        self._end[seq] = len(table)
        return gone[gone != NULL]

    def drop(self, seq: int, table: Sequence[int], start: int, gap: int) -> None:
        """Takes over a table whose blocks went to its end, see `BlockManager.drop`."""
        self._ids[seq, : len(table)] = table
        self._start[seq], self._gap[seq] = start, gap
        self._any_gap = True

    def fork(self, src: int, dst: int, table: Sequence[int]) -> None:
        """Takes over the table of a sequence without one, which began with another's tokens."""
        self.put(dst, table)
        self._start[dst], self._gap[dst] = self._start[src], self._gap[src]

    def clear(self, seq: int) -> Int32[np.ndarray, " n"]:
        """Empties a table and returns the blocks that it had."""
        had = self.blocks(seq)
        self._lo[seq] = self._end[seq] = 0
        if self._any_gap:
            self._gap[seq] = 0
            self._any_gap = bool(self._gap.any())
        return had

    def blocks(self, seq: int) -> Int32[np.ndarray, " n"]:
        """Blocks of a table, null ones left out."""
        ids = self._ids[seq, : self._end[seq] - self._lo[seq]]
        return ids[ids != NULL]

    def block(self, seq: int, index: int) -> int:
        """The block at an index of a sequence."""
        return int(self._ids[seq, index - self._lo[seq]])

    def slots(
        self, seqs: Int32[np.ndarray, " T"], pos: Int32[np.ndarray, " T"]
    ) -> Int32[np.ndarray, " T"]:
        """The slot mapping: the cell of the token of each sequence at each position."""
        index, inside = np.divmod(self._cell(seqs, pos), np.int32(self.block_size))
        ids = self._ids[seqs, index - self._lo[seqs]]
        return ids * np.int32(self.block_size) + inside

    def read(
        self, seqs: Int32[np.ndarray, " S"], n_tokens: Int32[np.ndarray, " S"], size: int
    ) -> tuple[Int32[np.ndarray, "R M"], Int32[np.ndarray, " R"]]:
        """The blocks that the token after the first n_tokens of each sequence sees.

        Args:
          seqs: sequences.
          n_tokens: tokens of each that are there.
          size: lists of the result (R); those beyond S have no blocks.

        Returns:
          A block list a sequence, in order, and how many blocks it has.
        """
        # What is not read may hold anything in range.
        tables = np.zeros((size, self._ids.shape[1]), np.int32)
        n_blocks = np.zeros(size, np.int32)
        start, n = self._seen(seqs, n_tokens)
        if start.any():
            # A window has moved within the table; few sequences at a time do.
            for i, (seq, first, count) in enumerate(zip(seqs, start, n, strict=True)):
                tables[i, :count] = self._ids[seq, first : first + count]
        else:
            width = int(n.max(initial=0))
            tables[: len(seqs), :width] = self._ids[seqs, :width]
        n_blocks[: len(seqs)] = n
        return tables, n_blocks

    def block_list(self, seq: int, n_tokens: int) -> Int32[np.ndarray, " n"]:
        """The block list of the token after the first n_tokens of a sequence."""
        start, n = self._seen(np.array([seq]), np.array([n_tokens], np.int32))
        return self._ids[seq, start[0] : start[0] + n[0]]

    def prefix_blocks(self, seq: int, n_tokens: int) -> tuple[Int32[np.ndarray, " n"], int]:
        """Blocks of the first n_tokens of a sequence, and the index of the first of them."""
        lo = int(self._lo[seq])
        return self._ids[seq, : max(-(-n_tokens // self.block_size) - lo, 0)], lo

    def _seen(self, seqs: np.ndarray, n_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each sequence, the first entry that is seen, and how many are."""
        lo, b = self._lo[seqs], np.int32(self.block_size)
        first = np.maximum(lo, self._floor(n_tokens) // b)
        ends = np.minimum(-(-self._cell(seqs, n_tokens) // b), self._end[seqs])
        return first - lo, np.maximum(ends - first, 0)

    def _cell(self, seqs: np.ndarray, pos: np.ndarray) -> np.ndarray:
        """Cells of a table, counted from its beginning, before each of some positions."""
        if not self._any_gap:
            return pos
        return pos + np.where(pos >= self._start[seqs], self._gap[seqs], np.int32(0))

    def _floor(self, n_tokens: np.ndarray) -> np.ndarray:
        """The least position that the token at each of some positions sees."""
        if self._kind == "window":
            return np.maximum(n_tokens - np.int32(self._size - 1), 0)
        if self._kind == "chunked":
            return n_tokens // np.int32(self._size) * np.int32(self._size)
        return np.zeros_like(n_tokens)
