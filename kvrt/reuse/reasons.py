"""Why tokens of a new prompt are recomputed, token by token."""

import dataclasses
import enum
import itertools
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int  # not from arrays: explaining a plan needs no JAX

from kvrt.reuse.diff import Box, Run, gaps, runs

_SHORT = 4  # tokens: common runs below this are chance and are not spoken of


class Reason(enum.StrEnum):
    """Why tokens are evaluated."""

    DIFFERS = "differs"
    NOT_HELD = "not held"
    LAST = "last token is evaluated again"
    MOVED = "held positions have gaps or were moved"
    OTHER_PREFIX = "computed under another prefix"
    SHORT = "too short a chunk"
    CANNOT_RESUME = "windowed or recurrent layers cannot resume there"
    AFTER_RESUMED = "after the last position that windowed or recurrent layers resume at"
    OFF = "chunks are off"


_ALL = tuple(Reason)
KEPT = -1  # of a token that is not recomputed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recomputed:
    """Tokens [start, end) of the new prompt that are not reused, and why."""

    start: int
    end: int
    reason: Reason


class Reasons:
    """One reason a token, or none for those that are kept.

    Attributes:
      codes: `KEPT`, or a number of `code`. `[T]`
    """

    def __init__(self, n: int) -> None:
        """All differ."""
        self.codes: Int[np.ndarray, " T"] = np.full(n, code(Reason.DIFFERS))

    def set(self, start: int, end: int, reason: Reason | None) -> None:
        """Gives tokens [start, end) a reason; None keeps them."""
        self.codes[start:end] = KEPT if reason is None else code(reason)

    def set_runs(self, found: Iterable[Run], reason: Reason) -> None:
        """Gives the tokens of common runs a reason."""
        for run in found:
            self.set(run.new, run.new + run.n, reason)

    def set_last(self, ids: np.ndarray, new: np.ndarray, found: tuple[Run, ...], same: int) -> None:
        """Gives the last token the reason of those before it, had it been reused with them."""
        codes = self.codes
        if same == len(new):
            codes[-1] = code(Reason.LAST)
        elif found and found[-1].new + found[-1].n == len(new) - 1:
            after = found[-1].old + found[-1].n
            if after < len(ids) and ids[after] == new[-1]:
                codes[-1] = code(Reason.LAST) if codes[-2] == KEPT else codes[-2]

    def recomputed(self) -> tuple[Recomputed, ...]:
        """Stretches of one reason, ascending."""
        codes = self.codes
        cuts = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
        return tuple(
            Recomputed(start=i, end=j, reason=_ALL[codes[i]])
            for i, j in itertools.pairwise(cuts)
            if codes[i] != KEPT
        )


def code(reason: Reason) -> int:
    """The number of a reason."""
    return _ALL.index(reason)


def by_comparison(
    ids: np.ndarray, new: np.ndarray, found: tuple[Run, ...], same: int, min_chunk: int
) -> Reasons:
    """A reason for every token: new, in the place of another one, or in a short common run.

    Args:
      ids: held tokens.
      new: of the prompt.
      found: common runs after the shared prefix.
      same: tokens of the shared prefix.
      min_chunk: tokens of a chunk at least.
    """
    why = Reasons(len(new))
    for gap in gaps(found, Box(same, len(ids), same, len(new))):
        if gap.a0 == gap.a1:
            why.set(gap.b0, gap.b1, Reason.NOT_HELD)
        elif min_chunk > _SHORT:
            short = runs(ids[gap.a0 : gap.a1], new[gap.b0 : gap.b1], _SHORT)
            why.set_runs((Run(r.old, gap.b0 + r.new, r.n) for r in short), Reason.SHORT)
    return why
