"""Makes a policy's drops a plan over cells, to be committed as a whole or not at all."""

import dataclasses

import numpy as np

from kvrt.cells import Cells, first_freed, n_free, plan_split, seq_add, seq_pos_max, seq_rm
from kvrt.policies.policy import Drop, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Planned drops: what to commit, in this order, or nothing at all.

    Attributes:
      cells: the cells after all drops, keys of moved ones pending.
      head: where the next search starts.
      drops: what was removed, and how long the sequence was each time.
      copies: rows (src, dst) to copy first, for cells that another sequence shares.
    """

    cells: Cells
    head: int
    drops: tuple[tuple[Drop, int], ...] = ()
    copies: tuple[tuple[np.ndarray, np.ndarray], ...] = ()


def plan_room(cells: Cells, head: int, seq_id: int, n_new: int, policy: Policy) -> Room:
    """Plans drops until n_new tokens fit, or as far as drops free cells.

    Args:
      cells: on the host; unchanged.
      head: where searches start.
      seq_id: whose context gives way. Cells that it shares are not freed by a drop.
      n_new: tokens to make room for.
      policy: what to drop, and when.

    Raises:
      CacheFull: moving shared cells needs more empty cells than there are.
    """
    room = Room(cells=cells, head=head)
    n_past = int(seq_pos_max(cells, seq_id)) + 1
    while (n_fit := policy.n_fit(int(n_free(room.cells)), n_past)) < n_new:
        drop = policy.drop(n_past, n_new)
        if drop is None:
            break
        cut = seq_rm(room.cells, seq_id, drop.p0, drop.p1)
        split, src, dst = plan_split(cut, seq_id, drop.p1, None, room.head)
        moved = seq_add(split, seq_id, drop.p1, None, -drop.n)
        if policy.n_fit(int(n_free(moved)), n_past - drop.n) <= n_fit:
            break
        room = Room(
            cells=moved,
            head=int(first_freed(split, moved)),
            drops=(*room.drops, (drop, n_past)),
            copies=(*room.copies, (src, dst)),
        )
        n_past -= drop.n
    return room
