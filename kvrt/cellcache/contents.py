"""All that a runtime holds, by its meaning: books of attention layers, recurrent states, the text.

Each operation asks every part before any of them changes: a new memory, or an error.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from kvrt.arrays import Int32
from kvrt.cellcache import blocks, group, in_blocks, recurrent
from kvrt.cellcache import history as texts
from kvrt.cellcache.blocks import Rows
from kvrt.cellcache.group import CellGroup
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.recurrent import States
from kvrt.cells.cells import owned


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheContents:
    """Books by group, the states where layers are recurrent, and the tokens of each sequence."""

    books: tuple[CellGroup, ...]
    states: States | None = None
    text: TokenHistory = dataclasses.field(default_factory=TokenHistory)


Moved = tuple[CacheContents, tuple[Rows, ...]]


def rm(
    memory: CacheContents, seq_id: int | None, p0: int = 0, p1: int | None = None
) -> CacheContents:
    """Without positions [p0, p1) of a sequence; see `book.rm` and `states.rm`."""
    return CacheContents(
        books=tuple(group.rm(b, seq_id, p0, p1) for b in memory.books),
        states=memory.states and recurrent.rm(memory.states, seq_id, p0, p1),
        text=texts.rm(memory.text, seq_id, p0, p1),
    )


def cp(
    memory: CacheContents, src: int, dst: int, p0: int = 0, p1: int | None = None
) -> CacheContents:
    """With positions [p0, p1) of src shared by dst; see `book.cp` and `states.cp`."""
    return CacheContents(
        books=tuple(group.cp(b, src, dst, p0, p1) for b in memory.books),
        states=memory.states and recurrent.cp(memory.states, src, dst, p0, p1),
        text=texts.cp(memory.text, src, dst, p0, p1),
    )


def keep(memory: CacheContents, seq_id: int) -> CacheContents:
    """With one sequence alone."""
    return CacheContents(
        books=tuple(group.keep(b, seq_id) for b in memory.books),
        states=memory.states and recurrent.keep(memory.states, seq_id),
        text=texts.keep(memory.text, seq_id),
    )


def clear(memory: CacheContents) -> CacheContents:
    """With nothing."""
    return CacheContents(
        books=tuple(map(group.clear, memory.books)),
        states=memory.states and recurrent.clear(memory.states),
    )


def add(memory: CacheContents, seq_id: int, p0: int, p1: int | None, d: int) -> Moved:
    """With positions [p0, p1) moved by d, and the rows to copy first in each group."""
    held = memory.states and recurrent.add(memory.states, seq_id, p0, p1, d)
    new = [group.add(b, seq_id, p0, p1, d) for b in memory.books]
    return _moved(new, held, texts.add(memory.text, seq_id, p0, p1, d))


def div(memory: CacheContents, seq_id: int, p0: int, p1: int | None, d: int) -> Moved:
    """With positions [p0, p1) divided by d, and the rows to copy first in each group."""
    held = memory.states and recurrent.div(memory.states, seq_id, p0, p1, d)
    new = [group.div(b, seq_id, p0, p1, d) for b in memory.books]
    return _moved(new, held, texts.div(memory.text, seq_id, p0, p1, d))


def to_blocks(memory: CacheContents, seq_id: int, size: int) -> Moved:
    """With a sequence in blocks, and rows to copy first by group; see `in_blocks.to_blocks`."""
    new = [in_blocks.to_blocks(b, seq_id, size) for b in memory.books]
    return _copied(memory, new, [seq_id])


def tables(memory: CacheContents, seq_id: int) -> tuple[tuple[int, ...] | None, ...]:
    """Blocks of a sequence by group, None where it lies in cells."""
    return tuple(
        blocks.table(b.cells, seq_id, b.blocks.size)
        if b.blocks and seq_id in b.blocks.seqs
        else None
        for b in memory.books
    )


def to_cells(memory: CacheContents, seq_id: int) -> CacheContents:
    """With a sequence in cells."""
    new = tuple(group.to_cells(b, [seq_id]) for b in memory.books)
    return dataclasses.replace(memory, books=new)


def own(memory: CacheContents, seq_ids: Int32[np.ndarray, " n"], first: Mapping[int, int]) -> Moved:
    """With room where tokens in blocks will be written, and rows to copy; see `in_blocks.own`."""
    return _copied(memory, [in_blocks.own(b, seq_ids, first) for b in memory.books], first)


def n_free(memory: CacheContents) -> int:
    """Tokens that there are cells for."""
    return group.n_free(memory.books)


def _moved(new: list[tuple[CellGroup, Rows]], held: States | None, text: TokenHistory) -> Moved:
    memory = CacheContents(books=tuple(b for b, _ in new), states=held, text=text)
    return memory, tuple(rows for _, rows in new)


def _copied(memory: CacheContents, new: list[tuple[CellGroup, Rows]], seqs: Iterable[int]) -> Moved:
    """After rows were copied for sequences, which so have tokens of their own that they shared."""
    text = memory.text
    after, (src, dst) = next((x for x in new if not x[0].rolls), (None, blocks.no_rows()))
    if after is not None and len(src):
        for s in seqs:
            mine = owned(after.cells, s)[dst] & (after.cells.pos[src] >= 0)
            text = texts.apart(text, s, np.asarray(after.cells.pos)[dst[mine]])
    return _moved(new, memory.states, text)
