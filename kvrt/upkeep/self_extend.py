"""SelfExtend inside the cache: positions of old tokens are divided, those behind them move up.

Of w tokens with positions of their own, n at a time come to share one; what follows them closes
the gap. Keys rotate by the difference alone, whatever the path there, in one K-shift a round.

Source: llama.cpp `tools/completion` (ga_i, ga_n, ga_w); its `seq_div` rotates keys the wrong way.
"""

import dataclasses

import numpy as np

from kvrt.arrays import Int32
from kvrt.cells import Cells, apply, plan_split, seq_pos_max
from kvrt.cells.edits import Divide, SeqEdit, Shift
from kvrt.config import SelfExtend


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extension:
    """Planned rounds: what to commit.

    Attributes:
      cells: the cells after all rounds, keys of moved ones pending.
      ga_i: positions below it are shared by ga_n tokens each.
      n_rounds: rounds; 0 changes nothing.
      copies: cells (src, dst) to copy first, because another sequence shares them.
      edits: the changes of positions, in their order.
    """

    cells: Cells
    ga_i: int
    n_rounds: int
    copies: tuple[Int32[np.ndarray, " M"], Int32[np.ndarray, " M"]]
    edits: tuple[SeqEdit, ...] = ()


def plan_extend(cells: Cells, head: int, seq_id: int, ga_i: int, extend: SelfExtend) -> Extension:
    """Plans rounds until fewer than w tokens of a sequence have positions of their own.

    Args:
      cells: on the host; unchanged.
      head: where the search for cells to split shared ones starts.
      seq_id: whose positions change.
      ga_i: as the last call left it, 0 at first.
      extend: n and w.

    Raises:
      CacheFull: too few empty cells to split shared ones.
    """
    n_past = int(seq_pos_max(cells, seq_id)) + 1
    edits, end = due_rounds(seq_id, n_past, ga_i, extend)
    none = np.zeros(0, np.int32)
    if not edits:
        return Extension(cells=cells, ga_i=ga_i, n_rounds=0, copies=(none, none))
    cells, src, dst = plan_split(cells, seq_id, ga_i, None, head)
    for edit in edits:
        cells = apply(cells, edit)
    n_rounds = len(edits) // 3
    return Extension(
        cells=cells, ga_i=end, n_rounds=n_rounds, copies=(src, dst), edits=tuple(edits)
    )


def due_rounds(
    seq_id: int, n_past: int, ga_i: int, extend: SelfExtend
) -> tuple[list[SeqEdit], int]:
    """The edits of all rounds that are due, three a round, and `ga_i` after them."""
    n, w = extend.ga_n, extend.ga_w
    edits: list[SeqEdit] = []
    while n > 1 and n_past >= ga_i + w:
        # Moved up by ib * bd, tokens are at their number in the history: so groups of n align.
        ib, bd = n * ga_i // w, w // n * (n - 1)
        up = ib * bd
        edits += [
            Shift(seq_id=seq_id, p0=ga_i, p1=n_past, d=up),
            Divide(seq_id=seq_id, p0=ga_i + up, p1=ga_i + up + w, d=n),
            Shift(seq_id=seq_id, p0=ga_i + up + w, p1=n_past + up, d=w // n - up - w),
        ]
        n_past, ga_i = n_past - bd, ga_i + w // n
    return edits, ga_i
