"""Chunks of held tokens behind the shared prefix that occur in a new prompt, wherever it is."""

import dataclasses

import numpy as np

from kvrt.reuse.diff import Run, runs
from kvrt.reuse.reasons import Reason, Reasons


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


def common_runs(ids: np.ndarray, new: np.ndarray, same: int, min_chunk: int) -> tuple[Run, ...]:
    """Common runs after a shared prefix of `same` tokens, the prompt's last token left out."""
    found = runs(ids[same:], new[same:-1], min_chunk)
    return tuple(Run(same + r.old, same + r.new, r.n) for r in found)


def kept_chunks(
    why: Reasons, pos: np.ndarray, found: tuple[Run, ...], min_chunk: int
) -> tuple[Chunk, ...]:
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
                out.append(Chunk(p0=p0, p1=p0 + j - i, start=start))
                why.set(start, start + j - i, None)
    return tuple(out)
