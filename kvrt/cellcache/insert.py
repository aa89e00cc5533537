"""Puts what another runtime held into this one's cells, states and text: the plan of a restore."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvrt.arrays import Int32, UInt32
from kvrt.cellcache import group as books
from kvrt.cellcache import window
from kvrt.cellcache.group import CellGroup
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.recurrent import States
from kvrt.cellcache.source import Held, Source
from kvrt.cells import slots
from kvrt.cells.cells import Cells, n_used, owned, seq_row
from kvrt.errors import CacheFull

Sequences = Mapping[int, int]  # of the source -> here


def into_book(
    book: CellGroup, source: Source, sequences: Sequences
) -> tuple[CellGroup, Int32[np.ndarray, " n"]]:
    """The book with the cells of some sequences of a source.

    In an empty book of the source's size every cell keeps its number, so that what follows is the
    same to the bit; elsewhere cells are found as for new tokens, and a rolling book takes only
    what is in sight.

    Args:
      book: sequences that are put in hold nothing.
      source: where the cells come from.
      sequences: which, and what they are called here.

    Returns:
      The book, and the cell of each cell of the source; the number of cells for those left out.

    Raises:
      CacheFull: there are too few cells.
    """
    seqs = renamed(source.seqs, sequences, book.cells)
    lost = {here: source.lost.get(s, ()) for s, here in sequences.items()}
    wanted = np.asarray(seqs.any(axis=1))
    n_cells = len(book.cells.pos)
    n_here = int(n_used(book.cells))
    same = n_here == 0 and n_cells == source.n_cells
    if book.rolls and not same:
        wanted, lost = _in_sight(book, source.pos, seqs, lost)
    n = int(np.count_nonzero(wanted))
    out = np.full(len(wanted), n_cells, np.int32)
    if same:
        out[wanted] = source.index[wanted]
        head = source.head
    else:
        if not book.rolls and n > (n_empty := books.n_loose(book, n_here)):
            raise CacheFull(
                f"the session needs {n} cells, {n_empty} of {n_cells} are free; raise "
                "n_ctx, or trim the session"
            )
        found = books.find(book, n, {}, n_here)
        book, out[wanted] = found.book, found.slots
        head = int(slots.next_head(found.slots)) if n else book.head
    pos, owners = book.cells.pos.copy(), book.cells.seqs.copy()
    pos[out[wanted]], owners[out[wanted]] = source.pos[wanted], seqs[wanted]
    cells = Cells(pos=pos, delta=book.cells.delta, seqs=owners)
    held = {**book.lost, **{s: x for s, x in lost.items() if x}}
    return dataclasses.replace(book, cells=cells, head=head, lost=held), out


def into_states(
    states: States, held: Mapping[int, Held], sequences: Sequences
) -> tuple[States, dict[int, int]]:
    """The states with those of some sequences of a source, the newest that are kept here.

    Returns:
      The states, and for each row of the source that is taken its row here.
    """
    taken = {here: held[s][-states.depth :] for s, here in sequences.items() if s in held}
    used = {row for x in states.held.values() for _, row in x}
    free = iter([row for row in range(states.n_rows) if row not in used])
    rows = {row: next(free) for row in sorted({row for x in taken.values() for _, row in x})}
    new = {s: tuple((pos, rows[row]) for pos, row in x) for s, x in taken.items()}
    return dataclasses.replace(states, held={**states.held, **new}), rows


def into_text(text: TokenHistory, source: TokenHistory, sequences: Sequences) -> TokenHistory:
    """The text with the tokens of some sequences of a source."""
    taken = {here: source.pieces[s] for s, here in sequences.items() if s in source.pieces}
    # Numbered anew, so that marks never grow beyond what is held, however they were handed out.
    marks = np.unique(np.concatenate([[], *(x[2] for held in taken.values() for x in held)]))
    new = {
        here: tuple(_marked(x, text.n_marks + np.searchsorted(marks, x[2])) for x in held)
        for here, held in taken.items()
    }
    exact = {here: source.exact[s] for s, here in sequences.items() if s in source.exact}
    return TokenHistory(
        pieces={**text.pieces, **new},
        n_marks=text.n_marks + len(marks),
        exact={**text.exact, **exact},
    )


def _marked(entries: Int32[np.ndarray, "3 _"], marks: np.ndarray) -> Int32[np.ndarray, "3 _"]:
    """Entries of a text with other marks."""
    return np.stack([entries[0], entries[1], marks.astype(np.int32)])


def renamed(
    seqs: UInt32[np.ndarray, "n W"], sequences: Sequences, cells: Cells
) -> UInt32[np.ndarray, "n V"]:
    """Owners in the words of `cells`, sequences by their names here; others are left out."""
    out = np.zeros((len(seqs), cells.seqs.shape[1]), np.uint32)
    for s, here in sequences.items():
        if s >> 5 < seqs.shape[1]:
            mine = (seqs[:, s >> 5] >> np.uint32(s & 31)) & 1
            out |= np.where(mine[:, None] > 0, seq_row(cells, here), np.uint32(0))
    return out


def _in_sight(
    book: CellGroup,
    pos: Int32[np.ndarray, " n"],
    seqs: np.ndarray,
    lost: Mapping[int, window.Intervals],
) -> tuple[np.ndarray, dict[int, window.Intervals]]:
    """Which cells some sequence's next token sees, and what is lost with the others."""
    all_cells = Cells(pos=pos, delta=np.zeros_like(pos), seqs=seqs)
    wanted, after = np.zeros(len(pos), bool), dict(lost)
    for s in lost:
        mine = owned(all_cells, s)
        if not mine.any():
            continue
        last = int(pos[mine].max())
        floor = min(window.horizon(book.mask, last + 1), last)
        wanted |= mine & (pos >= floor)
    for s in lost:
        gone = pos[owned(all_cells, s) & ~wanted]
        if len(gone):
            start, end = int(gone.min()), int(gone.max()) + 1
            after[s] = window.joined(after[s], [(start, end)])
    return wanted, after
