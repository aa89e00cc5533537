"""Block tables as arrays: from sequences and positions to slots, and to block lists.

A block list has blocks of the device's arrays. Where these are larger than a group's blocks (see
`PagedGroup.array_block`), a sequence's list has each of them once, in the order of its table, and
others' cells in them are masked.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvrt.arrays import Int32
from kvrt.config import MAX_POS
from kvrt.paged.layout.spec import NULL, PagedGroup

# Blocks of a table that are looked at one by one.
_FEW = 64


class BlockTables:
    """The block tables of one group, one a sequence.

    A table has the blocks at its beginning that stay, its head, and from the first one after them
    that is not null on all others, so that windows stay narrow: the entry of block i of sequence s
    is i in the head of head[s] blocks, and i - lo[s] behind it.
    """

    def __init__(self, group: PagedGroup, n_seq: int, n_entries: int, n_array_blocks: int = 0):
        """Empty tables.

        Args:
          group: whose tables.
          n_seq: sequences.
          n_entries: blocks that a sequence has at most, those left out that slid out of a window.
          n_array_blocks: blocks of the arrays, where these are larger than the group's.
        """
        self.block_size, self.array_block = group.block_size, group.block_size * group.n_span
        self._first_cell = group.first_cell
        self._kind, self._size = group.kind, group.size
        self._n_sink_blocks = -(-group.n_sink // group.block_size)
        self._ids = np.zeros((n_seq, n_entries), np.int32)
        self._head, self._lo = np.zeros(n_seq, np.int32), np.zeros(n_seq, np.int32)
        self._end = np.zeros(n_seq, np.int32)
        # Positions from `start` on lie `gap` cells further on, after those of dropped tokens.
        self._start, self._gap = np.zeros(n_seq, np.int32), np.zeros(n_seq, np.int32)
        self._any_gap = self._any_head = False
        # Where blocks of the arrays are larger, those of each table that nothing slides out of.
        self._is_wide = group.n_span > 1
        self._is_listed = self._is_wide and group.kind == "full"
        self._width = n_array_blocks if self._is_wide else n_entries
        self._lists = np.zeros((n_seq, n_array_blocks * self._is_listed), np.int32)
        self._n_listed = np.zeros(n_seq, np.int32)

    def put(self, seq: int, table: Sequence[int], n_head: int = 0) -> Int32[np.ndarray, " n"]:
        """Takes over a table that has grown at its end or become null behind its head.

        What was its last entry may have moved to a later one, so that it is null now.

        Args:
          seq: whose table.
          table: its blocks.
          n_head: blocks at its beginning that stay, the same as long as it is one sequence's.

        Returns:
          The blocks that slid out of it.
        """
        ids, end = self._ids[seq], int(self._end[seq])
        self._head[seq] = n_head
        self._any_head |= n_head > 0
        if n_head:
            first = max(end - 1, 0)
            ids[first : min(n_head, len(table))] = table[first:n_head]
        old = int(self._lo[seq]) + n_head
        lo = old
        while lo < len(table) and table[lo] == NULL:
            lo += 1
        ids = ids[n_head:]
        gone = ids[: max(min(lo, end) - old, 0)].copy()
        if lo > old:
            n_kept = max(end - lo, 0)
            ids[:n_kept] = ids[lo - old : lo - old + n_kept].copy()
            self._lo[seq], end = lo - n_head, max(end, lo)
        last = max(end - 1, lo)
        ids[last - lo : max(len(table) - lo, 0)] = table[last:]
        self._end[seq] = len(table)
        if self._is_listed:
            self._list_blocks(seq, end)
        return gone[gone != NULL]

    def shrink(self, seq: int, n: int) -> None:
        """A table has lost what was behind its first n entries, which held no token."""
        self._end[seq] = n
        if self._is_listed:
            self._list_blocks(seq, 0)

    def drop(self, seq: int, table: Sequence[int], start: int, gap: int) -> None:
        """Takes over a table that blocks have left, see `BlockManager.drop`."""
        self._lo[seq] = self._end[seq] = 0
        self.put(seq, table, int(self._head[seq]))
        self._start[seq], self._gap[seq] = start, gap
        self._any_gap = True

    def fork(self, src: int, dst: int) -> None:
        """A sequence begins with another's tokens, some of which were dropped."""
        self._start[dst], self._gap[dst] = self._start[src], self._gap[src]

    def clear(self, seq: int) -> Int32[np.ndarray, " n"]:
        """Empties a table and returns the blocks that it had."""
        had = self.blocks(seq)
        self._head[seq] = self._lo[seq] = self._end[seq] = self._n_listed[seq] = 0
        if self._any_head:
            self._any_head = bool(self._head.any())
        if self._any_gap:
            self._gap[seq] = 0
            self._any_gap = bool(self._gap.any())
        return had

    def blocks(self, seq: int) -> Int32[np.ndarray, " n"]:
        """Blocks of a table, null ones left out."""
        ids = self._ids[seq, : self._n_entries(seq)]
        return ids[ids != NULL]

    def all_blocks(self) -> Int32[np.ndarray, " n"]:
        """Blocks of all tables, one after the other."""
        return np.concatenate([self.blocks(seq) for seq in range(len(self._ids))])

    def block(self, seq: int, pos: int) -> int:
        """The block that a position of a sequence lies in."""
        (cell,) = self._cell(np.array([seq]), np.array([pos])).tolist()
        index = cell // self.block_size
        return int(self._ids[seq, self._entry(seq, index)])

    def slots(
        self, seqs: Int32[np.ndarray, " T"], pos: Int32[np.ndarray, " T"]
    ) -> Int32[np.ndarray, " T"]:
        """The slot mapping: the cell of the token of each sequence at each position."""
        index, inside = np.divmod(self._cell(seqs, pos), np.int32(self.block_size))
        ids = self._ids[seqs, self._entry(seqs, index)]
        return ids * np.int32(self.block_size) + np.int32(self._first_cell) + inside

    def held(self, seq: int, pos: Int32[np.ndarray, " n"]) -> Int32[np.ndarray, " m"]:
        """Those of some positions of a sequence whose blocks have not slid out of its window."""
        index = self._cell(np.full(len(pos), seq), pos) // np.int32(self.block_size)
        head, lo = self._head[seq], self._lo[seq]
        there = ((index < head) | (index >= head + lo)) & (index < self._end[seq])
        found = np.where(there, self._entry(seq, index), np.int32(0))
        return pos[there & (self._ids[seq, found] != NULL)]

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
        tables = np.zeros((size, self._width), np.int32)
        n_blocks = np.zeros(size, np.int32)
        if self._is_listed:
            n_blocks[: len(seqs)] = self._n_listed[seqs]
            width = int(n_blocks.max(initial=0))
            tables[: len(seqs), :width] = self._lists[seqs, :width]
            return tables, n_blocks
        start, n = self._seen(seqs, n_tokens)
        if start.any() or self._is_wide:
            # A window has moved within the table; few sequences at a time do.
            entries = zip(seqs.tolist(), start.tolist(), n.tolist(), strict=True)
            for i, (seq, first, count) in enumerate(entries):
                found = self._listed(seq, first, count)
                tables[i, : len(found)], n[i] = found, len(found)
        else:
            width = int(n.max(initial=0))
            tables[: len(seqs), :width] = self._ids[seqs, :width]
        n_blocks[: len(seqs)] = n
        return tables, n_blocks

    def block_list(self, seq: int, n_tokens: int) -> Int32[np.ndarray, " n"]:
        """The block list of the token after the first n_tokens of a sequence."""
        start, n = self._seen(np.array([seq]), np.array([n_tokens], np.int32))
        return self._listed(seq, int(start[0]), int(n[0]))

    def array_blocks(self, ids: Int32[np.ndarray, " n"]) -> Int32[np.ndarray, " m"]:
        """The blocks of the arrays that some blocks of the group lie in, each once, in order."""
        first = ids[ids != NULL] * np.int32(self.block_size) + np.int32(self._first_cell)
        found = first // np.int32(self.array_block)
        if len(found) > _FEW:
            found = found[np.diff(found, prepend=-1) != 0]
        return np.array(list(dict.fromkeys(found.tolist())), np.int32)

    def prefix_blocks(
        self, seq: int, n_tokens: int
    ) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
        """Blocks of the first n_tokens of a sequence that it has, and their indices."""
        index = np.arange(self._n_entries(seq), dtype=np.int32)
        index[self._head[seq] :] += self._lo[seq]
        n = np.searchsorted(index, -(-n_tokens // self.block_size))
        return self._ids[seq, :n], index[:n]

    def common(self, src: int, dst: int) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
        """The blocks of two sequences that have the same index in their tables, one by one."""
        (ids, at), (others, there) = (
            (ids[ids != NULL], index[ids != NULL])
            for ids, index in (self.prefix_blocks(s, MAX_POS) for s in (src, dst))
        )
        _, i, j = np.intersect1d(at, there, assume_unique=True, return_indices=True)
        return ids[i], others[j]

    def _list_blocks(self, seq: int, n_known: int) -> None:
        """Lists the blocks of the arrays of a table, whose first n_known entries are listed."""
        n = int(self._n_listed[seq]) if n_known else 0
        known = set(self._lists[seq, :n].tolist())
        new = self.array_blocks(self._ids[seq, n_known : self._end[seq]])
        found = [x for x in new.tolist() if x not in known]
        self._lists[seq, n : n + len(found)] = found
        self._n_listed[seq] = n + len(found)

    def _n_entries(self, seq: int) -> int:
        """Entries of a table."""
        end, head = int(self._end[seq]), int(self._head[seq])
        return max(end - int(self._lo[seq]), min(end, head))

    def _entry(self, seqs: np.ndarray | int, index: np.ndarray | int) -> Any:
        """The entry of the block at an index of each sequence."""
        if not self._any_head:
            return index - self._lo[seqs]
        return index - np.where(index >= self._head[seqs], self._lo[seqs], np.int32(0))

    def _listed(self, seq: int, start: int, n: int) -> Int32[np.ndarray, " n"]:
        """The list of some entries of a table from `start` on, and of sinks before them."""
        n_sink = min(self._n_sink_blocks, start)
        ids = self._ids[seq, start : start + n]
        ids = np.concatenate([self._ids[seq, :n_sink], ids]) if n_sink else ids
        return self.array_blocks(ids) if self._is_wide else ids

    def _seen(self, seqs: np.ndarray, n_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each sequence, the first entry that is seen but for sinks, and how many are.

        Where nothing lies between those and the sinks, they are one list.
        """
        b = np.int32(self.block_size)
        end = np.minimum(-(-self._cell(seqs, n_tokens) // b), self._end[seqs])
        first = self._cell(seqs, self._floor(n_tokens)) // b
        if not self._any_head:
            lo = self._lo[seqs]
            first = np.maximum(lo, first)
            return first - lo, np.maximum(end - first, 0)
        head, lo = self._head[seqs], self._lo[seqs]
        # What lies behind the head and has slid out is no entry.
        first, end = (np.where(x <= head, x, np.maximum(x - lo, head)) for x in (first, end))
        if self._n_sink_blocks:
            first = np.where(first <= self._n_sink_blocks, np.int32(0), first)
        return first, np.maximum(end - first, 0)

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
