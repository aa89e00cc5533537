"""Which of the tokens that a sequence holds serve a new prompt, and why the others do not.

A common prefix is exact: its rows are those that the new prompt would give. Chunks after the first
difference are not, whatever is done to their positions: they were computed after other tokens.
Nothing of that kind is used unless it is asked for, and then the plan says so.
"""

import dataclasses
import enum
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Int32  # not from arrays: explaining a plan needs no JAX

from kvrt.errors import BadRange, BadToken, UsageError
from kvrt.reuse.diff import Box, Run, common_prefix, gaps, runs

_SHORT = 4  # tokens: common runs below this are chance and are not spoken of
_KEPT = -1


class Reason(enum.StrEnum):
    """Why tokens are evaluated."""

    DIFFERS = "differs"
    NOT_HELD = "not held"
    LAST = "last token is evaluated again"
    MOVED = "held positions have gaps or were moved"
    OTHER_PREFIX = "computed under another prefix"
    SHORT = "too short a chunk"
    CANNOT_RESUME = "windowed or recurrent layers cannot resume there"
    OFF = "chunks are off"


_REASONS = tuple(Reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """Held positions [p0, p1) that are to stand from `start` on."""

    p0: int
    p1: int
    start: int

    @property
    def end(self) -> int:
        """Where it ends in the new prompt."""
        return self.start + self.p1 - self.p0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Miss:
    """Tokens [start, end) of the new prompt that are not reused, and why."""

    start: int
    end: int
    reason: Reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reuse:
    """What happens to the held tokens and which ones are evaluated.

    Attributes:
      n_wanted: tokens of the new prompt.
      n_prefix: tokens at its beginning that stay where they are.
      keeps: what is kept after them, ascending in old and new positions.
      first_difference: index of the first token that is not the held one; None if one text is the
        beginning of the other.
      reasons: why, for every evaluated token; ascending.
      n_exact: tokens at the beginning whose rows are as if all were evaluated; None is all.
      end: held positions end before it.
    """

    n_wanted: int
    n_prefix: int
    keeps: tuple[Chunk, ...]
    first_difference: int | None
    reasons: tuple[Miss, ...]
    n_exact: int | None
    end: int

    @property
    def approximate(self) -> bool:
        """Whether rows are used that were computed under another prefix."""
        return self.n_exact is not None

    @property
    def evaluate(self) -> tuple[tuple[int, int], ...]:
        """Spans [start, end) of the new prompt to evaluate, ascending; never none."""
        out: list[tuple[int, int]] = []
        for miss in self.reasons:
            start = out.pop()[0] if out and out[-1][1] == miss.start else miss.start
            out.append((start, miss.end))
        return tuple(out)

    @property
    def n_evaluated(self) -> int:
        """Tokens to evaluate."""
        return sum(end - start for start, end in self.evaluate)

    @property
    def n_reused(self) -> int:
        """Tokens that are not evaluated."""
        return self.n_wanted - self.n_evaluated


def plan_reuse(
    held: tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]],
    wanted: Sequence[int] | Int[np.ndarray, " T"],
    *,
    chunks: bool = False,
    min_chunk: int = 32,
    earliest: int = 0,
    n_exact: int | None = None,
) -> Reuse:
    """Plans how a sequence becomes a new prompt.

    Args:
      held: positions and ids of the sequence, by position; `Runtime.text`.
      wanted: ids of the new prompt, at least one.
      chunks: whether rows that were computed under another prefix may be used. States of recurrent
        layers cannot: leave it off with them.
      min_chunk: tokens of a chunk at least.
      earliest: the least position to cut back to; `Runtime.earliest_resume`.
      n_exact: held tokens at the beginning whose rows were computed after just the tokens before
        them, fewer than all after a context shift or a plan with chunks; None is all.

    Raises:
      BadToken: no tokens are wanted.
      BadRange: held positions do not ascend, or do not belong to the ids.
      UsageError: min_chunk is below 1, or earliest or n_exact is negative.
    """
    pos, ids = held
    new = _checked(pos, ids, wanted, min_chunk, earliest, n_exact)
    in_place = _n_in_place(pos)
    same = common_prefix(ids[:in_place], new)
    kept = min(same, len(new) - 1)
    if n_exact is not None and not chunks:
        kept = min(kept, n_exact)
    resumes = kept >= earliest or kept == len(pos)
    n_prefix = kept if resumes else 0

    found = _matches(ids, new, same, min_chunk)
    why = _explained(ids, new, found, same, min_chunk)
    why[:n_prefix] = _KEPT
    why[n_prefix:kept] = _code(Reason.CANNOT_RESUME)
    why[kept:same] = _code(Reason.OTHER_PREFIX)
    keeps: tuple[Chunk, ...] = ()
    if not chunks:
        _mark(why, found, Reason.OFF)
        n = common_prefix(ids[same:], new[same:]) if same == in_place else 0
        why[same : same + n] = _code(Reason.MOVED)
    elif not resumes:
        _mark(why, found, Reason.CANNOT_RESUME)
    else:
        keeps = _keep(why, pos, found, min_chunk)
    _explain_last(why, ids, new, found, same)

    bounds = [n_exact] if n_exact is not None and n_prefix > n_exact else []
    bounds += [keeps[0].start] if keeps else []
    return Reuse(
        n_wanted=len(new),
        n_prefix=n_prefix,
        keeps=keeps,
        first_difference=same if same < min(in_place, len(new)) else None,
        reasons=_misses(why),
        n_exact=min(bounds, default=None),
        end=int(pos[-1]) + 1 if len(pos) else 0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remove:
    """`seq_rm` of positions [p0, p1); None is the end."""

    p0: int
    p1: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Move:
    """`seq_add` of d to positions [p0, p1)."""

    p0: int
    p1: int
    d: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Tokens [start, end) of the new prompt, at these positions."""

    start: int
    end: int


Operation = Remove | Move | Evaluate


def operations(reuse: Reuse) -> tuple[Operation, ...]:
    """What to do with the sequence, in this order; no move meets a position that is in use.

    Chunks cross nothing, so those that move down go in ascending order, and after them those that
    move up in descending order.
    """
    out: list[Operation] = []
    end = reuse.n_prefix
    for chunk in reuse.keeps:
        if chunk.p0 > end:
            out.append(Remove(p0=end, p1=chunk.p0))
        end = chunk.p1
    if end < reuse.end:
        out.append(Remove(p0=end, p1=None))
    moves = [Move(p0=c.p0, p1=c.p1, d=c.start - c.p0) for c in reuse.keeps]
    out += [m for m in moves if m.d < 0]
    out += [m for m in reversed(moves) if m.d > 0]
    return (*out, *(Evaluate(start=i, end=j) for i, j in reuse.evaluate))


def _checked(
    pos: np.ndarray,
    ids: np.ndarray,
    wanted: Sequence[int] | np.ndarray,
    min_chunk: int,
    earliest: int,
    n_exact: int | None,
) -> np.ndarray:
    new = np.asarray(wanted)
    if new.ndim != 1 or not new.size or not np.issubdtype(new.dtype, np.integer):
        raise BadToken("nothing is wanted; give at least one token id")
    if len(pos) != len(ids) or (np.diff(pos) < 0).any() or (len(pos) and pos[0] < 0):
        raise BadRange(
            f"{len(pos)} held positions of {len(ids)} tokens; they must be as many, none "
            "negative, in ascending order"
        )
    if min_chunk < 1 or earliest < 0 or (n_exact is not None and n_exact < 0):
        raise UsageError(
            f"min_chunk {min_chunk}, earliest {earliest}, n_exact {n_exact}; min_chunk must be at "
            "least 1, the others at least 0"
        )
    return new.astype(np.int32)


def _n_in_place(pos: np.ndarray) -> int:
    """How many positions are 0, 1, 2, ... and each there once."""
    off = np.flatnonzero(pos != np.arange(len(pos)))
    # A duplicate stands one entry after the first of its kind, which is not believed either.
    return min(int(off[0]), int(pos[off[0]])) if off.size else len(pos)


def _matches(ids: np.ndarray, new: np.ndarray, same: int, min_chunk: int) -> tuple[Run, ...]:
    """Common runs after the common prefix, the last token of the prompt left out."""
    found = runs(ids[same:], new[same:-1], min_chunk)
    return tuple(Run(same + r.old, same + r.new, r.n) for r in found)


def _explained(
    ids: np.ndarray, new: np.ndarray, found: tuple[Run, ...], same: int, min_chunk: int
) -> np.ndarray:
    """A reason for every token: new, or in the place of something, or in a short common run."""
    why = np.full(len(new), _code(Reason.DIFFERS))
    for gap in gaps(found, Box(same, len(ids), same, len(new))):
        if gap.a0 == gap.a1:
            why[gap.b0 : gap.b1] = _code(Reason.NOT_HELD)
        elif min_chunk > _SHORT:
            short = runs(ids[gap.a0 : gap.a1], new[gap.b0 : gap.b1], _SHORT)
            _mark(why[gap.b0 : gap.b1], short, Reason.SHORT)
    return why


def _mark(why: np.ndarray, found: tuple[Run, ...], reason: Reason) -> None:
    for run in found:
        why[run.new : run.new + run.n] = _code(reason)


def _keep(
    why: np.ndarray, pos: np.ndarray, found: tuple[Run, ...], min_chunk: int
) -> tuple[Chunk, ...]:
    """The runs as chunks, split where their positions do not follow each other."""
    _mark(why, found, Reason.MOVED)
    lone = np.ones(len(pos), bool)
    twice = pos[1:] == pos[:-1]
    lone[1:] &= ~twice
    lone[:-1] &= ~twice
    out = []
    for run in found:
        cuts = np.flatnonzero(np.diff(pos[run.old : run.old + run.n]) != 1) + 1
        for i, j in zip([0, *cuts.tolist()], [*cuts.tolist(), run.n], strict=True):
            # A position that is there twice cannot be moved without its double.
            i += int(not lone[run.old + i])
            j -= int(j > i and not lone[run.old + j - 1])
            if j - i >= min_chunk:
                p0, start = int(pos[run.old + i]), run.new + i
                out.append(Chunk(p0=p0, p1=p0 + j - i, start=start))
                why[start : start + j - i] = _KEPT
    return tuple(out)


def _explain_last(
    why: np.ndarray, ids: np.ndarray, new: np.ndarray, found: tuple[Run, ...], same: int
) -> None:
    """Gives the last token the reason of those before it, had it been reused with them."""
    if same == len(new):
        why[-1] = _code(Reason.LAST)
    elif found and found[-1].new + found[-1].n == len(new) - 1:
        after = found[-1].old + found[-1].n
        if after < len(ids) and ids[after] == new[-1]:
            why[-1] = _code(Reason.LAST) if why[-2] == _KEPT else why[-2]


def _code(reason: Reason) -> int:
    return _REASONS.index(reason)


def _misses(why: np.ndarray) -> tuple[Miss, ...]:
    cuts = [0, *(np.flatnonzero(np.diff(why)) + 1).tolist(), len(why)]
    return tuple(
        Miss(start=i, end=j, reason=_REASONS[why[i]])
        for i, j in itertools.pairwise(cuts)
        if why[i] != _KEPT
    )
