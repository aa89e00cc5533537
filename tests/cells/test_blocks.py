"""Sequences in blocks: their places, what is copied to get there, who keeps what, and refusals."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvrt import MaskSpec
from kvrt import cells as kc
from kvrt.cellcache import blocks, contents, in_blocks, insert
from kvrt.cellcache import group as books
from kvrt.cellcache.contents import CacheContents
from kvrt.errors import BadRange, CacheFull, KvrtError, UsageError
from kvrt.sizes import Extent

B, N_SEQ = 4, 3


def empty(n_cells=24):
    return books.open_book(Extent(n_cells=n_cells, block_size=B), MaskSpec(), N_SEQ)


def laid(book, cells, positions, *seqs):
    """With tokens of sequences in these cells, which were empty."""
    pos, owners = book.cells.pos.copy(), book.cells.seqs.copy()
    assert (pos[cells] < 0).all()
    pos[cells], owners[cells, 0] = positions, sum(1 << s for s in seqs)
    new = dataclasses.replace(book.cells, pos=pos, seqs=owners)
    return dataclasses.replace(book, cells=new)


def to_blocks(book, seq=0):
    return in_blocks.to_blocks(book, seq, B)


def table(book, seq=0):
    return blocks.table(book.cells, seq, B)


def appended(book, seq, n):
    """After n tokens; the book, their cells, and the rows that were copied first."""
    first = {seq: books.n_past(book, seq)}
    seq_ids = np.full(n, seq, np.int32)
    book, rows = in_blocks.own(book, seq_ids, first)
    if book.blocks is None:
        found = books.find(book, n, first, int(kc.n_used(book.cells)))
    else:
        found = in_blocks.find(book, seq_ids, first)
    pos = np.arange(first[seq], first[seq] + n, dtype=np.int32)
    cells = kc.place(found.book.cells, found.slots, pos, seq_ids)
    return books.placed(found.book, cells, int(kc.next_head(found.slots))), found.slots, rows


def pairs(rows):
    return list(zip(*(x.tolist() for x in rows), strict=True))


def test_what_lies_in_whole_blocks_stays_where_it_is():
    book = laid(empty(), range(8, 18), range(10), 0)
    after, rows = to_blocks(book)
    assert pairs(rows) == [] and after.cells is book.cells
    assert table(after) == (2, 3, 4)
    assert books.to_cells(after, [0]).cells is book.cells
    assert books.to_cells(after, [0]).blocks is None
    # Again is nothing new.
    assert to_blocks(after)[0] is after


def test_only_what_lies_wrong_is_copied():
    """Entry 0 lies well, 1 has one token elsewhere, 2 lies one cell too far."""
    book = laid(empty(), [*range(4), 8, 9, 10, 21, 13, 14], range(10), 0)
    after, rows = to_blocks(book)
    # Block 2 takes in the token from cell 21; blocks 1 and 4 are empty.
    assert pairs(rows) == [(13, 4), (14, 5), (21, 11)]
    assert table(after) == (0, 2, 1)
    assert after.cells.pos.tolist()[:12] == [0, 1, 2, 3, 8, 9, -1, -1, 4, 5, 6, 7]
    assert (after.cells.pos[12:] < 0).all() and not after.cells.seqs[12:].any()


def test_pending_shifts_move_along():
    book = laid(empty(), range(1, 5), range(4, 8), 0)
    book, _ = books.add(book, 0, 0, None, -4)
    after, rows = to_blocks(book)
    assert pairs(rows) == [(1, 8), (2, 9), (3, 10), (4, 11)]
    assert after.cells.delta[8:12].tolist() == [-4] * 4 and not after.cells.delta[:8].any()


def test_a_foreign_cell_in_the_block_moves_the_sequence_not_the_other():
    book = laid(laid(empty(), [4, 5], [0, 1], 0), [6], [0], 1)
    after, rows = to_blocks(book)
    assert pairs(rows) == [(4, 0), (5, 1)]
    assert np.flatnonzero(kc.owned(after.cells, 1)).tolist() == [6]


def test_shared_cells_stay_shared_in_whole_blocks_and_are_copied_from_others():
    book = laid(laid(empty(), range(4, 10), range(6), 0, 1), [10], [6], 0)
    # Sequence 1 shares block 1; in block 2 lies a token that is not its own.
    after, rows = to_blocks(book, 1)
    assert pairs(rows) == [(8, 0), (9, 1)]
    assert table(after, 1) == (1, 0)
    assert np.flatnonzero(kc.owned(after.cells, 0)).tolist() == list(range(4, 11))
    # Sequence 0 lies well, for the other has left block 2.
    both, rows = to_blocks(after, 0)
    assert pairs(rows) == [] and table(both, 0) == (1, 2)


def test_the_first_to_write_to_a_shared_block_takes_a_block_of_its_own():
    book, _ = to_blocks(laid(empty(), range(6), range(6), 0, 1))
    book, rows = to_blocks(book, 1)
    assert pairs(rows) == [] and table(book, 0) == table(book, 1) == (0, 1)
    book, slots, rows = appended(book, 1, 3)
    assert pairs(rows) == [(4, 8), (5, 9)] and slots.tolist() == [10, 11, 12]
    assert table(book, 1) == (0, 2, 3)
    # Now sequence 0 is alone there, and nothing has to be copied.
    book, slots, rows = appended(book, 0, 1)
    assert pairs(rows) == [] and slots.tolist() == [6]


def test_a_block_of_another_sequence_in_blocks_is_not_added_to():
    book, _ = to_blocks(laid(empty(), [4, 5], [0, 1], 0, 1))
    book = laid(book, [12], [2], 1)
    after, rows = to_blocks(book, 1)
    assert pairs(rows) == [(4, 0), (5, 1), (12, 2)]
    assert table(after, 0) == (1,) and table(after, 1) == (0,)


def test_a_cut_in_a_shared_block_copies_when_it_is_written_again():
    book, _ = to_blocks(laid(empty(), range(8), range(8), 0))
    book = books.cp(book, 0, 1)
    book = books.rm(book, 0, 6)
    assert table(book) == (0, 1) and kc.seq_pos_max(book.cells, 1) == 7
    book, slots, rows = appended(book, 0, 1)
    assert pairs(rows) == [(4, 8), (5, 9)] and slots.tolist() == [10]
    assert np.flatnonzero(kc.owned(book.cells, 1)).tolist() == list(range(8))


def test_tables_follow_removals_and_blocks_without_tokens_are_free():
    book, _ = to_blocks(laid(empty(), range(14), range(14), 0))
    assert table(book) == (0, 1, 2, 3)
    hole = books.rm(book, 0, 5, 13)
    assert table(hole) == (0, 1, -1, 3)
    # The hole's places are kept, but for block 2, which is whole: 8 of 10 cells that the rest has.
    assert books.n_loose(hole) == 8 + 4
    assert table(books.rm(book, 0, 5)) == (0, 1)
    assert table(books.rm(book, 0, 0, 4)) == (-1, 1, 2, 3)
    for gone in (books.rm(book, 0), books.rm(book, None), books.keep(book, 1), books.clear(book)):
        assert gone.blocks is None and books.n_loose(gone) == 24
    assert books.keep(book, 0).blocks == book.blocks


def test_a_sequence_without_tokens_lies_in_blocks_from_its_first():
    book = laid(empty(), [0], [0], 1)
    book, rows = to_blocks(book)
    assert pairs(rows) == [] and table(book) == ()
    book, slots, _ = appended(book, 0, 5)
    assert slots.tolist() == [4, 5, 6, 7, 8]
    assert books.rm(book, 1).blocks == book.blocks


def test_sequences_in_cells_leave_the_places_of_others_alone():
    book, _ = to_blocks(laid(empty(16), range(5), range(5), 0))
    book, slots, _ = appended(book, 1, 8)
    assert slots.tolist() == list(range(8, 16)) and books.n_loose(book) == 0
    with pytest.raises(CacheFull, match="batch needs 1 cells, 0 of 16 are empty"):
        appended(book, 1, 1)
    assert blocks.room(book.cells, book.blocks, 0, 5) == 3
    book, slots, _ = appended(book, 0, 3)
    assert slots.tolist() == [5, 6, 7]
    with pytest.raises(CacheFull, match=r"1 tokens in blocks: 1 empty blocks of 4 .*, 0 of 4 are"):
        appended(book, 0, 1)


def test_copies_for_a_move_leave_the_places_of_others_alone():
    book, _ = to_blocks(laid(empty(12), range(5), range(5), 0))
    book = books.cp(book, 0, 1)
    moved, rows = books.add(book, 1, 2, None, 3)
    assert pairs(rows) == [(2, 8), (3, 9), (4, 10)]
    assert table(moved) == (0, 1)
    with pytest.raises(CacheFull, match="needs 5 cells, 4 of 12"):
        books.add(book, 1, 0, None, 3)


def test_one_step_for_sequences_of_both_kinds():
    book, _ = to_blocks(laid(empty(16), range(4), range(4), 0))
    book = laid(book, [6], [0], 1)
    seq_ids = np.array([1, 0, 1, 0, 1], np.int32)
    book, _ = in_blocks.own(book, seq_ids, {0: 4, 1: 1})
    found = in_blocks.find(book, seq_ids, {0: 4, 1: 1})
    # The whole block 2 goes to sequence 0, before others take its cells.
    assert found.slots.tolist() == [4, 8, 5, 9, 7]


def test_a_restore_beside_blocks_counts_the_cells_that_are_left():
    book, _ = to_blocks(laid(empty(12), range(5), range(5), 0))
    source = insert.Source(
        n_cells=64,
        head=5,
        index=np.arange(5, dtype=np.int32),
        pos=np.arange(5, dtype=np.int32),
        seqs=np.ones((5, 1), np.uint32),
        lost={},
    )
    with pytest.raises(CacheFull, match="the session needs 5 cells, 4 of 12 are free"):
        insert.into_book(book, source, {0: 1})
    less = dataclasses.replace(
        source, index=source.index[:4], pos=source.pos[:4], seqs=source.seqs[:4]
    )
    _, out = insert.into_book(book, less, {0: 1})
    assert out.tolist() == [8, 9, 10, 11]


def test_what_cannot_be_is_refused():
    book, _ = to_blocks(laid(empty(), range(6), range(6), 0))
    for move in (books.add, books.div):
        with pytest.raises(BadRange, match=r"4 positions of sequence 0 cannot move: .*to_cells"):
            move(book, 0, 2, None, 2)
        assert move(book, 0, 6, None, 2)[0].cells.pos.tolist() == book.cells.pos.tolist()
    other = laid(book, [12], [7], 1)
    with pytest.raises(BadRange, match="sequence 0 lies in blocks and cannot share 1 cells of seq"):
        books.cp(other, 1, 0)
    twice = laid(laid(empty(), [0, 1], [3, 3], 0), [4], [3], 0)
    with pytest.raises(UsageError, match="sequence 0 holds position 3 3 times"):
        to_blocks(twice)
    full = laid(laid(empty(11), [1, 2], [0, 1], 0), [4], [0], 1)
    # Cells 8 to 10 are no whole block.
    with pytest.raises(CacheFull, match="1 empty blocks of 4 cells are needed, 0 of 2 are empty"):
        to_blocks(full)


def test_copied_tokens_are_marked_as_ones_own():
    held = CacheContents(books=(laid(empty(), range(2, 6), range(4), 0, 1),))
    ids = np.arange(4, dtype=np.int32)
    text = contents.texts.append(held.text, np.zeros(4, np.int32), ids, ids + 7)
    held = dataclasses.replace(held, text=contents.texts.cp(text, 0, 1))
    moved, _ = contents.to_blocks(held, 1, B)
    ours, theirs = (contents.texts.entries(moved.text, s) for s in (1, 0))
    assert ours[:2].tolist() == theirs[:2].tolist()
    assert not set(ours[2]) & set(theirs[2])
    assert moved.text.exact == held.text.exact


# --- any history -----------------------------------------------------------------------------

SEQS = st.integers(0, N_SEQ - 1)
ENDS = st.one_of(st.none(), st.integers(0, 14))
OPERATIONS = st.one_of(
    st.tuples(st.just("append"), SEQS, st.integers(1, 6)),
    st.tuples(st.just("rm"), SEQS, st.integers(0, 9), ENDS),
    st.tuples(st.just("cp"), SEQS, SEQS, ENDS),
    st.tuples(st.just("add"), SEQS, st.integers(0, 9), st.integers(-3, 3)),
    st.tuples(st.just("to_blocks"), SEQS),
    st.tuples(st.just("to_blocks"), SEQS),
    st.tuples(st.just("to_cells"), SEQS),
)


class Plain:
    """A book with the token in each row, and by sequence the tokens that it should have."""

    def __init__(self):
        self.book, self.rows = empty(26), np.full(26, -1)
        self.tokens: dict[int, set[tuple[int, int]]] = {s: set() for s in range(N_SEQ)}
        self.n = 0

    def copy(self, rows):
        src, dst = rows
        assert (self.book.cells.pos[dst] < 0).all() and len(set(dst.tolist())) == len(dst)
        self.rows[dst] = self.rows[src]

    def append(self, seq, n):
        held, first = self.book.blocks, books.n_past(self.book, seq)
        if held is not None and seq in held.seqs:
            room = blocks.room(self.book.cells, held, seq, first)
        else:
            room = books.n_loose(self.book)
        if n > room:
            with pytest.raises(CacheFull):
                appended(self.book, seq, n)
            return
        new, slots, rows = appended(self.book, seq, n)
        self.copy(rows)
        self.rows[slots] = range(self.n, self.n + n)
        self.tokens[seq] |= {(first + i, self.n + i) for i in range(n)}
        self.book, self.n = new, self.n + n

    def rm(self, seq, p0, p1):
        p1 = p1 if p1 is None else p0 + p1
        self.book = books.rm(self.book, seq, p0, p1)
        self.tokens[seq] = {
            x for x in self.tokens[seq] if x[0] < p0 or (p1 is not None and x[0] >= p1)
        }

    def cp(self, src, dst, p1):
        if src != dst and not self.tokens[dst]:
            if self.book.blocks and dst in self.book.blocks.seqs:
                return
            self.book = books.cp(self.book, src, dst, 0, p1)
            self.tokens[dst] = {x for x in self.tokens[src] if p1 is None or x[0] < p1}

    def add(self, seq, p0, d):
        taken = {p for p, _ in self.tokens[seq] if p < p0}
        moved = {(p + d, t) for p, t in self.tokens[seq] if p >= p0}
        if any(p in taken or p < 0 for p, _ in moved):
            return
        try:
            new, rows = books.add(self.book, seq, p0, None, d)
        except (BadRange, CacheFull):
            return
        self.copy(rows)
        self.book = new
        self.tokens[seq] = {x for x in self.tokens[seq] if x[0] < p0} | moved

    def to_blocks(self, seq):
        try:
            new, rows = to_blocks(self.book, seq)
        except CacheFull:
            return
        self.copy(rows)
        self.book = new

    def to_cells(self, seq):
        self.book = books.to_cells(self.book, [seq])

    def check(self):
        cells, held = self.book.cells, self.book.blocks
        seqs = held.seqs if held else frozenset()
        assert ((cells.pos >= 0) == cells.seqs.any(axis=1)).all()
        for s in range(N_SEQ):
            mine = np.flatnonzero(kc.owned(cells, s))
            found = set(zip(cells.pos[mine].tolist(), self.rows[mine].tolist(), strict=True))
            assert found == self.tokens[s] and len(mine) == len(found)
            if s in seqs:
                places = np.array(table(self.book, s))[cells.pos[mine] // B] * B
                np.testing.assert_array_equal(places + cells.pos[mine] % B, mine)


@pytest.mark.parametrize("n", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_any_history_keeps_tokens_and_places(n):
    @settings(max_examples=n, deadline=None)
    @given(st.lists(OPERATIONS, max_size=25))
    def run(operations):
        replay(operations)

    run()


def replay(operations):
    at = Plain()
    at.append(0, 5)
    for name, *arguments in operations:
        getattr(at, name)(*arguments)
        at.check()


def test_errors_are_on_one_line():
    book, _ = to_blocks(laid(empty(8), range(6), range(6), 0))
    for call in (lambda: appended(book, 0, 9), lambda: books.add(book, 0, 0, None, 1)):
        with pytest.raises(KvrtError) as caught:
            call()
        assert "\n" not in str(caught.value)
