"""Makes a policy's drops a plan over all groups, to be committed as a whole or not at all."""

import dataclasses

from kvrt.cells import book as books
from kvrt.cells.book import Book, Rows
from kvrt.policies.policy import Drop, Policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Room:
    """Planned drops: what to commit, in this order, or nothing at all.

    Attributes:
      books: the groups after all drops, keys of moved cells pending.
      drops: what was removed, and how long the sequence was each time.
      copies: for each drop and group the rows (src, dst) to copy first, for cells that another
        sequence shares.
    """

    books: tuple[Book, ...]
    drops: tuple[tuple[Drop, int], ...] = ()
    copies: tuple[tuple[Rows, ...], ...] = ()


def plan_room(held: tuple[Book, ...], seq_id: int, n_new: int, policy: Policy) -> Room:
    """Plans drops until n_new tokens fit, or as far as drops free cells.

    Args:
      held: the groups, on the host; unchanged.
      seq_id: whose context gives way. Cells that it shares are not freed by a drop.
      n_new: tokens to make room for.
      policy: what to drop, and when.

    Raises:
      CacheFull: moving shared cells needs more empty cells than there are.
      CannotRewind: a windowed group would miss what it has dropped.
    """
    room = Room(books=held)
    n_past = books.n_past(books.main(held), seq_id)
    while (n_fit := policy.n_fit(books.n_free(room.books), n_past)) < n_new:
        drop = policy.drop(n_past, n_new)
        if drop is None:
            break
        cut = [books.rm(b, seq_id, drop.p0, drop.p1) for b in room.books]
        added = [books.add(b, seq_id, drop.p1, None, -drop.n) for b in cut]
        moved, copies = zip(*added, strict=True)
        if policy.n_fit(books.n_free(moved), n_past - drop.n) <= n_fit:
            break
        room = Room(books=moved, drops=(*room.drops, (drop, n_past)), copies=(*room.copies, copies))
        n_past -= drop.n
    return room
