"""A group's sequences in blocks: how they get there, and what their new tokens need."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvrt.arrays import Int32
from kvrt.cellcache import blocks
from kvrt.cellcache.blocks import Blocks, Rows
from kvrt.cellcache.group import CellGroup, Found


def to_blocks(book: CellGroup, seq_id: int, size: int) -> tuple[CellGroup, Rows]:
    """With a sequence in blocks of `size` cells, and the rows to copy first.

    A book that rolls stays as it is: its cells are used again one by one.

    Raises:
      CacheFull: too few blocks are empty.
      UsageError: a position is held twice.
    """
    held = book.blocks or Blocks(size=size, seqs=frozenset())
    if book.rolls or seq_id in held.seqs:
        return book, blocks.no_rows()
    cells, rows = blocks.arrange(book.cells, seq_id, held)
    held = dataclasses.replace(held, seqs=held.seqs | {seq_id})
    return dataclasses.replace(book, cells=cells, blocks=held), rows


def own(
    book: CellGroup, seq_ids: Int32[np.ndarray, " n"], first: Mapping[int, int]
) -> tuple[CellGroup, Rows]:
    """With what tokens need before they are found cells: see `blocks.own`.

    Args:
      book: the group.
      seq_ids: sequence of each token.
      first: by sequence, the position of its first token.

    Raises:
      CacheFull: the tokens do not fit.
    """
    if book.blocks is None:
        return book, blocks.no_rows()
    n = {s: int(np.count_nonzero(seq_ids == s)) for s in first}
    wanted = {s: (p, p + n[s]) for s, p in first.items()}
    cells, rows = blocks.own(book.cells, book.blocks, wanted)
    new = dataclasses.replace(book, cells=cells) if len(rows[0]) else book
    find(new, seq_ids, first)
    return new, rows


def find(book: CellGroup, seq_ids: Int32[np.ndarray, " n"], first: Mapping[int, int]) -> Found:
    """As `book.find`, where sequences lie in blocks; after `own`."""
    assert book.blocks is not None, "all lie in cells"
    pos = np.empty(len(seq_ids), np.int32)
    for s, p in first.items():
        here = seq_ids == s
        pos[here] = np.arange(p, p + np.count_nonzero(here), dtype=np.int32)
    found = blocks.plan_slots(book.cells, book.blocks, book.head, seq_ids, pos)
    return Found(slots=found, book=book)
