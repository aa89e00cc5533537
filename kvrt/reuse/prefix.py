"""The prefix that held tokens share with a new prompt: what of it can stay where it is."""

import dataclasses

import numpy as np

from kvrt.cellcache.checkpoint.resume import ResumePositions
from kvrt.reuse.diff import common_prefix


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
