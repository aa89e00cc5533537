"""Context shift: when the cache is full, drop the older half and move the rest down.

Source: llama.cpp `examples/main` (n_keep, n_discard = n_left / 2).
"""

import dataclasses

import numpy as np

from kvrt.cells import Cells, first_freed, n_free, plan_split, seq_add, seq_pos_max, seq_rm
from kvrt.errors import BadConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drop:
    """Positions [p0, p1) of a sequence to remove; later ones move down by p1 - p0."""

    p0: int
    p1: int

    @property
    def n(self) -> int:
        """Tokens dropped."""
        return self.p1 - self.p0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextShift:
    """Keeps the first n_keep positions and drops n_discard of those that follow.

    Attributes:
      n_keep: positions never dropped (instructions, attention sinks).
      n_discard: positions dropped at once; None is half of what is not kept.
    """

    n_keep: int = 0
    n_discard: int | None = None

    def __post_init__(self) -> None:
        """Refuses negative counts."""
        if self.n_keep < 0 or (self.n_discard is not None and self.n_discard < 1):
            raise BadConfig(
                f"context shift with n_keep {self.n_keep} and n_discard {self.n_discard}; "
                "n_keep must be at least 0 and n_discard at least 1"
            )

    def wants(self, n_free: int, n_new: int) -> bool:
        """True when n_new tokens would take the last free cell (llama.cpp keeps one back)."""
        return n_free <= n_new

    def drop(self, n_past: int) -> Drop | None:
        """What to remove from a sequence of n_past positions, or None if nothing can go."""
        n_left = n_past - self.n_keep
        n = n_left // 2 if self.n_discard is None else min(self.n_discard, n_left)
        return Drop(p0=self.n_keep, p1=self.n_keep + n) if n > 0 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """A planned context shift: what to commit, in this order, or nothing at all.

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


def plan_room(cells: Cells, head: int, seq_id: int, n_new: int, policy: ContextShift) -> Room:
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
    while policy.wants(int(n_free(room.cells)), n_new):
        n_past = seq_pos_max(room.cells, seq_id) + 1
        drop = policy.drop(int(n_past))
        if drop is None:
            break
        cut = seq_rm(room.cells, seq_id, drop.p0, drop.p1)
        split, src, dst = plan_split(cut, seq_id, drop.p1, None, room.head)
        moved = seq_add(split, seq_id, drop.p1, None, -drop.n)
        if n_free(moved) <= n_free(room.cells):
            break
        room = Room(
            cells=moved,
            head=int(first_freed(split, moved)),
            drops=(*room.drops, (drop, int(n_past))),
            copies=(*room.copies, (src, dst)),
        )
    return room
