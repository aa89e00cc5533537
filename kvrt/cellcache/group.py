"""One group's cells on the host, with where the next search starts and what has rolled out.

Every change gives a new book, so that the changes of all groups can be planned, looked at and
then committed together or not at all.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from kvrt.arrays import Bool, Int32
from kvrt.cellcache import blocks as placing
from kvrt.cellcache import window
from kvrt.cellcache.blocks import Blocks, Rows
from kvrt.cells import sequences, slots
from kvrt.cells.cells import Cells, create, n_bits, owned
from kvrt.cells.cells import n_free as count_free
from kvrt.config import MAX_POS, MaskSpec
from kvrt.errors import BadRange, CacheFull, CannotRewind
from kvrt.sizes import Extent

# Part of a rolling group's cells that are emptied together.
_SPARE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellGroup:
    """Cells of a group in NumPy.

    Attributes:
      cells: positions and owners.
      head: where the next search for cells starts.
      mask: what the group's layers see.
      rolls: cells that no later token sees are used again.
      lost: positions whose rows were overwritten, by sequence; only where `rolls`.
      blocks: which sequences lie in blocks, None is none; never where `rolls`.
    """

    cells: Cells
    mask: MaskSpec
    head: int = 0
    rolls: bool = False
    lost: Mapping[int, window.Intervals] = dataclasses.field(default_factory=dict)
    blocks: Blocks | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Cells for new tokens.

    Attributes:
      slots: one a token.
      book: the book before the tokens are placed; cells that are used again are empty in it, which
        the device has to be told if they are not overwritten.
    """

    slots: Int32[np.ndarray, " n"]
    book: CellGroup


def open_book(extent: Extent, mask: MaskSpec, n_seq_max: int) -> CellGroup:
    """Empty cells."""
    return CellGroup(cells=create(extent.n_cells, n_seq_max), mask=mask, rolls=extent.rolls)


def main(books: tuple[CellGroup, ...]) -> CellGroup:
    """The book that knows all positions: of a group that keeps them, if there is one."""
    return next((b for b in books if not b.rolls), books[0])


def n_free(books: tuple[CellGroup, ...]) -> int:
    """Tokens that all groups have cells for; rolling groups always have."""
    return min((n_loose(b) for b in books if not b.rolls), default=MAX_POS)


def n_loose(book: CellGroup, n_used: int | None = None) -> int:
    """Empty cells for sequences in cells: all that no sequence in blocks keeps."""
    n = int(count_free(book.cells)) if n_used is None else len(book.cells.pos) - n_used
    if book.blocks is not None:
        n -= int(np.count_nonzero(placing.reserved(book.cells, book.blocks)))
    return n


def n_past(book: CellGroup, seq_id: int) -> int:
    """Where the next token of a sequence stands."""
    lost = book.lost.get(seq_id, ())
    end = int(sequences.seq_pos_max(book.cells, seq_id)) + 1
    return max(end, lost[-1][1]) if lost else end


def placed(book: CellGroup, cells: Cells, head: int) -> CellGroup:
    """The book after an append, or after keys were turned: nothing else changes."""
    return CellGroup(
        cells=cells,
        head=head,
        mask=book.mask,
        rolls=book.rolls,
        lost=book.lost,
        blocks=book.blocks,
    )


def rm(book: CellGroup, seq_id: int | None, p0: int = 0, p1: int | None = None) -> CellGroup:
    """Without positions [p0, p1) of a sequence, or of all with None; as `seq_rm`.

    Raises:
      CannotRewind: the next token would have to see rows that were overwritten.
    """
    cells = sequences.seq_rm(book.cells, seq_id, p0, p1)
    head = int(slots.lowered_head(book.cells, cells, book.head))
    seqs = list(book.lost) if seq_id is None else [seq_id]
    new = dataclasses.replace(book, cells=cells, head=head)
    if new.blocks is not None:
        gone = new.blocks.seqs if seq_id is None else new.blocks.seqs & {seq_id}
        new = to_cells(new, [s for s in gone if not owned(cells, s).any()])
    return _checked(_lost(new, seqs, lambda x: window.without(x, p0, p1)), seqs)


def cp(book: CellGroup, src: int, dst: int, p0: int = 0, p1: int | None = None) -> CellGroup:
    """With positions [p0, p1) of src shared by dst; as `seq_cp`.

    Raises:
      BadRange: dst lies in blocks, and cells of src are not in their places there.
      CannotRewind: the next token of dst would have to see rows that were overwritten.
    """
    new = dataclasses.replace(book, cells=sequences.seq_cp(book.cells, src, dst, p0, p1))
    if book.blocks is not None and dst in book.blocks.seqs:
        _refuse_joined(book, new.cells, src, dst)
    shared = window.within(book.lost.get(src, ()), p0, p1)
    return _checked(_lost(new, [dst], lambda x: window.joined(x, shared)), [dst])


def keep(book: CellGroup, seq_id: int) -> CellGroup:
    """With one sequence alone; as `seq_keep`."""
    cells = sequences.seq_keep(book.cells, seq_id)
    head = int(slots.lowered_head(book.cells, cells, book.head))
    lost = {s: x for s, x in book.lost.items() if s == seq_id}
    new = dataclasses.replace(book, cells=cells, head=head, lost=lost)
    return to_cells(new, new.blocks.seqs - {seq_id}) if new.blocks else new


def clear(book: CellGroup) -> CellGroup:
    """With every cell empty."""
    return dataclasses.replace(
        book, cells=sequences.clear(book.cells), head=0, lost={}, blocks=None
    )


def add(book: CellGroup, seq_id: int, p0: int, p1: int | None, d: int) -> tuple[CellGroup, Rows]:
    """With positions [p0, p1) moved by d, and the rows to copy first; as `seq_add`.

    Raises:
      CacheFull: too few empty cells to split shared ones.
      CannotRewind: the next token would have to see rows that were overwritten.
    """

    def move(cells: Cells) -> Cells:
        return sequences.seq_add(cells, seq_id, p0, p1, d)

    if d == 0:
        return _unmoved(book, move)
    _refuse_moved(book, seq_id, p0, p1)
    split, rows = _split(book, seq_id, p0, p1)
    cells = move(split.cells)
    new = dataclasses.replace(split, cells=cells, head=int(slots.first_freed(split.cells, cells)))
    return _checked(_lost(new, [seq_id], lambda x: window.added(x, p0, p1, d)), [seq_id]), rows


def div(book: CellGroup, seq_id: int, p0: int, p1: int | None, d: int) -> tuple[CellGroup, Rows]:
    """With positions [p0, p1) divided by d, and the rows to copy first; as `seq_div`.

    Raises:
      CacheFull: too few empty cells to split shared ones.
      CannotRewind: the next token would have to see rows that were overwritten.
    """

    def move(cells: Cells) -> Cells:
        return sequences.seq_div(cells, seq_id, p0, p1, d)

    if d == 1:
        return _unmoved(book, move)
    _refuse_moved(book, seq_id, p0, p1)
    split, rows = _split(book, seq_id, p0, p1)
    new = dataclasses.replace(split, cells=move(split.cells))
    return _checked(_lost(new, [seq_id], lambda x: window.divided(x, p0, p1, d)), [seq_id]), rows


def to_cells(book: CellGroup, seqs: Iterable[int]) -> CellGroup:
    """With sequences in cells: what they have stays where it is."""
    if book.blocks is None or not (left := book.blocks.seqs - set(seqs)) < book.blocks.seqs:
        return book
    blocks = dataclasses.replace(book.blocks, seqs=left) if left else None
    return dataclasses.replace(book, blocks=blocks)


def find(book: CellGroup, n: int, first: Mapping[int, int], n_used: int) -> Found:
    """Cells for n tokens: empty ones, then in a rolling group those that nobody needs any more.

    No token is of a sequence in blocks; see `in_blocks.find`.

    Args:
      book: the group.
      n: tokens.
      first: by sequence, the position of its first new token.
      n_used: cells in use.

    Raises:
      CacheFull: there are too few.
    """
    if book.blocks is not None:
        return Found(slots=placing.ring(book.cells, book.blocks, book.head, n), book=book)
    n_empty = len(book.cells.pos) - n_used
    if not book.rolls or n <= n_empty:
        return Found(slots=slots.plan_slots(book.cells, book.head, n, n_used=n_used), book=book)
    book = _released(book, _oldest(book, n - n_empty, first))
    return Found(slots=slots.plan_slots(book.cells, book.head, n), book=book)


def check_room(book: CellGroup, seq_id: int, n: int, n_step: int) -> None:
    """Refuses tokens that a rolling group could not take in, n_step at a time.

    It always can, unless many cells share few positions, as after `div`.

    Raises:
      CacheFull: at some step more cells are in sight than there are.
    """
    if not book.rolls:
        return
    end = n_past(book, seq_id)
    others = np.count_nonzero(_needed(book, {seq_id: MAX_POS}) & (book.cells.pos >= 0))
    mine = book.cells.pos[owned(book.cells, seq_id)]
    for k in range(0, n, n_step):
        floor = window.horizon(book.mask, end + k)
        held = int(others + np.count_nonzero(mine >= floor)) + end + k - max(end, floor)
        if held + min(n_step, n - k) > len(book.cells.pos):
            raise _too_few(min(n_step, n - k), len(book.cells.pos) - held, book)
        if floor >= end:
            return


def _needed(book: CellGroup, first: Mapping[int, int]) -> Bool[np.ndarray, " C"]:
    """Cells that cannot be used again: in sight of a later token, or empty."""
    needed = np.asarray(book.cells.pos < 0)
    for s in _owners(book.cells):
        mine = owned(book.cells, s)
        # The newest token stays in any case: it says where the sequence ends.
        last = first[s] if s in first else int(book.cells.pos[mine].max())
        floor = min(window.horizon(book.mask, first.get(s, last + 1)), last)
        needed |= mine & (book.cells.pos >= floor)
    return needed


def _too_few(n: int, found: int, book: CellGroup) -> CacheFull:
    return CacheFull(
        f"a step needs {n} cells of windowed layers, {max(found, 0)} of {len(book.cells.pos)} can "
        "be used; raise n_ubatch or set swa_full"
    )


def _oldest(book: CellGroup, n: int, first: Mapping[int, int]) -> Int32[np.ndarray, " M"]:
    """The cells of least position that no later token of any owner sees: n, or some to spare.

    The search costs as much as the rest of a step's plan, so it is made for many steps at once.
    """
    loose = np.flatnonzero(~_needed(book, first))
    if len(loose) < n:
        raise _too_few(n, len(loose), book)
    n = max(n, len(book.cells.pos) // _SPARE)
    order = np.argsort(book.cells.pos[loose], kind="stable")[:n]
    return loose[order].astype(np.int32)


def _released(book: CellGroup, old: Int32[np.ndarray, " M"]) -> CellGroup:
    """The book without the cells `old`, nor any of their owners' cells of lower positions."""
    cells, lost = book.cells, dict(book.lost)
    given = dataclasses.replace(cells, pos=cells.pos[old], seqs=cells.seqs[old])
    for s in _owners(given):
        gone = given.pos[owned(given, s)]
        end = int(gone.max()) + 1
        start = int(sequences.seq_pos_min(cells, s))
        lost[s] = window.joined(lost.get(s, ()), [(start, end)])
        cells = sequences.seq_rm(cells, s, 0, end)
    return dataclasses.replace(book, cells=cells, lost=lost)


def _owners(cells: Cells) -> list[int]:
    """Sequences that own a cell."""
    words = np.bitwise_or.reduce(cells.seqs, axis=0)
    if not words.any():
        return []
    return [s for s in range(n_bits(cells)) if words[s >> 5] >> np.uint32(s & 31) & 1]


def _unmoved(book: CellGroup, move: Callable[[Cells], Cells]) -> tuple[CellGroup, Rows]:
    """Nothing changes, but what is wrong with the call is said all the same."""
    move(book.cells)
    return book, placing.no_rows()


def _split(book: CellGroup, seq_id: int, p0: int, p1: int | None) -> tuple[CellGroup, Rows]:
    """The book with private copies of what the sequence shares in [p0, p1)."""
    lacking = int(sequences.n_shared(book.cells, seq_id, p0, p1)) - int(count_free(book.cells))
    if book.rolls and lacking > 0:
        book = _released(book, _oldest(book, lacking, {}))
    kept = None if book.blocks is None else placing.reserved(book.cells, book.blocks)
    cells, src, dst = sequences.plan_split(book.cells, seq_id, p0, p1, book.head, kept)
    return dataclasses.replace(book, cells=cells), (src, dst)


def _refuse_moved(book: CellGroup, seq_id: int, p0: int, p1: int | None) -> None:
    if book.blocks is None or seq_id not in book.blocks.seqs:
        return
    hit = owned(book.cells, seq_id) & (book.cells.pos >= p0)
    n = int(np.count_nonzero(hit if p1 is None else hit & (book.cells.pos < p1)))
    if n:
        raise BadRange(
            f"{n} positions of sequence {seq_id} cannot move: it lies in blocks, where the "
            "position is the place; take it out with to_cells first"
        )


def _refuse_joined(book: CellGroup, cells: Cells, src: int, dst: int) -> None:
    n = int(np.count_nonzero(owned(cells, dst)) - np.count_nonzero(owned(book.cells, dst)))
    if n:
        raise BadRange(
            f"sequence {dst} lies in blocks and cannot share {n} cells of sequence {src}, which "
            "are not its places; take it out with to_cells first"
        )


def _lost(
    book: CellGroup, seqs: Iterable[int], change: Callable[[window.Intervals], window.Intervals]
) -> CellGroup:
    """The book with other lost positions of some sequences."""
    if not book.rolls and not book.lost:
        return book
    lost = {**book.lost, **{s: change(book.lost.get(s, ())) for s in seqs}}
    return dataclasses.replace(book, lost={s: x for s, x in lost.items() if x})


def _checked(book: CellGroup, seqs: Iterable[int]) -> CellGroup:
    """The book, if every next token finds what it has to see."""
    for s in seqs:
        lost = book.lost.get(s, ())
        if lost and lost[-1][1] > window.horizon(book.mask, n_past(book, s)):
            raise CannotRewind(
                f"sequence {s} would end at position {n_past(book, s)}, where layers with a "
                f"{book.mask.kind} of {book.mask.size} see positions below {lost[-1][1]} that "
                f"they have dropped; the earliest is {window.earliest_resume(book.mask, lost)}, "
                "clear the sequence or set swa_full"
            )
    return book
