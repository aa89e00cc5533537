"""Which runs are worth reading once for their members.

Attention over lists ends with the longest one, and each of its passes takes all sequences that an
engine may have, so that a run helps as far as it makes the longest list shorter. A pass over a run
costs as much as one list's and something more for each member.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvrt.arrays import Int32
from kvrt.serving.reading.runs import SharedRun

# In passes of one list, measured on a CPU with 3 kv heads and 9 query heads of 64 channels
# (`python -m scripts.bench.reuse.shared_reads`): what beginning a run costs, what each pass over it
# costs, and each member that it is read for.
_BEGIN, _PASS, _MEMBER = 2.0, 1.0, 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadCost:
    """The cost of reading block lists, in passes over one of them.

    Attributes:
      n_lists: that each pass takes, whether they have a block or not.
      n_side: blocks of a pass.
      widths: members that a run is read for, as few of these as hold its own.
      most: runs of a step, at most.
    """

    n_lists: int
    n_side: int
    widths: Sequence[int]
    most: int

    def of_lists(self, longest: int) -> float:
        """The cost of lists of which the longest has so many blocks."""
        return self.n_lists * self._passes(longest)

    def of_run(self, run: SharedRun) -> float:
        """The cost of reading a run once."""
        width = next(w for w in self.widths if w >= len(run.members))
        return _BEGIN + self._passes(run.n_blocks) * (_PASS + _MEMBER * width)

    def _passes(self, n_blocks: int) -> int:
        return -(-n_blocks // self.n_side)


def choose_runs(
    runs: Sequence[SharedRun], n_blocks: Int32[np.ndarray, " S"], cost: ReadCost
) -> list[SharedRun]:
    """The runs to read once, each with those that it goes on from; none where that costs less.

    What makes the longest list shorter is taken first, for nothing else helps before it.
    """
    after = {(run.start, int(m)): run for run in runs for m in run.members}
    left, at = n_blocks.copy(), np.zeros_like(n_blocks)
    taken: list[SharedRun] = []
    n_best, spent, best = 0, 0.0, cost.of_lists(int(left.max(initial=0)))
    while len(taken) < cost.most:
        longest = int(left.argmax())
        run = after.get((int(at[longest]), longest))
        if run is None:
            break
        taken.append(run)
        left[run.members] -= run.n_blocks
        at[run.members] = run.end
        spent += cost.of_run(run)
        now = spent + cost.of_lists(int(left.max()))
        if now < best:
            n_best, best = len(taken), now
    return taken[:n_best]
