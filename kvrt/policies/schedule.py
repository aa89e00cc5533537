"""A schedule of edits: which positions of a sequence change before it goes on, and when next.

All follows from counts, so that it is decided before anything is computed, the same whoever shares
the cache, and the same again when a sequence is computed anew.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from kvrt.cells.edits import Divide, Remove, SeqEdit, Shift
from kvrt.policies.policy import Drop


class SeqCounts(NamedTuple):
    """What a schedule decides by.

    Attributes:
      seq_id: the sequence's number in the edits.
      n_prompt: tokens of its prompt.
      n_computed: tokens that were computed: none, or as many as `Due.n_until` said last.
      n_gone: positions by which the sequence is shorter, dropped or shared by tokens.
      n_free: empty cells; None is what its own context has left.
      n_new: tokens that come in at once; None is a part of the prompt, then one token.
    """

    seq_id: int
    n_prompt: int
    n_computed: int
    n_gone: int = 0
    n_free: int | None = None
    n_new: int | None = None

    @property
    def n_past(self) -> int:
        """The position of the next token."""
        return self.n_computed - self.n_gone


@dataclasses.dataclass(frozen=True, kw_only=True)
class Due:
    """What changes before a sequence goes on, and how far it then comes.

    Attributes:
      edits: in their order; a drop is a `Remove` and the `Shift` that closes the gap.
      n_until: tokens of the sequence, from its first on, up to which nothing else is due.
    """

    edits: Sequence[SeqEdit]
    n_until: int

    @property
    def drops(self) -> tuple[Drop, ...]:
        """Tokens that go."""
        removed = (x for x in self.edits if isinstance(x, Remove) and x.p1 is not None)
        return tuple(Drop(p0=x.p0, p1=x.p1 or 0) for x in removed)

    @property
    def divided(self) -> tuple[Divide, ...]:
        """Positions that tokens come to share, a range for each round."""
        return tuple(x for x in self.edits if isinstance(x, Divide))

    @property
    def n_gone(self) -> int:
        """Positions by which the sequence gets shorter."""
        shared = sum((n := (x.p1 or 0) - x.p0) - n // x.d for x in self.divided)
        return shared + sum(drop.n for drop in self.drops)


@runtime_checkable
class Schedule(Protocol):
    """Changes positions by rule: drops of a policy, or rounds of SelfExtend.

    A cache applies what is due, in a Runtime and in an Engine alike. What is dropped needs no room
    any more, so that a request has all the room of its schedule from the start; what only shares
    positions keeps its cells.
    """

    @property
    def drops(self) -> bool:
        """Whether tokens go."""
        ...

    @property
    def n_most(self) -> int | None:
        """Tokens that are in the cache at most; None where none goes."""
        ...

    @property
    def n_keep(self) -> int:
        """First tokens that never go nor move."""
        ...

    def due(self, counts: SeqCounts) -> Due:
        """What changes before the next tokens come in."""
        ...


def drop_edits(seq_id: int, drop: Drop) -> tuple[SeqEdit, SeqEdit]:
    """Removes positions of a sequence, and moves later ones down."""
    return Remove(seq_id=seq_id, p0=drop.p0, p1=drop.p1), Shift(
        seq_id=seq_id, p0=drop.p1, d=-drop.n
    )


def n_first(schedule: Schedule, n_prompt: int) -> int:
    """Tokens of a sequence at which something is due for the first time, or its prompt is cut."""
    return schedule.due(SeqCounts(seq_id=0, n_prompt=n_prompt, n_computed=0)).n_until
