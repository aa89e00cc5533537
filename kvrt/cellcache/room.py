"""Plans what a policy evicts from a sequence in all groups, to be committed as a whole or not."""

import dataclasses

from kvrt.cellcache import contents
from kvrt.cellcache import group as groups
from kvrt.cellcache.blocks import CellCopies
from kvrt.cellcache.contents import CacheContents
from kvrt.cells.edits import Remove, Shift
from kvrt.errors import CacheFull
from kvrt.policies.policy import Drop, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoomPlan:
    """Planned drops, to be committed in this order, or none of them.

    Attributes:
      contents: the contents after all drops, the K-shift of moved cells pending.
      drops: what was removed, and how long the sequence was each time.
      copies: for each drop and group the cells to copy first, because another sequence shares
        them.
    """

    contents: CacheContents
    drops: tuple[tuple[Drop, int], ...] = ()
    copies: tuple[tuple[CellCopies, ...], ...] = ()


def plan_room(
    before: CacheContents, seq_id: int, n_new: int, policy: Policy, *, n_promised: int = 0
) -> RoomPlan:
    """Plans drops until n_new tokens fit, or as far as drops free cells.

    Args:
      before: on the host; unchanged.
      seq_id: the sequence to evict from. Cells that it shares are not freed by a drop.
      n_new: tokens to make room for.
      policy: what to drop, and when.
      n_promised: empty cells that other sequences will take in the same step.

    Raises:
      CacheFull: moving shared cells needs more empty cells than there are, or leaves fewer than
        the new tokens need where the policy would have them dropped whatever is empty.
      CannotRewind: a windowed group would lack what it has dropped.
    """
    room = RoomPlan(contents=before)
    n_past = groups.n_past(groups.main_group(before.groups), seq_id)

    def n_fit_in(after: CacheContents, n_past: int) -> int:
        return policy.n_fit(contents.n_tokens_free(after) - n_promised, n_past)

    while (n_fit := n_fit_in(room.contents, n_past)) < n_new:
        drop = policy.drop(n_past, n_new)
        if drop is None:
            break
        cut, _ = contents.apply(room.contents, Remove(seq_id=seq_id, p0=drop.p0, p1=drop.p1))
        moved, copies = contents.apply(cut, Shift(seq_id=seq_id, p0=drop.p1, d=-drop.n))
        if n_fit_in(moved, n_past - drop.n) <= n_fit:
            _check_own_limit(policy, n_past, n_new, copies)
            break
        room = RoomPlan(
            contents=moved, drops=(*room.drops, (drop, n_past)), copies=(*room.copies, copies)
        )
        n_past -= drop.n
    return room


def _check_own_limit(
    policy: Policy, n_past: int, n_new: int, copies: tuple[CellCopies, ...]
) -> None:
    """Refuses tokens beyond what a policy keeps, where a drop would take more cells than it frees.

    Raises:
      CacheFull: they are; without that limit the cells decide.
    """
    n_most = policy.n_fit(2**31 - 1, n_past)
    if n_most < n_new:
        n_copied = max((len(src) for src, _ in copies), default=0)
        raise CacheFull(
            f"a sequence of {n_past} tokens may get {max(n_most, 0)} more and {n_new} are wanted; "
            f"a drop would copy {n_copied} cells that other sequences share, and leave too few "
            "empty ones; raise n_ctx, or remove those sequences"
        )
