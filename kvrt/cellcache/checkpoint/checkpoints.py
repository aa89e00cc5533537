"""Which checkpoints each sequence has: what an edit leaves of them, and which one is evicted.

A checkpoint keeps what layers need to resume a sequence after its first `pos` positions and do not
keep themselves: states of recurrent layers, and the windows of groups that use cells again.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import assert_never

from kvrt.cellcache.saved import SavedCells
from kvrt.cells.checks import check_range
from kvrt.cells.edits import Copy, Divide, Keep, Remove, SeqEdit, Shift


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """What layers that cannot be cut back held of a sequence; shared by reference, never changed.

    Attributes:
      pos: the position of the next token.
      tails: by group of attention layers, cells with all that the next token sees, owned by
        sequence 0; None where a group keeps every position.
      n_bytes: of their keys and values, and of states.
    """

    pos: int
    tails: tuple[SavedCells | None, ...]
    n_bytes: int


Kept = tuple[Checkpoint, ...]  # of one sequence, by position


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Checkpoints by sequence, ascending, one a position."""

    kept: Mapping[int, Kept] = dataclasses.field(default_factory=dict)

    def of(self, seq_id: int) -> Kept:
        """Those of a sequence."""
        return self.kept.get(seq_id, ())

    def positions(self, seq_id: int) -> tuple[int, ...]:
        """Positions of those of a sequence."""
        return tuple(x.pos for x in self.of(seq_id))

    @property
    def unique(self) -> tuple[Checkpoint, ...]:
        """All of them, shared ones once."""
        return tuple({id(x): x for kept in self.kept.values() for x in kept}.values())

    @property
    def n_bytes(self) -> int:
        """Bytes of keys, values and states, shared ones once."""
        return sum(x.n_bytes for x in self.unique)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointLimits:
    """How many checkpoints are kept.

    Attributes:
      n_most: of a sequence.
      n_bytes: of all sequences, shared ones once; None is no limit.
    """

    n_most: int
    n_bytes: int | None


def nearest(checkpoints: Checkpoints, seq_id: int, pos: int) -> Checkpoint | None:
    """The last checkpoint of a sequence at or before a position."""
    return next((x for x in reversed(checkpoints.of(seq_id)) if x.pos <= pos), None)


def apply(checkpoints: Checkpoints, edit: SeqEdit, *, joins: bool) -> Checkpoints:
    """The checkpoints whose positions an edit leaves as they are.

    Args:
      checkpoints: before it.
      edit: of a sequence.
      joins: a copy goes to a sequence that already holds something.

    Raises:
      BadRange: a range is reversed, negative or beyond 2^31 - 1.
    """
    if not checkpoints.kept:
        return checkpoints
    match edit:
        case Remove():
            p0, p1 = check_range(edit.p0, edit.p1)
            seqs = list(checkpoints.kept) if edit.seq_id is None else [edit.seq_id]
            return _up_to(checkpoints, seqs, p0) if p0 != p1 else checkpoints
        case Copy():
            return _copied(checkpoints, edit, joins=joins)
        case Keep(seq_id=seq_id):
            kept = {s: x for s, x in checkpoints.kept.items() if s == seq_id}
            return dataclasses.replace(checkpoints, kept=kept)
        case Shift():
            end = min(edit.p0, edit.p0 + edit.d) if edit.d else None
            return _up_to(checkpoints, [edit.seq_id], end)
        case Divide():
            end = edit.p0 // edit.d if edit.d > 1 else None
            return _up_to(checkpoints, [edit.seq_id], end)
        case _:
            assert_never(edit)


def with_new(
    checkpoints: Checkpoints, seq_id: int, new: Checkpoint, limits: CheckpointLimits
) -> Checkpoints:
    """The checkpoints with a new one at the end of a sequence, and without those evicted for it.

    Where there are too many, the one goes without which the fewest tokens more may have to be
    evaluated again: those between its neighbours. So among n checkpoints of p tokens none is
    further than the interval or 2 p / n from the one before it. The new one stays; of equal ones
    the first goes.
    """
    mine = (*(x for x in checkpoints.of(seq_id) if x.pos < new.pos), new)
    while len(mine) > limits.n_most:
        gone = min(_spans(mine), key=lambda x: x[0])[1]
        mine = tuple(x for x in mine if x is not gone)
    after = _with(checkpoints, {seq_id: mine})
    while limits.n_bytes is not None and after.n_bytes > limits.n_bytes:
        spans: dict[Checkpoint, int] = {}
        for kept in after.kept.values():
            for n, x in _spans(kept, last=True):
                spans[x] = max(n, spans.get(x, 0))
        spans.pop(new, None)
        if not spans:
            return after
        gone = min(spans, key=lambda x: (spans[x], x.pos))
        left = {s: tuple(x for x in kept if x is not gone) for s, kept in after.kept.items()}
        after = dataclasses.replace(after, kept={s: x for s, x in left.items() if x})
    return after


def lost_positions(before: Checkpoints, after: Checkpoints) -> list[tuple[int, int]]:
    """Sequence and position of the checkpoints that are there no more."""
    return [
        (s, x.pos)
        for s, kept in before.kept.items()
        for x in kept
        if not any(x is y for y in after.of(s))
    ]


def _spans(kept: Kept, *, last: bool = False) -> Iterator[tuple[int, Checkpoint]]:
    """Tokens between the neighbours of each checkpoint; of the last one only with `last`."""
    before = 0
    for x, behind in itertools.pairwise(kept):
        yield behind.pos - before, x
        before = x.pos
    if last and kept:
        yield kept[-1].pos - before, kept[-1]


def _up_to(checkpoints: Checkpoints, seqs: Iterable[int], end: int | None) -> Checkpoints:
    """The checkpoints without those of some sequences beyond a position; None is no position."""
    if end is None:
        return checkpoints
    return _with(
        checkpoints, {s: tuple(x for x in checkpoints.of(s) if x.pos <= end) for s in seqs}
    )


def _copied(checkpoints: Checkpoints, edit: Copy, *, joins: bool) -> Checkpoints:
    p0, p1 = check_range(edit.p0, edit.p1)
    if edit.src == edit.dst or p0 == p1:
        return checkpoints
    if joins:
        return _up_to(checkpoints, [edit.dst], p0)
    shared = (x for x in checkpoints.of(edit.src) if p0 == 0 and (p1 is None or x.pos <= p1))
    return _with(checkpoints, {edit.dst: tuple(shared)})


def _with(checkpoints: Checkpoints, new: Mapping[int, Kept]) -> Checkpoints:
    kept = {**checkpoints.kept, **new}
    return dataclasses.replace(checkpoints, kept={s: x for s, x in kept.items() if x})
