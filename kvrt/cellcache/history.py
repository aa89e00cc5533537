"""The token history: which tokens each sequence has at which positions.

Cached keys and values do not say which token they belong to, and windowed layers evict cells, so
the tokens are recorded beside them; sessions are compared by them. Every edit of a sequence
changes its history along with its cells.

A token is an entry (pos, id, mark). A mark is handed out once: two sequences that share a cell
share the entry's mark, and a private copy of a cell gets a new one.
"""

import dataclasses
from collections.abc import Mapping
from typing import assert_never

import numpy as np

from kvrt.arrays import Int32
from kvrt.cells.checks import check_range
from kvrt.cells.edits import Copy, Divide, Keep, Remove, SeqEdit, Shift

Entries = Int32[np.ndarray, "3 _"]
_POS, _ID, _MARK = range(3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenHistory:
    """Entries by sequence.

    Attributes:
      pieces: a sequence's entries, in pieces whose lengths at least halve from one to the next, so
        that an append copies few.
      n_marks: marks handed out.
      exact: tokens at the beginning of a sequence whose keys and values were computed after just
        the tokens before them, by sequence where that is not all of them: a token computed behind
        a hole, or moved, is not exact.
    """

    pieces: Mapping[int, tuple[Entries, ...]] = dataclasses.field(default_factory=dict)
    n_marks: int = 0
    exact: Mapping[int, int] = dataclasses.field(default_factory=dict)


def entries(history: TokenHistory, seq_id: int) -> Entries:
    """All entries of a sequence, by position; of equal ones the older first."""
    pieces = history.pieces.get(seq_id, ())
    found = np.concatenate(pieces, axis=1) if pieces else np.zeros((3, 0), np.int32)
    return found[:, np.argsort(found[_POS], kind="stable")]


def positions(history: TokenHistory, seq_id: int) -> Int32[np.ndarray, " n"]:
    """Positions of a sequence's tokens, ascending."""
    return entries(history, seq_id)[_POS]


def tokens(history: TokenHistory, seq_id: int) -> Int32[np.ndarray, " n"]:
    """Ids of a sequence's tokens, by position."""
    return entries(history, seq_id)[_ID]


def append(
    history: TokenHistory,
    seq_ids: Int32[np.ndarray, " T"],
    pos: Int32[np.ndarray, " T"],
    ids: Int32[np.ndarray, " T"],
) -> TokenHistory:
    """The history with new tokens."""
    new = np.empty((3, len(ids)), np.int32)
    new[_POS], new[_ID] = pos, ids
    new[_MARK] = np.arange(history.n_marks, history.n_marks + len(ids))
    pieces, seqs = dict(history.pieces), dict.fromkeys(seq_ids.tolist())
    for s in seqs:
        mine = [*pieces.get(s, ()), new[:, seq_ids == s] if len(seqs) > 1 else new]
        while len(mine) > 1 and mine[-2].shape[1] < 2 * mine[-1].shape[1]:
            mine[-2:] = [np.concatenate(mine[-2:], axis=1)]
        pieces[s] = tuple(mine)
    return TokenHistory(pieces=pieces, n_marks=history.n_marks + len(ids), exact=history.exact)


def filled(history: TokenHistory, seq_id: int, p0: int, n: int) -> TokenHistory:
    """After n tokens were put at p0 on: they are exact if all before them are, and no hole is."""
    mine = entries(history, seq_id)
    before, known = _n_before(mine, p0), history.exact.get(seq_id)
    if known is None and before == p0 == mine.shape[1] - n:
        return history
    if known is None or known > before:
        known = before
    elif known == before == p0:
        known += n
    return dataclasses.replace(history, exact={**history.exact, seq_id: known})


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
            return dataclasses.replace(history, pieces=pieces, exact=exact)
        case Shift() | Divide():
            return _moved(history, edit)
        case _:
            assert_never(edit)


def split(history: TokenHistory, seq_id: int, pos: Int32[np.ndarray, " n"]) -> TokenHistory:
    """After a sequence got cells of its own at some positions, which it shared."""
    if not len(pos):
        return history
    mine = entries(history, seq_id)
    history, mine = _unshared(history, seq_id, mine, np.isin(mine[_POS], pos))
    return _with(history, seq_id, mine, None)


def _removed(history: TokenHistory, edit: Remove) -> TokenHistory:
    for s in list(history.pieces) if edit.seq_id is None else [edit.seq_id]:
        mine = entries(history, s)
        gone = _inside(mine, edit.p0, edit.p1)
        # Without its end the other tokens are as exact as before.
        hole = gone.any() and not gone[-1]
        n_exact = _n_before(mine, edit.p0) if hole else None
        history = _with(history, s, mine[:, ~gone], n_exact)
    return history


def _copied(history: TokenHistory, edit: Copy) -> TokenHistory:
    ours, theirs = entries(history, edit.dst), entries(history, edit.src)
    theirs = theirs[:, _inside(theirs, edit.p0, edit.p1)]
    new = theirs[:, ~np.isin(theirs[_MARK], ours[_MARK])]
    if not new.size:
        return history
    if not ours.size and edit.p0 == 0:
        return _with(history, edit.dst, new, history.exact.get(edit.src))
    # Whether both have the same tokens before the copied ones is not compared.
    both = np.concatenate([ours, new], axis=1)
    return _with(history, edit.dst, both, _n_before(ours, edit.p0))


def _moved(history: TokenHistory, edit: Shift | Divide) -> TokenHistory:
    d = np.int32(edit.d)
    if d == (0 if isinstance(edit, Shift) else 1):
        return history
    mine = entries(history, edit.seq_id)
    hit = _inside(mine, edit.p0, edit.p1)
    history, mine = _unshared(history, edit.seq_id, mine, hit)
    n_exact = _n_before(mine, edit.p0) if hit.any() else None
    pos = mine[_POS, hit]
    mine[_POS, hit] = pos + d if isinstance(edit, Shift) else pos // d
    return _with(history, edit.seq_id, mine[:, mine[_POS] >= 0], n_exact)


def _unshared(
    history: TokenHistory, seq_id: int, mine: Entries, hit: np.ndarray
) -> tuple[TokenHistory, np.ndarray]:
    """The entries `mine` of a sequence, with marks that no other sequence has where `hit`."""
    others = [x[_MARK] for s, pieces in history.pieces.items() if s != seq_id for x in pieces]
    shared = hit & np.isin(mine[_MARK], np.concatenate(others)) if others else hit & False
    n = int(np.count_nonzero(shared))
    mine[_MARK, shared] = np.arange(history.n_marks, history.n_marks + n, dtype=np.int32)
    return dataclasses.replace(history, n_marks=history.n_marks + n), mine


def _inside(mine: Entries, p0: int, p1: int | None) -> np.ndarray:
    p0, p1 = check_range(p0, p1)
    return (mine[_POS] >= p0) & (mine[_POS] < p1 if p1 is not None else True)


def _n_before(mine: Entries, p0: int) -> int:
    """Tokens below a position."""
    return int(np.count_nonzero(mine[_POS] < p0))


def _with(history: TokenHistory, seq_id: int, mine: Entries, n_exact: int | None) -> TokenHistory:
    """The history with other entries of a sequence, of which no more than n_exact are exact."""
    pieces = {s: x for s, x in history.pieces.items() if s != seq_id}
    exact = {s: n for s, n in history.exact.items() if s != seq_id}
    n = mine.shape[1]
    if n:
        pieces[seq_id] = (mine,)
        known = [x for x in (n_exact, history.exact.get(seq_id)) if x is not None]
        exact |= {seq_id: min(known)} if known and min(known) < n else {}
    return dataclasses.replace(history, pieces=pieces, exact=exact)
