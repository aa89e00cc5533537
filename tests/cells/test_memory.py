"""Operations on all groups at once."""

import dataclasses

import numpy as np

from kvrt import MaskSpec
from kvrt.cellcache import contents
from kvrt.cellcache import group as books
from kvrt.cellcache.contents import CacheContents
from kvrt.sizes import Extent


def shared(n_cells, mask, n):
    """A book in which two sequences share the newest n positions of 8."""
    rolls = mask.kind != "full"
    book = books.open_book(Extent(n_cells=n_cells, block_size=n_cells, rolls=rolls), mask, 2)
    pos, seqs = book.cells.pos.copy(), book.cells.seqs.copy()
    pos[:n], seqs[:n] = np.arange(8 - n, 8), 0b11
    return dataclasses.replace(
        book,
        cells=dataclasses.replace(book.cells, pos=pos, seqs=seqs),
        head=n,
        lost={s: ((0, 8 - n),) for s in (0, 1)} if rolls else {},
    )


def test_each_group_copies_as_many_shared_rows_as_it_has():
    window = MaskSpec(kind="window", size=3)
    held = CacheContents(books=(shared(20, MaskSpec(), 8), shared(16, window, 5)))
    moved, copies = contents.add(held, 1, 0, None, 8)
    assert [len(src) for src, _ in copies] == [8, 5]
    for book, n in zip(moved.books, (8, 5), strict=True):
        assert sorted(book.cells.pos[book.cells.seqs[:, 0] == 0b01]) == list(range(8 - n, 8))
        assert sorted(book.cells.pos[book.cells.seqs[:, 0] == 0b10]) == list(range(16 - n, 16))
