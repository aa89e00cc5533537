"""The token history: which tokens each sequence has at which positions.

Cached keys and values do not say which token they belong to, and windowed layers evict cells, so
the tokens are recorded beside them; sessions are compared by them. Every edit of a sequence
changes its history along with its cells.

A token is an entry (pos, id, mark). A mark is handed out once: two sequences that share a cell
share the entry's mark, and a private copy of a cell gets a new one. Marks are int32; before they
run out, those in use are numbered anew from 0.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import assert_never

import numpy as np

from kvrt.arrays import Int32
from kvrt.cells.checks import check_range
from kvrt.cells.edits import Copy, Divide, Keep, Remove, SeqEdit, Shift

Entries = Int32[np.ndarray, "3 _"]
_POS, _ID, _MARK = range(3)
MAX_MARKS = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenHistory:
    """Entries by sequence.

    Attributes:
      pieces: a sequence's entries, in pieces whose lengths at least halve from one to the next, so
        that an append copies few.
      n_marks: marks handed out.
      exact: tokens at the beginning of a sequence whose keys and values were computed after just
        the tokens before them, by sequence where that is not all of them: a token computed behind
        a hole, moved, or computed by a sparse read of those before it, is not exact.
      unshared: sequences that are known to share no mark with another, so that an edit need not
        compare marks; others may or may not.
    """

    pieces: Mapping[int, tuple[Entries, ...]] = dataclasses.field(default_factory=dict)
    n_marks: int = 0
    exact: Mapping[int, int] = dataclasses.field(default_factory=dict)
    unshared: frozenset[int] = frozenset()


def entries(history: TokenHistory, seq_id: int) -> Entries:
    """All entries of a sequence, by position; of equal ones the older first. The caller's own."""
    return _held(history, seq_id).copy()


def positions(history: TokenHistory, seq_id: int) -> Int32[np.ndarray, " n"]:
    """Positions of a sequence's tokens, ascending."""
    return entries(history, seq_id)[_POS]


def tokens(history: TokenHistory, seq_id: int) -> Int32[np.ndarray, " n"]:
    """Ids of a sequence's tokens, by position."""
    return entries(history, seq_id)[_ID]


def n_as_alone(history: TokenHistory, seq_id: int) -> int:
    """First tokens of a sequence that are exact, and stand where a text that begins so has them."""
    pos = _held(history, seq_id)[_POS]
    wrong = np.flatnonzero(pos != np.arange(len(pos)))
    return min([history.exact.get(seq_id, len(pos)), len(pos), *wrong[:1].tolist()])


def append(
    history: TokenHistory,
    seq_ids: Int32[np.ndarray, " T"],
    pos: Int32[np.ndarray, " T"],
    ids: Int32[np.ndarray, " T"],
) -> TokenHistory:
    """The history with new tokens."""
    new = np.empty((3, len(ids)), np.int32)
    new[_POS], new[_ID] = pos, ids
    if history.n_marks + len(ids) > MAX_MARKS:
        history = with_room(history, len(ids))
    pieces, seqs = dict(history.pieces), dict.fromkeys(seq_ids.tolist())
    n_marks, unshared = history.n_marks + len(ids), history.unshared | (seqs.keys() - pieces.keys())
    new[_MARK] = np.arange(history.n_marks, n_marks)
    for s in seqs:
        mine = [*pieces.get(s, ()), new[:, seq_ids == s] if len(seqs) > 1 else new]
        while len(mine) > 1 and mine[-2].shape[1] < 2 * mine[-1].shape[1]:
            mine[-2:] = [np.concatenate(mine[-2:], axis=1)]
        pieces[s] = tuple(mine)
    return TokenHistory(pieces=pieces, n_marks=n_marks, exact=history.exact, unshared=unshared)


def renumbered(
    pieces: Mapping[int, Iterable[Entries]], first: int = 0
) -> tuple[dict[int, tuple[Entries, ...]], int]:
    """The same entries with marks from `first` on and no gaps, and the number behind the last."""
    marks = np.unique(np.concatenate([[], *(x[_MARK] for some in pieces.values() for x in some)]))

    def one(x: Entries) -> Entries:
        new = first + np.searchsorted(marks, x[_MARK])
        return np.stack([x[_POS], x[_ID], new.astype(np.int32)])

    return {s: tuple(map(one, some)) for s, some in pieces.items()}, first + len(marks)


def with_room(history: TokenHistory, n: int) -> TokenHistory:
    """The history with n more marks to hand out: a Runtime may see more than 2^31 tokens."""
    if history.n_marks + n <= MAX_MARKS:
        return history
    pieces, n_marks = renumbered(history.pieces)
    return dataclasses.replace(history, pieces=pieces, n_marks=n_marks)


def filled(history: TokenHistory, seq_id: int, p0: int, n: int) -> TokenHistory:
    """After n tokens were put at p0 on: they are exact if all before them are, and no hole is."""
    mine = _held(history, seq_id)
    before, known = _n_before(mine, p0), history.exact.get(seq_id)
    if known is None and before == p0 == mine.shape[1] - n:
        return history
    if known is None or known > before:
        known = before
    elif known == before == p0:
        known += n
    return dataclasses.replace(history, exact={**history.exact, seq_id: known})


def inexact(history: TokenHistory, seq_id: int, p0: int) -> TokenHistory:
    """After tokens from p0 on were computed by reads of some of the cells before them."""
    known, before = history.exact.get(seq_id), _n_before(_held(history, seq_id), p0)
    if known is not None and known <= before:
        return history
    return dataclasses.replace(history, exact={**history.exact, seq_id: before})


def apply(history: TokenHistory, edit: SeqEdit) -> TokenHistory:
    """The history after an edit.

    Raises:
      BadRange: a range is reversed, negative or beyond 2^31 - 1.
    """
    match edit:
        case Remove():
            return _removed(history, edit)
        case Copy():
            return _copied(history, edit)
        case Keep(seq_id=seq_id):
            pieces = {s: x for s, x in history.pieces.items() if s == seq_id}
            exact = {s: n for s, n in history.exact.items() if s == seq_id}
            return dataclasses.replace(
                history, pieces=pieces, exact=exact, unshared=frozenset(pieces)
            )
        case Shift() | Divide():
            return _moved(history, edit)
        case _:
            assert_never(edit)


def split(history: TokenHistory, seq_id: int, pos: Int32[np.ndarray, " n"]) -> TokenHistory:
    """After a sequence got cells of its own at some positions, which it shared."""
    if not len(pos):
        return history
    mine = _held(history, seq_id)
    history, mine = _with_own_marks(history, seq_id, np.flatnonzero(np.isin(mine[_POS], pos)))
    return _with(history, seq_id, mine, None)


def _pieces(history: TokenHistory, seq_id: int) -> tuple[Entries, ...]:
    return history.pieces.get(seq_id, ())


def _held(history: TokenHistory, seq_id: int) -> Entries:
    """As `entries`, but an array of the history itself where one has them all: not to be written.

    Mostly a sequence's entries lie in one piece and in order, and an edit is of a slice.
    """
    pieces = _pieces(history, seq_id)
    if not pieces:
        return np.zeros((3, 0), np.int32)
    found = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1)
    pos = found[_POS]
    if (pos[1:] < pos[:-1]).any():
        return found[:, np.argsort(pos, kind="stable")]
    return found


def _removed(history: TokenHistory, edit: Remove) -> TokenHistory:
    for s in list(history.pieces) if edit.seq_id is None else [edit.seq_id]:
        mine = _held(history, s)
        gone = _inside(mine, edit.p0, edit.p1)
        # Without its end the other tokens are as exact as before.
        hole = gone.start < gone.stop < mine.shape[1]
        left, right = mine[:, : gone.start], mine[:, gone.stop :]
        kept = np.concatenate([left, right], axis=1) if right.size else left
        history = _with(history, s, kept, gone.start if hole else None)
    return history


def _copied(history: TokenHistory, edit: Copy) -> TokenHistory:
    ours, theirs = _held(history, edit.dst), _held(history, edit.src)
    new = theirs[:, _inside(theirs, edit.p0, edit.p1)]
    if ours.size and not {edit.src, edit.dst} & history.unshared:
        new = new[:, ~np.isin(new[_MARK], ours[_MARK])]
    if not new.size or edit.src == edit.dst:
        return history
    unshared = history.unshared - {edit.src, edit.dst}
    history = dataclasses.replace(history, unshared=unshared)
    if not ours.size and edit.p0 == 0:
        return _with(history, edit.dst, new, history.exact.get(edit.src))
    # Whether both have the same tokens before the copied ones is not compared.
    both = np.concatenate([ours, new], axis=1)
    return _with(history, edit.dst, both, _n_before(ours, edit.p0))


def _moved(history: TokenHistory, edit: Shift | Divide) -> TokenHistory:
    d = np.int32(edit.d)
    if d == (0 if isinstance(edit, Shift) else 1):
        return history
    mine = _held(history, edit.seq_id)
    hit = _inside(mine, edit.p0, edit.p1)
    if hit.start == hit.stop:
        return history
    history, mine = _with_own_marks(history, edit.seq_id, hit)
    pos = mine[_POS, hit]
    mine[_POS, hit] = pos + d if isinstance(edit, Shift) else pos // d
    if mine[_POS, hit.start] < 0:
        mine = mine[:, mine[_POS] >= 0]
    return _with(history, edit.seq_id, mine, hit.start)


def _with_own_marks(
    history: TokenHistory, seq_id: int, hit: slice | np.ndarray
) -> tuple[TokenHistory, np.ndarray]:
    """A copy of a sequence's entries, the `hit` ones with marks that no other sequence has."""
    history = with_room(history, _held(history, seq_id).shape[1])
    mine = entries(history, seq_id)
    if seq_id in history.unshared:
        return history, mine
    apart = {*history.unshared, seq_id}
    others = [x[_MARK] for s, pieces in history.pieces.items() if s not in apart for x in pieces]
    marks = mine[_MARK, hit]
    shared = np.isin(marks, np.concatenate(others)) if others else np.zeros(len(marks), bool)
    n = int(np.count_nonzero(shared))
    marks[shared] = np.arange(history.n_marks, history.n_marks + n, dtype=np.int32)
    mine[_MARK, hit] = marks
    return dataclasses.replace(history, n_marks=history.n_marks + n), mine


def _inside(mine: Entries, p0: int, p1: int | None) -> slice:
    """Which entries have a position in [p0, p1)."""
    p0, p1 = check_range(p0, p1)
    return slice(_n_before(mine, p0), mine.shape[1] if p1 is None else _n_before(mine, p1))


def _n_before(mine: Entries, p0: int) -> int:
    """Entries below a position."""
    return int(np.searchsorted(mine[_POS], np.int32(p0)))


def _with(history: TokenHistory, seq_id: int, mine: Entries, n_exact: int | None) -> TokenHistory:
    """The history with other entries of a sequence, of which no more than n_exact are exact."""
    pieces = {s: x for s, x in history.pieces.items() if s != seq_id}
    exact = {s: n for s, n in history.exact.items() if s != seq_id}
    n, unshared = mine.shape[1], history.unshared
    if n:
        pieces[seq_id] = (mine,)
        known = [x for x in (n_exact, history.exact.get(seq_id)) if x is not None]
        exact |= {seq_id: min(known)} if known and min(known) < n else {}
    else:
        unshared -= {seq_id}
    return dataclasses.replace(history, pieces=pieces, exact=exact, unshared=unshared)
