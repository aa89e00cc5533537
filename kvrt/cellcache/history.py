"""Which tokens a sequence holds, by position: what a session is told apart by.

Rows of attention and states do not say which token made them, and windowed layers forget, so the
tokens are noted beside them. Every operation on a sequence moves them along with its cells.

A token is an entry (pos, id, mark). Marks are handed out once: two sequences that share a cell
share the entry's mark, and a private copy of a cell gets a mark of its own.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvrt.arrays import Int32
from kvrt.cells.checks import check_range

Entries = Int32[np.ndarray, "3 _"]
_POS, _ID, _MARK = range(3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenHistory:
    """Entries by sequence.

    Attributes:
      pieces: a sequence's entries, in pieces whose lengths at least halve from one to the next, so
        that an append copies few.
      n_marks: marks handed out.
      exact: tokens at the beginning of a sequence whose rows were computed after just the tokens
        before them, by sequence where they are not all: what follows a hole or a move was not.
    """

    pieces: Mapping[int, tuple[Entries, ...]] = dataclasses.field(default_factory=dict)
    n_marks: int = 0
    exact: Mapping[int, int] = dataclasses.field(default_factory=dict)


def entries(text: TokenHistory, seq_id: int) -> Entries:
    """All entries of a sequence, by position; of equal ones the older first."""
    pieces = text.pieces.get(seq_id, ())
    found = np.concatenate(pieces, axis=1) if pieces else np.zeros((3, 0), np.int32)
    return found[:, np.argsort(found[_POS], kind="stable")]


def positions(text: TokenHistory, seq_id: int) -> Int32[np.ndarray, " n"]:
    """Positions of a sequence's tokens, ascending."""
    return entries(text, seq_id)[_POS]


def tokens(text: TokenHistory, seq_id: int) -> Int32[np.ndarray, " n"]:
    """Ids of a sequence's tokens, by position."""
    return entries(text, seq_id)[_ID]


def append(
    text: TokenHistory,
    seq_ids: Int32[np.ndarray, " T"],
    pos: Int32[np.ndarray, " T"],
    ids: Int32[np.ndarray, " T"],
) -> TokenHistory:
    """With new tokens."""
    new = np.empty((3, len(ids)), np.int32)
    new[_POS], new[_ID] = pos, ids
    new[_MARK] = np.arange(text.n_marks, text.n_marks + len(ids))
    pieces, seqs = dict(text.pieces), dict.fromkeys(seq_ids.tolist())
    for s in seqs:
        held = [*pieces.get(s, ()), new[:, seq_ids == s] if len(seqs) > 1 else new]
        while len(held) > 1 and held[-2].shape[1] < 2 * held[-1].shape[1]:
            held[-2:] = [np.concatenate(held[-2:], axis=1)]
        pieces[s] = tuple(held)
    return TokenHistory(pieces=pieces, n_marks=text.n_marks + len(ids), exact=text.exact)


def filled(text: TokenHistory, seq_id: int, p0: int, n: int) -> TokenHistory:
    """After n tokens were put at p0 on: they are exact if all before them are, and no hole is."""
    held = entries(text, seq_id)
    before, known = _before(held, p0), text.exact.get(seq_id)
    if known is None and before == p0 == held.shape[1] - n:
        return text
    if known is None or known > before:
        known = before
    elif known == before == p0:
        known += n
    return dataclasses.replace(text, exact={**text.exact, seq_id: known})


def rm(text: TokenHistory, seq_id: int | None, p0: int = 0, p1: int | None = None) -> TokenHistory:
    """Without positions [p0, p1) of a sequence, or of all with None."""
    for s in list(text.pieces) if seq_id is None else [seq_id]:
        held = entries(text, s)
        gone = _inside(held, p0, p1)
        # With its end nothing changes for the others.
        hole = gone.any() and not gone[-1]
        text = _with(text, s, held[:, ~gone], _before(held, p0) if hole else None)
    return text


def cp(text: TokenHistory, src: int, dst: int, p0: int = 0, p1: int | None = None) -> TokenHistory:
    """With positions [p0, p1) of src shared by dst."""
    ours, theirs = entries(text, dst), entries(text, src)
    theirs = theirs[:, _inside(theirs, p0, p1)]
    new = theirs[:, ~np.isin(theirs[_MARK], ours[_MARK])]
    if not new.size:
        return text
    if not ours.size and p0 == 0:
        return _with(text, dst, new, text.exact.get(src))
    # Nobody has looked whether both begin alike.
    return _with(text, dst, np.concatenate([ours, new], axis=1), _before(ours, p0))


def keep(text: TokenHistory, seq_id: int) -> TokenHistory:
    """With one sequence alone."""
    pieces = {s: x for s, x in text.pieces.items() if s == seq_id}
    exact = {s: n for s, n in text.exact.items() if s == seq_id}
    return dataclasses.replace(text, pieces=pieces, exact=exact)


def add(text: TokenHistory, seq_id: int, p0: int, p1: int | None, d: int) -> TokenHistory:
    """With positions [p0, p1) moved by d; those that would be negative are gone."""
    if d == 0:
        return text
    text, held, hit = _split(text, seq_id, p0, p1)
    n = _before(held, p0) if hit.any() else None
    held[_POS, hit] += np.int32(d)
    return _with(text, seq_id, held[:, held[_POS] >= 0], n)


def div(text: TokenHistory, seq_id: int, p0: int, p1: int | None, d: int) -> TokenHistory:
    """With positions [p0, p1) divided by d, rounding down."""
    if d == 1:
        return text
    text, held, hit = _split(text, seq_id, p0, p1)
    n = _before(held, p0) if hit.any() else None
    held[_POS, hit] //= np.int32(d)
    return _with(text, seq_id, held, n)


def apart(text: TokenHistory, seq_id: int, pos: Int32[np.ndarray, " n"]) -> TokenHistory:
    """After a sequence got cells of its own at some positions, which it shared."""
    if not len(pos):
        return text
    held = entries(text, seq_id)
    text, held = _unshared(text, seq_id, held, np.isin(held[_POS], pos))
    return _with(text, seq_id, held, None)


def _split(
    text: TokenHistory, seq_id: int, p0: int, p1: int | None
) -> tuple[TokenHistory, np.ndarray, np.ndarray]:
    """The entries of a sequence and which of them are in the range, none of these shared."""
    held = entries(text, seq_id)
    hit = _inside(held, p0, p1)
    text, held = _unshared(text, seq_id, held, hit)
    return text, held, hit


def _unshared(
    text: TokenHistory, seq_id: int, held: Entries, hit: np.ndarray
) -> tuple[TokenHistory, np.ndarray]:
    """The entries `held` of a sequence with marks of their own where `hit`."""
    others = [x[_MARK] for s, held in text.pieces.items() if s != seq_id for x in held]
    shared = hit & np.isin(held[_MARK], np.concatenate(others)) if others else hit & False
    n = int(np.count_nonzero(shared))
    held[_MARK, shared] = np.arange(text.n_marks, text.n_marks + n, dtype=np.int32)
    return dataclasses.replace(text, n_marks=text.n_marks + n), held


def _inside(held: Entries, p0: int, p1: int | None) -> np.ndarray:
    p0, p1 = check_range(p0, p1)
    return (held[_POS] >= p0) & (held[_POS] < p1 if p1 is not None else True)


def _before(held: Entries, p0: int) -> int:
    """Tokens below a position."""
    return int(np.count_nonzero(held[_POS] < p0))


def _with(text: TokenHistory, seq_id: int, held: Entries, n_exact: int | None) -> TokenHistory:
    """The text with other entries of a sequence, of which no more than n_exact are exact."""
    pieces = {s: x for s, x in text.pieces.items() if s != seq_id}
    exact = {s: n for s, n in text.exact.items() if s != seq_id}
    n = held.shape[1]
    if n:
        pieces[seq_id] = (held,)
        known = [x for x in (n_exact, text.exact.get(seq_id)) if x is not None]
        exact |= {seq_id: min(known)} if known and min(known) < n else {}
    return dataclasses.replace(text, pieces=pieces, exact=exact)
