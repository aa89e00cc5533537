"""Makes a policy's drops a plan over all groups, to be committed as a whole or not at all."""

import dataclasses

from kvrt.cellcache import contents, group
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.group import Rows
from kvrt.policies.policy import Drop, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoomPlan:
    """SlotPlan drops: what to commit, in this order, or nothing at all.

    Attributes:
      memory: what is held after all drops, keys of moved cells pending.
      drops: what was removed, and how long the sequence was each time.
      copies: for each drop and group the rows (src, dst) to copy first, for cells that another
        sequence shares.
    """

    memory: CacheContents
    drops: tuple[tuple[Drop, int], ...] = ()
    copies: tuple[tuple[Rows, ...], ...] = ()


def plan_room(
    held: CacheContents, seq_id: int, n_new: int, policy: Policy, *, n_promised: int = 0
) -> RoomPlan:
    """Plans drops until n_new tokens fit, or as far as drops free cells.

    Args:
      held: on the host; unchanged.
      seq_id: whose context gives way. Cells that it shares are not freed by a drop.
      n_new: tokens to make room for.
      policy: what to drop, and when.
      n_promised: empty cells that other sequences will take in the same step.

    Raises:
      CacheFull: moving shared cells needs more empty cells than there are.
      CannotRewind: a windowed group would miss what it has dropped.
    """
    room = RoomPlan(memory=held)
    n_past = group.n_past(group.main(held.books), seq_id)

    def n_fit_in(after: CacheContents, n_past: int) -> int:
        return policy.n_fit(contents.n_free(after) - n_promised, n_past)

    while (n_fit := n_fit_in(room.memory, n_past)) < n_new:
        drop = policy.drop(n_past, n_new)
        if drop is None:
            break
        cut = contents.rm(room.memory, seq_id, drop.p0, drop.p1)
        moved, copies = contents.add(cut, seq_id, drop.p1, None, -drop.n)
        if n_fit_in(moved, n_past - drop.n) <= n_fit:
            break
        room = RoomPlan(
            memory=moved, drops=(*room.drops, (drop, n_past)), copies=(*room.copies, copies)
        )
        n_past -= drop.n
    return room
