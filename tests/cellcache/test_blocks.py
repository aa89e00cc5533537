"""Sequences in blocks: their places, what is copied to get there, who keeps what, and refusals."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from named_edits import NamedEdits, alone

from kvrt import MaskSpec
from kvrt import cells as kc
from kvrt.cellcache import blocks, contents, history, insert, saved
from kvrt.cellcache import group as groups
from kvrt.cellcache.contents import CacheContents
from kvrt.errors import BadRange, CacheFull, KvrtError, UsageError
from kvrt.sizes import Extent

B, N_SEQ = 4, 3
shift = NamedEdits(groups.apply)
edit = NamedEdits(alone(groups.apply))


def empty(n_cells=24):
    return groups.open_group(Extent(n_cells=n_cells, block_size=B), MaskSpec(), N_SEQ)


def laid(group, cells, positions, *seqs):
    """With tokens of sequences in these cells, which were empty."""
    pos, owners = group.cells.pos.copy(), group.cells.seqs.copy()
    assert (pos[cells] < 0).all()
    pos[cells], owners[cells, 0] = positions, sum(1 << s for s in seqs)
    new = dataclasses.replace(group.cells, pos=pos, seqs=owners)
    return dataclasses.replace(group, cells=new)


def to_blocks(group, seq=0):
    return groups.group_to_blocks(group, seq, B)


def table(group, seq=0):
    return blocks.block_table(group.cells, seq, B)


def appended(group, seq, n):
    """After n tokens; the group, their cells, and the rows that were copied first."""
    first = {seq: groups.n_past(group, seq)}
    seq_ids = np.full(n, seq, np.int32)
    group, rows = groups.group_copy_on_write(group, seq_ids, first)
    if group.blocks is None:
        found = groups.find(group, n, first, int(kc.n_used(group.cells)))
    else:
        found = groups.find_in_blocks(group, seq_ids, first)
    pos = np.arange(first[seq], first[seq] + n, dtype=np.int32)
    cells = kc.place(found.group.cells, found.slots, pos, seq_ids)
    head = int(kc.next_head(found.slots))
    return dataclasses.replace(found.group, cells=cells, head=head), found.slots, rows


def pairs(rows):
    return list(zip(*(x.tolist() for x in rows), strict=True))


def test_what_lies_in_whole_blocks_stays_where_it_is():
    group = laid(empty(), range(8, 18), range(10), 0)
    after, rows = to_blocks(group)
    assert pairs(rows) == [] and after.cells is group.cells
    assert table(after) == (2, 3, 4)
    assert groups.group_to_cells(after, [0]).cells is group.cells
    assert groups.group_to_cells(after, [0]).blocks is None
    # Again is nothing new.
    assert to_blocks(after)[0] is after


def test_only_what_lies_wrong_is_copied():
    """Entry 0 lies well, 1 has one token elsewhere, 2 lies one cell too far."""
    group = laid(empty(), [*range(4), 8, 9, 10, 21, 13, 14], range(10), 0)
    after, rows = to_blocks(group)
    # Block 2 takes in the token from cell 21; blocks 1 and 4 are empty.
    assert pairs(rows) == [(13, 4), (14, 5), (21, 11)]
    assert table(after) == (0, 2, 1)
    assert after.cells.pos.tolist()[:12] == [0, 1, 2, 3, 8, 9, -1, -1, 4, 5, 6, 7]
    assert (after.cells.pos[12:] < 0).all() and not after.cells.seqs[12:].any()


def test_pending_shifts_move_along():
    group = laid(empty(), range(1, 5), range(4, 8), 0)
    group, _ = shift.add(group, 0, 0, None, -4)
    after, rows = to_blocks(group)
    assert pairs(rows) == [(1, 8), (2, 9), (3, 10), (4, 11)]
    assert after.cells.delta[8:12].tolist() == [-4] * 4 and not after.cells.delta[:8].any()


def test_beside_a_foreign_cell_a_sequence_stays_until_it_writes_there():
    group = laid(laid(empty(), [4, 5], [0, 1], 0), [6], [0], 1)
    after, rows = to_blocks(group)
    assert pairs(rows) == [] and table(after) == (1,)
    after, slots, rows = appended(after, 0, 1)
    assert pairs(rows) == [(4, 0), (5, 1)] and slots.tolist() == [2]
    assert np.flatnonzero(kc.owned(after.cells, 1)).tolist() == [6]


def test_beside_a_foreign_cell_nothing_is_added():
    group = laid(laid(empty(), [4, 5, 10], [0, 1, 2], 0), [6], [0], 1)
    after, rows = to_blocks(group)
    assert pairs(rows) == [(4, 8), (5, 9)] and table(after) == (2,)


def test_what_lies_in_blocks_that_others_entered_is_restored_where_no_block_is_empty():
    """Sequence 1 keeps tokens that the first one has removed, in blocks of the first one."""
    group, _ = to_blocks(laid(empty(8), range(8), range(8), 0, 1))
    group = edit.rm(edit.rm(group, 0, 2, 4), 0, 6)
    used = np.flatnonzero(group.cells.pos >= 0).astype(np.int32)
    kept = saved.SavedCells(
        n_cells=8,
        head=group.head,
        index=used,
        pos=group.cells.pos[used],
        seqs=group.cells.seqs[used],
        lost={},
    )
    restored, out = insert.into_group(empty(8), kept, {0: 0, 1: 1})
    assert out.tolist() == used.tolist()
    after, rows = to_blocks(restored)
    assert pairs(rows) == [] and table(after) == table(group) == (0, 1)


def test_shared_cells_stay_shared_in_whole_blocks_and_are_copied_from_others():
    group = laid(laid(empty(), range(4, 10), range(6), 0, 1), [10], [6], 0)
    # Sequence 1 shares block 1, and block 2 as well, where a token is not its own.
    after, rows = to_blocks(group, 1)
    assert pairs(rows) == [] and table(after, 1) == (1, 2)
    both, rows = to_blocks(after, 0)
    assert pairs(rows) == [] and table(both, 0) == (1, 2)
    both, slots, rows = appended(both, 1, 1)
    assert pairs(rows) == [(8, 0), (9, 1)] and slots.tolist() == [2]
    assert table(both, 1) == (1, 0) and table(both, 0) == (1, 2)
    assert np.flatnonzero(kc.owned(both.cells, 0)).tolist() == list(range(4, 11))


def test_the_first_to_write_to_a_shared_block_takes_a_block_of_its_own():
    group, _ = to_blocks(laid(empty(), range(6), range(6), 0, 1))
    group, rows = to_blocks(group, 1)
    assert pairs(rows) == [] and table(group, 0) == table(group, 1) == (0, 1)
    group, slots, rows = appended(group, 1, 3)
    assert pairs(rows) == [(4, 8), (5, 9)] and slots.tolist() == [10, 11, 12]
    assert table(group, 1) == (0, 2, 3)
    # Now sequence 0 is alone there, and nothing has to be copied.
    group, slots, rows = appended(group, 0, 1)
    assert pairs(rows) == [] and slots.tolist() == [6]


def test_a_block_of_another_sequence_in_blocks_is_not_added_to():
    group, _ = to_blocks(laid(empty(), [4, 5], [0, 1], 0, 1))
    group = laid(group, [12], [2], 1)
    after, rows = to_blocks(group, 1)
    assert pairs(rows) == [(4, 0), (5, 1), (12, 2)]
    assert table(after, 0) == (1,) and table(after, 1) == (0,)


def test_a_cut_in_a_shared_block_copies_when_it_is_written_again():
    group, _ = to_blocks(laid(empty(), range(8), range(8), 0))
    group = edit.cp(group, 0, 1)
    group = edit.rm(group, 0, 6)
    assert table(group) == (0, 1) and kc.seq_pos_max(group.cells, 1) == 7
    group, slots, rows = appended(group, 0, 1)
    assert pairs(rows) == [(4, 8), (5, 9)] and slots.tolist() == [10]
    assert np.flatnonzero(kc.owned(group.cells, 1)).tolist() == list(range(8))


def test_tables_follow_removals_and_blocks_without_tokens_are_free():
    group, _ = to_blocks(laid(empty(), range(14), range(14), 0))
    assert table(group) == (0, 1, 2, 3)
    hole = edit.rm(group, 0, 5, 13)
    assert table(hole) == (0, 1, -1, 3)
    # The hole's places are kept, but for block 2, which is whole: 8 of 10 cells that the rest has.
    assert groups.n_unreserved(hole) == 8 + 4
    assert table(edit.rm(group, 0, 5)) == (0, 1)
    assert table(edit.rm(group, 0, 0, 4)) == (-1, 1, 2, 3)
    for gone in (edit.rm(group, 0), edit.rm(group, None), edit.keep(group, 1), groups.clear(group)):
        assert gone.blocks is None and groups.n_unreserved(gone) == 24
    assert edit.keep(group, 0).blocks == group.blocks


def test_a_sequence_without_tokens_lies_in_blocks_from_its_first():
    group = laid(empty(), [0], [0], 1)
    group, rows = to_blocks(group)
    assert pairs(rows) == [] and table(group) == ()
    group, slots, _ = appended(group, 0, 5)
    assert slots.tolist() == [4, 5, 6, 7, 8]
    assert edit.rm(group, 1).blocks == group.blocks


def test_sequences_in_cells_leave_the_places_of_others_alone():
    group, _ = to_blocks(laid(empty(16), range(5), range(5), 0))
    group, slots, _ = appended(group, 1, 8)
    assert slots.tolist() == list(range(8, 16)) and groups.n_unreserved(group) == 0
    with pytest.raises(CacheFull, match="batch needs 1 cells, 0 of 16 are empty"):
        appended(group, 1, 1)
    assert blocks.n_room(group.cells, group.blocks, 0, 5) == 3
    group, slots, _ = appended(group, 0, 3)
    assert slots.tolist() == [5, 6, 7]
    with pytest.raises(CacheFull, match=r"1 tokens in blocks: 1 empty blocks of 4 .*, 0 of 4 are"):
        appended(group, 0, 1)


def test_copies_for_a_move_leave_the_places_of_others_alone():
    group, _ = to_blocks(laid(empty(12), range(5), range(5), 0))
    group = edit.cp(group, 0, 1)
    after, rows = shift.add(group, 1, 2, None, 3)
    assert pairs(rows) == [(2, 8), (3, 9), (4, 10)]
    assert table(after) == (0, 1)
    with pytest.raises(CacheFull, match="needs 5 cells, 4 of 12"):
        shift.add(group, 1, 0, None, 3)


def test_one_step_for_sequences_of_both_kinds():
    group, _ = to_blocks(laid(empty(16), range(4), range(4), 0))
    group = laid(group, [6], [0], 1)
    seq_ids = np.array([1, 0, 1, 0, 1], np.int32)
    group, _ = groups.group_copy_on_write(group, seq_ids, {0: 4, 1: 1})
    found = groups.find_in_blocks(group, seq_ids, {0: 4, 1: 1})
    # The whole block 2 goes to sequence 0, before others take its cells.
    assert found.slots.tolist() == [4, 8, 5, 9, 7]


def test_a_restore_beside_blocks_counts_the_cells_that_are_left():
    group, _ = to_blocks(laid(empty(12), range(5), range(5), 0))
    source = saved.SavedCells(
        n_cells=64,
        head=5,
        index=np.arange(5, dtype=np.int32),
        pos=np.arange(5, dtype=np.int32),
        seqs=np.ones((5, 1), np.uint32),
        lost={},
    )
    with pytest.raises(CacheFull, match="the session needs 5 cells, 4 of 12 are free"):
        insert.into_group(group, source, {0: 1})
    less = dataclasses.replace(
        source, index=source.index[:4], pos=source.pos[:4], seqs=source.seqs[:4]
    )
    _, out = insert.into_group(group, less, {0: 1})
    assert out.tolist() == [8, 9, 10, 11]


def test_what_cannot_be_is_refused():
    group, _ = to_blocks(laid(empty(), range(6), range(6), 0))
    for move in (shift.add, shift.div):
        with pytest.raises(BadRange, match=r"4 positions of sequence 0 cannot move: .*to_cells"):
            move(group, 0, 2, None, 2)
        assert move(group, 0, 6, None, 2)[0].cells.pos.tolist() == group.cells.pos.tolist()
    other = laid(group, [12], [7], 1)
    with pytest.raises(BadRange, match="sequence 0 lies in blocks and cannot share 1 cells of seq"):
        edit.cp(other, 1, 0)
    twice = laid(laid(empty(), [0, 1], [3, 3], 0), [4], [3], 0)
    with pytest.raises(UsageError, match="sequence 0 holds position 3 3 times"):
        to_blocks(twice)
    full = laid(laid(empty(11), [1, 2], [0, 1], 0), [4], [0], 1)
    # Cells 8 to 10 are no whole block.
    with pytest.raises(CacheFull, match="1 empty blocks of 4 cells are needed, 0 of 2 are empty"):
        to_blocks(full)


def test_copied_tokens_are_marked_as_ones_own():
    held = CacheContents(groups=(laid(empty(), range(2, 6), range(4), 0, 1),))
    ids = np.arange(4, dtype=np.int32)
    tokens = history.append(held.history, np.zeros(4, np.int32), ids, ids + 7)
    held = dataclasses.replace(held, history=NamedEdits(history.apply).cp(tokens, 0, 1))
    after, _ = contents.to_blocks(held, 1, B)
    ours, theirs = (history.entries(after.history, s) for s in (1, 0))
    assert ours[:2].tolist() == theirs[:2].tolist()
    assert not set(ours[2]) & set(theirs[2])
    assert after.history.exact == held.history.exact


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
    """A group with the token in each row, and by sequence the tokens that it should have."""

    def __init__(self):
        self.group, self.rows = empty(26), np.full(26, -1)
        self.tokens: dict[int, set[tuple[int, int]]] = {s: set() for s in range(N_SEQ)}
        self.n = 0

    def copy(self, rows):
        src, dst = rows
        assert (self.group.cells.pos[dst] < 0).all() and len(set(dst.tolist())) == len(dst)
        self.rows[dst] = self.rows[src]

    def append(self, seq, n):
        held, first = self.group.blocks, groups.n_past(self.group, seq)
        if held is not None and seq in held.seqs:
            room = blocks.n_room(self.group.cells, held, seq, first)
        else:
            room = groups.n_unreserved(self.group)
        if n > room:
            with pytest.raises(CacheFull):
                appended(self.group, seq, n)
            return
        new, slots, rows = appended(self.group, seq, n)
        self.copy(rows)
        self.rows[slots] = range(self.n, self.n + n)
        self.tokens[seq] |= {(first + i, self.n + i) for i in range(n)}
        self.group, self.n = new, self.n + n

    def rm(self, seq, p0, p1):
        p1 = p1 if p1 is None else p0 + p1
        self.group = edit.rm(self.group, seq, p0, p1)
        self.tokens[seq] = {
            x for x in self.tokens[seq] if x[0] < p0 or (p1 is not None and x[0] >= p1)
        }

    def cp(self, src, dst, p1):
        if src != dst and not self.tokens[dst]:
            if self.group.blocks and dst in self.group.blocks.seqs:
                return
            self.group = edit.cp(self.group, src, dst, 0, p1)
            self.tokens[dst] = {x for x in self.tokens[src] if p1 is None or x[0] < p1}

    def add(self, seq, p0, d):
        taken = {p for p, _ in self.tokens[seq] if p < p0}
        moved = {(p + d, t) for p, t in self.tokens[seq] if p >= p0}
        if any(p in taken or p < 0 for p, _ in moved):
            return
        try:
            new, rows = shift.add(self.group, seq, p0, None, d)
        except (BadRange, CacheFull):
            return
        self.copy(rows)
        self.group = new
        self.tokens[seq] = {x for x in self.tokens[seq] if x[0] < p0} | moved

    def to_blocks(self, seq):
        try:
            new, rows = to_blocks(self.group, seq)
        except CacheFull:
            return
        self.copy(rows)
        self.group = new

    def to_cells(self, seq):
        self.group = groups.group_to_cells(self.group, [seq])

    def check(self):
        cells, held = self.group.cells, self.group.blocks
        seqs = held.seqs if held else frozenset()
        assert ((cells.pos >= 0) == cells.seqs.any(axis=1)).all()
        for s in range(N_SEQ):
            mine = np.flatnonzero(kc.owned(cells, s))
            found = set(zip(cells.pos[mine].tolist(), self.rows[mine].tolist(), strict=True))
            assert found == self.tokens[s] and len(mine) == len(found)
            if s in seqs:
                places = np.array(table(self.group, s))[cells.pos[mine] // B] * B
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
    group, _ = to_blocks(laid(empty(8), range(6), range(6), 0))
    for call in (lambda: appended(group, 0, 9), lambda: shift.add(group, 0, 0, None, 1)):
        with pytest.raises(KvrtError) as caught:
            call()
        assert "\n" not in str(caught.value)
