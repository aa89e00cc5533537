"""The token history: how much of a sequence is exact, and that appends copy little."""

import dataclasses
import itertools

import numpy as np
import pytest
from named_edits import NamedEdits

from kvrt.cellcache import history, insert
from kvrt.cellcache.history import TokenHistory

edit = NamedEdits(history.apply)


def appended(text, n, seq_id=0, first=None):
    first = len(history.tokens(text, seq_id)) if first is None else first
    pos = np.arange(first, first + n, dtype=np.int32)
    return history.append(text, np.full(n, seq_id, np.int32), pos, pos + np.int32(100))


def ten():
    return appended(TokenHistory(), 10)


CASES = {
    "nothing": (lambda t: t, None),
    "the end goes": (lambda t: edit.rm(t, 0, 6), None),
    "a hole": (lambda t: edit.rm(t, 0, 3, 5), 3),
    "a hole at the beginning": (lambda t: edit.rm(t, 0, 0, 5), 0),
    "a hole, and then what follows it": (lambda t: edit.rm(edit.rm(t, 0, 3, 5), 0, 3), None),
    "all of it": (lambda t: edit.rm(edit.rm(t, 0, 3, 5), 0), None),
    "a move": (lambda t: edit.add(t, 0, 4, None, 7), 4),
    "a move by nothing": (lambda t: edit.add(t, 0, 4, None, 0), None),
    "a move of nothing": (lambda t: edit.add(t, 0, 40, None, 7), None),
    "a division": (lambda t: edit.div(t, 0, 2, 8, 2), 2),
    "tokens after a hole": (lambda t: appended(edit.rm(t, 0, 3, 5), 4), 3),
    "a context shift": (lambda t: edit.add(edit.rm(t, 0, 1, 5), 0, 5, None, -4), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_exact_up_to_the_first_hole(name):
    change, n = CASES[name]
    assert change(ten()).exact.get(0) == n


@pytest.mark.parametrize(
    ("text", "p0", "n"),
    [
        (edit.rm(ten(), 0, 3, 5), 3, 5),  # the hole closes; what is behind it stays inexact
        (edit.rm(ten(), 0, 0, 5), 0, 2),
        (edit.rm(ten(), 0, 3, 6), 4, 3),  # a hole is left before it
        (ten(), 10, None),
        (ten(), 12, 10),
    ],
)
def test_what_fills_a_hole_is_as_exact_as_what_is_before_it(text, p0, n):
    text = appended(text, 2, first=p0)
    assert history.filled(text, 0, p0, 2).exact.get(0) == n


def test_a_copy_is_as_exact_as_its_beginning():
    holed = edit.rm(ten(), 0, 3, 5)
    assert edit.cp(holed, 0, 1).exact[1] == 3
    assert 1 not in edit.cp(holed, 0, 1, 0, 3).exact
    assert edit.cp(ten(), 0, 1, 4).exact == {1: 0}
    both = appended(ten(), 4, seq_id=1)
    assert edit.cp(both, 0, 1, 4).exact == {1: 4}
    assert edit.keep(edit.cp(holed, 0, 1), 1).exact == {1: 3}


def test_what_is_shared_already_is_shared_once():
    text = edit.cp(edit.cp(ten(), 0, 1), 0, 1)
    assert history.positions(text, 1).tolist() == list(range(10))
    # Moved there and back, it is a copy of its own, and a third share comes beside it.
    moved = edit.add(edit.add(text, 1, 0, None, 5), 1, 0, None, -5)
    assert len(history.positions(edit.cp(moved, 0, 1), 1)) == 20


def test_pieces_stay_few():
    text = TokenHistory()
    for _ in range(1000):
        text = appended(text, 1, first=0)
        sizes = [p.shape[1] for p in text.pieces[0]]
        assert all(a >= 2 * b for a, b in itertools.pairwise(sizes))
    assert len(text.pieces[0]) <= 10
    assert history.entries(text, 0)[2].tolist() == list(range(1000))


def test_entries_are_the_callers_own():
    text = ten()
    history.entries(text, 0)[:] = -7
    history.positions(text, 0)[:] = -7
    assert history.tokens(text, 0).tolist() == list(range(100, 110))


def test_edits_change_no_history_before_them():
    text = edit.cp(ten(), 0, 1)
    before = {s: [p.copy() for p in pieces] for s, pieces in text.pieces.items()}
    for change in (
        lambda t: edit.add(t, 0, 3, None, 5),
        lambda t: edit.div(t, 1, 0, None, 2),
        lambda t: edit.rm(t, 0, 2, 4),
        lambda t: history.split(t, 1, np.array([3, 4], np.int32)),
    ):
        change(text)
        for s, pieces in before.items():
            for was, now in zip(pieces, text.pieces[s], strict=True):
                np.testing.assert_array_equal(was, now)


def test_what_is_known_to_share_no_mark_shares_none():
    rng = np.random.default_rng(3)
    for _ in range(30):
        text = TokenHistory()
        for _ in range(20):
            a, b = rng.integers(0, 4, 2).tolist()
            p0 = int(rng.integers(0, 6))
            p1 = [None, p0 + int(rng.integers(0, 4))][int(rng.integers(0, 2))]
            text = [
                lambda t, a=a: appended(t, 3, seq_id=a),
                lambda t, a=a, b=b, p0=p0, p1=p1: edit.cp(t, a, b, p0, p1),
                lambda t, a=a, p0=p0, p1=p1: edit.rm(t, a, p0, p1),
                lambda t, a=a, p0=p0, p1=p1: edit.add(t, a, p0, p1, -2),
                lambda t, a=a, p0=p0, p1=p1: edit.div(t, a, p0, p1, 2),
            ][int(rng.integers(0, 5))](text)
            marks = {s: set(history.entries(text, s)[2].tolist()) for s in text.pieces}
            assert text.unshared <= marks.keys()
            for s in text.unshared:
                assert not any(marks[s] & x for other, x in marks.items() if other != s)
    assert ten().unshared == {0}
    assert edit.cp(ten(), 0, 1).unshared == frozenset()


@pytest.mark.parametrize(
    "change",
    [
        lambda t: appended(appended(t, 9, seq_id=1), 9),
        lambda t: edit.add(t, 1, 4, None, 7),
        lambda t: edit.add(appended(t, 5), 1, 0, None, 3),
        lambda t: history.split(t, 1, np.arange(3, 9, dtype=np.int32)),
    ],
)
def test_a_history_near_2_to_the_31_marks_goes_on_as_a_new_one(change):
    """Positions, tokens and which of them two sequences share."""
    young = edit.cp(ten(), 0, 1)
    old = dataclasses.replace(young, n_marks=2**31 - 4)
    a, b = change(young), change(old)
    assert b.n_marks < 100
    for s in (0, 1):
        x, y = history.entries(a, s), history.entries(b, s)
        np.testing.assert_array_equal(x[:2], y[:2])
        assert 0 <= y[2].min() <= y[2].max() < b.n_marks
    shared = [np.isin(history.entries(t, 0)[2], history.entries(t, 1)[2]) for t in (a, b)]
    np.testing.assert_array_equal(*shared)


def test_saved_tokens_go_into_a_history_near_2_to_the_31_marks():
    old = dataclasses.replace(ten(), n_marks=2**31 - 4)
    saved = dataclasses.replace(ten(), n_marks=2**40)
    found = insert.into_history(old, saved, {0: 1})
    assert found.n_marks == 20
    assert history.entries(found, 0)[2].tolist() == list(range(10))
    assert history.entries(found, 1)[2].tolist() == list(range(10, 20))
