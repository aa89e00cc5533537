"""Which of the tokens that a sequence holds serve a new prompt, and why the others do not.

A shared prefix is exact: its keys and values are those that the new prompt would give. Chunks after
the first difference are not, whatever is done to their positions: they were computed after other
tokens. Nothing of that kind is used unless it is asked for, and then the plan says so.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Int32  # not from arrays: explaining a plan needs no JAX

from kvrt.cellcache.checkpoint.resume import ResumePositions
from kvrt.cells.edits import Remove, Shift
from kvrt.errors import BadRange, BadToken, UsageError
from kvrt.reuse.diff import Run, common_prefix, runs
from kvrt.reuse.reasons import Reason, Reasons, Recomputed, by_comparison


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptChunk:
    """Held positions [p0, p1) that are to stand from `start` on."""

    p0: int
    p1: int
    start: int

    @property
    def end(self) -> int:
        """Where it ends in the new prompt."""
        return self.start + self.p1 - self.p0


def common_runs(ids: np.ndarray, new: np.ndarray, same: int, min_chunk: int) -> tuple[Run, ...]:
    """Common runs after a shared prefix of `same` tokens, the prompt's last token left out."""
    found = runs(ids[same:], new[same:-1], min_chunk)
    return tuple(Run(same + r.old, same + r.new, r.n) for r in found)


def kept_chunks(
    why: Reasons, pos: np.ndarray, found: tuple[Run, ...], min_chunk: int
) -> tuple[KeptChunk, ...]:
    """The runs as chunks, split where their positions do not follow each other.

    Args:
      why: gets no reason where a token is kept.
      pos: held positions.
      found: common runs.
      min_chunk: tokens of a chunk at least.
    """
    why.set_runs(found, Reason.MOVED)
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
                out.append(KeptChunk(p0=p0, p1=p0 + j - i, start=start))
                why.set(start, start + j - i, None)
    return tuple(out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixMatch:
    """How far both agree, and how much of that serves.

    Attributes:
      n_in_place: held tokens whose positions are 0, 1, 2, ... and each there once.
      n_same: tokens that both begin with.
      n_usable: those of them that were computed after just the tokens before them; at least the
        last token of the prompt is recomputed.
      resumes: whether the sequence can be cut after them and anywhere behind, or need not be.
      n_kept: those of them that stay where they are: up to where it can be cut back to.
    """

    n_in_place: int
    n_same: int
    n_usable: int
    resumes: bool
    n_kept: int


def shared_prefix(
    pos: np.ndarray, ids: np.ndarray, new: np.ndarray, *, at: ResumePositions, n_exact: int | None
) -> PrefixMatch:
    """Compares held tokens with a prompt.

    Args:
      pos: held positions, ascending.
      ids: held tokens.
      new: of the prompt, at least one.
      at: positions to cut back to.
      n_exact: held tokens at the beginning that were computed after just the tokens before them;
        None is all.
    """
    n_in_place = _n_in_place(pos)
    n_same = common_prefix(ids[:n_in_place], new)
    n_usable = min(n_same, len(new) - 1)
    if n_exact is not None:
        n_usable = min(n_usable, n_exact)
    resumes = n_usable >= at.earliest or n_usable == len(pos)
    return PrefixMatch(
        n_in_place=n_in_place,
        n_same=n_same,
        n_usable=n_usable,
        resumes=resumes,
        n_kept=n_usable if resumes else at.nearest(n_usable),
    )


def _n_in_place(pos: np.ndarray) -> int:
    off = np.flatnonzero(pos != np.arange(len(pos)))
    # A duplicate stands one entry after the first of its kind, which is not believed either.
    return min(int(off[0]), int(pos[off[0]])) if off.size else len(pos)


ANYWHERE = ResumePositions()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReusePlan:
    """What happens to the held tokens and which ones are evaluated.

    Attributes:
      n_wanted: tokens of the new prompt.
      n_prefix: tokens at its beginning that stay where they are.
      keeps: what is kept after them, ascending in old and new positions.
      first_difference: index of the first token that is not the held one; None if one history is
        the beginning of the other.
      reasons: why, for every evaluated token; ascending.
      n_exact: tokens at the beginning whose keys and values are as if all were evaluated; None is
        all.
      end: held positions end before it.
    """

    n_wanted: int
    n_prefix: int
    keeps: tuple[KeptChunk, ...]
    first_difference: int | None
    reasons: tuple[Recomputed, ...]
    n_exact: int | None
    end: int

    @property
    def approximate(self) -> bool:
        """Whether keys and values are used that were computed under another prefix."""
        return self.n_exact is not None

    @property
    def evaluate(self) -> tuple[tuple[int, int], ...]:
        """Spans [start, end) of the new prompt to evaluate, ascending; never none."""
        out: list[tuple[int, int]] = []
        for x in self.reasons:
            start = out.pop()[0] if out and out[-1][1] == x.start else x.start
            out.append((start, x.end))
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
    at: ResumePositions = ANYWHERE,
    n_exact: int | None = None,
) -> ReusePlan:
    """Plans how a sequence becomes a new prompt.

    Args:
      held: positions and ids of the sequence, by position; `Runtime.token_history`.
      wanted: ids of the new prompt, at least one.
      chunks: whether keys and values that were computed under another prefix may be used. States
        of recurrent layers cannot: leave it off with them.
      min_chunk: tokens of a chunk at least.
      at: positions that the sequence can be cut back to, `Runtime.resume_positions`.
      n_exact: held tokens at the beginning whose keys and values were computed after just the
        tokens before them, fewer than all after a context shift or a plan with chunks; None is all.

    Raises:
      BadToken: no tokens are wanted.
      BadRange: held positions do not ascend, or do not belong to the ids.
      UsageError: min_chunk is below 1, or n_exact is negative.
    """
    (pos, ids), new = held, _token_ids(wanted)
    _check_held(pos, ids)
    if min_chunk < 1 or (n_exact is not None and n_exact < 0):
        raise UsageError(
            f"min_chunk {min_chunk}, n_exact {n_exact}; min_chunk must be at least 1, n_exact at "
            "least 0"
        )
    prefix = shared_prefix(pos, ids, new, at=at, n_exact=None if chunks else n_exact)
    found = common_runs(ids, new, prefix.n_same, min_chunk)
    why = by_comparison(ids, new, found, prefix.n_same, min_chunk)
    _explain_prefix(why, prefix)
    keeps: tuple[KeptChunk, ...] = ()
    if not chunks:
        _explain_unused(why, ids, new, prefix, found)
    elif not prefix.resumes:
        why.set_runs(found, Reason.CANNOT_RESUME)
    else:
        keeps = kept_chunks(why, pos, found, min_chunk)
    why.set_last(ids, new, found, prefix.n_same)
    bounds = [n_exact] if n_exact is not None and prefix.n_kept > n_exact else []
    bounds += [keeps[0].start] if keeps else []
    n_comparable = min(prefix.n_in_place, len(new))
    return ReusePlan(
        n_wanted=len(new),
        n_prefix=prefix.n_kept,
        keeps=keeps,
        first_difference=prefix.n_same if prefix.n_same < n_comparable else None,
        reasons=why.recomputed(),
        n_exact=min(bounds, default=None),
        end=int(pos[-1]) + 1 if len(pos) else 0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Tokens [start, end) of the new prompt, at these positions."""

    start: int
    end: int


Operation = Remove | Shift | Evaluate


def operations(plan: ReusePlan, seq_id: int = 0) -> tuple[Operation, ...]:
    """What to do with the sequence, in this order; no shift meets a position that is in use.

    Chunks cross nothing, so those that move down go in ascending order, and after them those that
    move up in descending order.
    """
    out: list[Operation] = []
    end = plan.n_prefix
    for chunk in plan.keeps:
        if chunk.p0 > end:
            out.append(Remove(seq_id=seq_id, p0=end, p1=chunk.p0))
        end = chunk.p1
    if end < plan.end:
        out.append(Remove(seq_id=seq_id, p0=end, p1=None))
    shifts = [Shift(seq_id=seq_id, p0=c.p0, p1=c.p1, d=c.start - c.p0) for c in plan.keeps]
    out += [x for x in shifts if x.d < 0]
    out += [x for x in reversed(shifts) if x.d > 0]
    return (*out, *(Evaluate(start=i, end=j) for i, j in plan.evaluate))


def _check_held(pos: np.ndarray, ids: np.ndarray) -> None:
    if len(pos) != len(ids) or (np.diff(pos) < 0).any() or (len(pos) and pos[0] < 0):
        raise BadRange(
            f"{len(pos)} held positions of {len(ids)} tokens; they must be as many, none "
            "negative, in ascending order"
        )


def _token_ids(wanted: Sequence[int] | np.ndarray) -> np.ndarray:
    new = np.asarray(wanted)
    if new.ndim != 1 or not new.size or not np.issubdtype(new.dtype, np.integer):
        raise BadToken("nothing is wanted; give at least one token id")
    return new.astype(np.int32)


def _explain_prefix(why: Reasons, prefix: PrefixMatch) -> None:
    why.set(0, prefix.n_kept, None)
    unkept = Reason.AFTER_RESUMED if prefix.n_kept else Reason.CANNOT_RESUME
    why.set(prefix.n_kept, prefix.n_usable, unkept)
    why.set(prefix.n_usable, prefix.n_same, Reason.OTHER_PREFIX)


def _explain_unused(
    why: Reasons, ids: np.ndarray, new: np.ndarray, prefix: PrefixMatch, found: tuple[Run, ...]
) -> None:
    """Says of common runs that chunks are off, and of tokens that follow a moved one that."""
    why.set_runs(found, Reason.OFF)
    same = prefix.n_same
    if same == prefix.n_in_place:
        why.set(same, same + common_prefix(ids[same:], new[same:]), Reason.MOVED)
