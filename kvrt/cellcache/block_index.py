"""One group's host side: its book and what is derived from it, so that no step scans all cells."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvrt import cells as meaning
from kvrt.cellcache import blocks as placing
from kvrt.cellcache import group as books
from kvrt.cellcache import in_blocks, window
from kvrt.config import MAX_POS, CacheConfig, GroupSpec
from kvrt.program.batch import Places, SeqBlocks, pad
from kvrt.sizes import Extent, extent
from kvrt.upkeep import shift


class IndexedGroup:
    """The book of a group, and memos that an append keeps true.

    `stale` says that the device's copy of the cells lags behind, `pending` that keys await their
    rotation.
    """

    def __init__(self, group: GroupSpec, config: CacheConfig):
        """Empty cells."""
        self.extent: Extent = extent(group, config)
        self.book = books.open_book(self.extent, group.mask, config.n_seq_max)
        self.n_used = 0
        self.stale = self.pending = False
        self._raw_keys = config.rope == "read"
        self._index = BlockIndex(self.extent)
        self._pos_max: dict[int, int] = {}

    @property
    def cells(self) -> meaning.Cells:
        """Positions and owners."""
        return self.book.cells

    def set(self, book: books.CellGroup) -> None:
        """A new book from anything but an append; keys stored unrotated have nothing pending."""
        if book.cells is self.cells and book.lost is self.book.lost:
            self.book = book
            return
        self.pending = not self._raw_keys and bool(np.any(book.cells.delta))
        self.book = _settled(book) if self._raw_keys else book
        self.n_used = int(meaning.n_used(book.cells))
        self.stale = True
        self._index.reset()
        self._pos_max.clear()

    def settle(self) -> None:
        """The device has rotated what was pending."""
        self.book, self.pending = _settled(self.book), False

    def find(self, seq_ids: np.ndarray, first: Mapping[int, int]) -> books.Found:
        """Cells for new tokens, the first of each sequence at `first`; raises CacheFull."""
        if self.book.blocks is not None:
            return in_blocks.find(self.book, seq_ids, first)
        return books.find(self.book, len(seq_ids), first, self.n_used)

    @property
    def n_free(self) -> int:
        """Tokens of sequences in cells that there is room for."""
        return books.n_loose(self.book, self.n_used)

    def room(self, seq_id: int) -> int:
        """Tokens at the end of a sequence that there is room for."""
        blocks = self.book.blocks
        if blocks is None or seq_id not in blocks.seqs:
            return self.n_free
        return placing.room(self.cells, blocks, seq_id, self.pos_max(seq_id) + 1)

    def append(self, found: books.Found, pos: np.ndarray, seq_ids: np.ndarray) -> None:
        """Takes in tokens that a step has written; the device's cells took them in as well."""
        slots = found.slots[: len(pos)]
        if found.book is not self.book:
            # Until it is told, the device holds cells that no token sees any more.
            self.stale = True
            self.book = found.book
            self.n_used = int(meaning.n_used(self.cells))
        placed = meaning.place(self.cells, slots, pos, seq_ids)
        head = int(meaning.next_head(slots)) if len(slots) else self.book.head
        self.book = books.placed(self.book, placed, head)
        self.n_used += len(slots)
        seqs = dict.fromkeys(seq_ids.tolist())
        for s in seqs:
            mine = seq_ids == s if len(seqs) > 1 else slice(None)
            if not self.book.rolls:
                self._index.add(s, slots[mine])
            # The book has the tokens by now; a memo of it is only raised, never begun here.
            self._pos_max[s] = max(self.pos_max(s), int(pos[mine].max()))

    def pos_max(self, seq_id: int) -> int:
        """The position before the next token of a sequence, -1 if it is empty."""
        if seq_id not in self._pos_max:
            self._pos_max[seq_id] = books.n_past(self.book, seq_id) - 1
        return self._pos_max[seq_id]

    def places(
        self, slots: np.ndarray, size: int, first: Mapping[int, int], *, ahead: bool = False
    ) -> Places:
        """Places of `size` tokens; with `ahead` the blocks of the slots are read as well."""
        if ahead and not self.book.rolls:
            self._index.of(self.cells, first)
            for s in first:
                self._index.add(s, slots)
        blocks = self.listed(first)
        if ahead and self.book.rolls:
            blocks = np.union1d(blocks, slots // self.extent.block_size)
        return Places(
            slots=pad(slots, size, self.extent.n_slots),
            blocks=pad(blocks, self.extent.n_blocks, 0),
            n_blocks=np.asarray(len(blocks), np.int32),
        )

    def listed(self, first: Mapping[int, int]) -> np.ndarray:
        """Blocks with a cell that a token of some sequences, from `first` on, may see."""
        return self._in_sight(first) if self.book.rolls else self._index.of(self.cells, first)

    def rows(self, firsts: Sequence[tuple[int, int]], size: int) -> SeqBlocks:
        """Blocks of each of some sequences with the position of its next token, for `size` rows."""
        tables = np.zeros((size, self.extent.n_blocks), np.int32)
        n_blocks = np.zeros(size, np.int32)
        for i, (s, pos) in enumerate(firsts):
            blocks = self.listed({s: pos})
            tables[i, : len(blocks)], n_blocks[i] = blocks, len(blocks)
        return SeqBlocks(tables=tables, n_blocks=n_blocks)

    def _in_sight(self, first: Mapping[int, int]) -> np.ndarray:
        """Blocks with a cell that a token from `first` on may see, by their oldest such cell."""
        oldest = np.full(self.extent.n_slots, MAX_POS, np.int32)
        pos = self.cells.pos
        for s, start in first.items():
            seen = meaning.owned(self.cells, s) & (pos >= window.horizon(self.book.mask, start))
            oldest[: self.extent.n_cells][seen] = pos[seen]
        oldest = oldest.reshape(-1, self.extent.block_size).min(axis=1)
        blocks = np.flatnonzero(oldest < MAX_POS)
        return blocks[np.argsort(oldest[blocks], kind="stable")]


class BlockIndex:
    """Which blocks hold a cell of which sequence, kept up to date by appends.

    A scan of all cells costs as much as the rest of a step's plan; between other changes of the
    cells, which reset it, a sequence only gains blocks.
    """

    def __init__(self, extent: Extent):
        """An index that knows nothing yet of the blocks."""
        self._extent = extent
        self._of: dict[int, set[int]] = {}
        self._lists: dict[tuple[int, ...], np.ndarray] = {}

    def reset(self) -> None:
        """Forgets everything: the cells changed otherwise than by an append."""
        self._of.clear()
        self._lists.clear()

    def add(self, seq_id: int, slots: np.ndarray) -> None:
        """Takes note of cells that seq_id was given."""
        known = self._of.get(seq_id)
        new = set((slots // self._extent.block_size).tolist())
        if known is not None and not new <= known:
            known |= new
            self._lists.clear()

    def of(self, cells: meaning.Cells, seq_ids: Iterable[int]) -> np.ndarray:
        """Ascending blocks of the sequences, int32."""
        key = tuple(sorted(set(seq_ids)))
        if key not in self._lists:
            for s in key:
                if s not in self._of:
                    self._of[s] = set(_blocks(cells, s, self._extent))
            found = sorted(set().union(*(self._of[s] for s in key)))
            self._lists[key] = np.array(found, np.int32)
        return self._lists[key]


def _blocks(cells: meaning.Cells, seq_id: int, extent: Extent) -> list[int]:
    return meaning.blocks_of(cells, [seq_id], extent.block_size).tolist()


def _settled(book: books.CellGroup) -> books.CellGroup:
    return books.placed(book, shift.settle(book.cells), book.head)
