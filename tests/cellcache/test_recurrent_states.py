"""Kept states of recurrent layers: which token reads and writes which, and what can be cut back."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from named_edits import NamedEdits

from kvrt.cellcache import recurrent
from kvrt.cellcache.recurrent import RecurrentStates
from kvrt.errors import BadRange, CannotRewind

edit = NamedEdits(recurrent.apply)


def taken(held, *seqs):
    """The states after one token for each of `seqs`, in this order."""
    ids = np.array(seqs, np.int32)
    first = {s: recurrent.n_past(held, s) for s in seqs}
    return recurrent.plan_states(held, ids, first).after


def of(n, depth=1, n_seq=2):
    return taken(RecurrentStates(n_states=n_seq * depth, depth=depth), *[0] * n)


def positions(held, seq=0):
    return [pos for pos, _ in held.kept.get(seq, ())]


def test_a_token_reads_the_row_of_the_one_before_it():
    empty = RecurrentStates(n_states=2, depth=1)
    plan = recurrent.plan_states(empty, np.array([0, 0, 1, 0], np.int32), {0: 0, 1: 0})
    # 2 stands for no state yet.
    assert plan.src.tolist() == [2, 0, 2, 0]
    assert plan.dst.tolist() == [0, 0, 1, 0]
    assert plan.after.kept == {0: ((2, 0),), 1: ((0, 1),)}


def test_the_newest_states_are_kept():
    held = of(9, depth=3)
    assert positions(held) == [6, 7, 8]
    assert recurrent.resume_gaps(held, 0) == ((1, 7),)
    assert positions(edit.rm(held, 0, 7)) == [6]
    assert recurrent.n_past(edit.rm(held, 0, 8), 0) == 8
    assert edit.rm(held, 0).kept == {}


@pytest.mark.parametrize("within", [(6, None), (0, 4), (3, 5), (1, 9), (8, 9)])
def test_a_part_of_a_state_cannot_be_removed(within):
    held = of(10, depth=3)
    with pytest.raises(CannotRewind, match="ends at 10 and can be cut back to 8 at the earliest"):
        edit.rm(held, 0, *within)


@pytest.mark.parametrize("within", [(10, None), (3, 3), (12, 20), (0, 10), (8, 10), (9, 30)])
def test_all_of_it_its_end_and_nothing_can(within):
    held = of(10, depth=3)
    left = positions(edit.rm(held, 0, *within))
    assert left == [p for p in (7, 8, 9) if not within[0] <= p < (within[1] or 99)]
    assert positions(edit.rm(held, None, *within)) == left


def test_a_copy_shares_rows_until_it_writes():
    held = edit.cp(of(5, depth=2, n_seq=2), 0, 1)
    assert held.kept[1] == held.kept[0]
    plan = recurrent.plan_states(held, np.array([1, 0], np.int32), {0: 5, 1: 5})
    (_, old), (_, newest) = held.kept[0]
    assert plan.src.tolist() == [newest, newest]
    # Sequence 1 may write no row that 0 still needs.
    assert set(plan.dst.tolist()) & {newest} == set() and plan.dst[0] != old
    assert [r for _, r in plan.after.kept[1]] == [newest, plan.dst[0]]


def test_copies_begin_at_0_end_at_a_state_and_need_an_empty_sequence():
    held = of(10, depth=3)
    assert positions(edit.cp(held, 0, 1, 0, 9), 1) == [7, 8]
    assert edit.cp(held, 0, 0) is held
    for within in ((1, None), (0, 7)):
        with pytest.raises(CannotRewind, match="copied from position 0 to 8 or beyond"):
            edit.cp(held, 0, 1, *within)
    with pytest.raises(CannotRewind, match="into an empty sequence"):
        edit.cp(taken(held, 1), 0, 1)


def test_positions_cannot_move():
    held = of(4)
    for move in (edit.add, edit.div):
        with pytest.raises(CannotRewind, match="its 4 tokens are one state"):
            move(held, 0, 2, None, 3)
        assert move(held, 0, 4, None, 3) is held
        assert move(held, 1, 0, None, 3) is held
    assert edit.add(held, 0, 0, None, 0) is held and edit.div(held, 0, 0, None, 1) is held
    with pytest.raises(BadRange):
        edit.add(held, 0, 3, 2, 0)


def test_a_probe_leaves_every_state_as_it_is():
    held = of(4)
    ((_, row),) = held.kept[0]
    plan = recurrent.plan_probe(held, 0, 3)
    # They all write to one state, which is put back after them.
    assert plan.src.tolist() == plan.dst.tolist() == [row] * 3
    assert plan.after is held
    plan, free = recurrent.plan_probe(held, 1, 2), 1 - row
    assert plan.src.tolist() == [2, free] and plan.dst.tolist() == [free, free]


def test_rows_can_be_looked_at_as_cells():
    cells = recurrent.as_cells(edit.cp(of(3), 0, 1), 2)
    assert cells.pos.tolist() == [2, -1] and cells.seqs[:, 0].tolist() == [3, 0]


STEPS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 2), min_size=1, max_size=7).map(lambda x: ("step", x)),
        st.tuples(st.just("cut"), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("copy"), st.integers(0, 2), st.integers(0, 2)),
    ),
    max_size=20,
)


@settings(max_examples=100)
@given(steps=STEPS, depth=st.integers(1, 3))
def test_rows_hold_what_plain_lists_say(steps, depth):
    """A row's content is the history of the token that wrote it last, as if it were the state."""
    held, rows, n = RecurrentStates(n_states=3 * depth, depth=depth), {}, 0
    texts = {0: [], 1: [], 2: []}
    for kind, *args in steps:
        if kind == "step":
            (seqs,) = args
            first = {s: len(texts[s]) for s in seqs}
            plan = recurrent.plan_states(held, np.array(seqs, np.int32), first)
            for s, src, dst in zip(seqs, plan.src.tolist(), plan.dst.tolist(), strict=True):
                before = rows.get(src, ()) if src < held.n_states else ()
                assert list(before) == texts[s]
                n += 1
                texts[s].append(n)
                rows[dst] = tuple(texts[s])
            held = plan.after
        elif kind == "cut":
            s, back = args
            end = len(texts[s]) - back
            if end >= 0 and not any(a <= end < b for a, b in recurrent.resume_gaps(held, s)):
                held = edit.rm(held, s, end)
                texts[s] = texts[s][:end]
        elif not texts[args[1]]:
            held = edit.cp(held, *args)
            texts[args[1]] = list(texts[args[0]])
    for s, text in texts.items():
        assert recurrent.n_past(held, s) == len(text)
        for pos, row in held.kept.get(s, ()):
            assert list(rows[row]) == text[: pos + 1]
