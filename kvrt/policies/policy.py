"""What a policy is: it says when something has to go, and which positions.

A policy decides by positions alone and has no state, so that a plan can be made and discarded.
"""

import dataclasses
from typing import Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drop:
    """Positions [p0, p1) of a sequence to remove; later ones move down by p1 - p0."""

    p0: int
    p1: int

    @property
    def n(self) -> int:
        """Tokens dropped."""
        return self.p1 - self.p0


@runtime_checkable
class Policy(Protocol):
    """Makes room in a sequence; what it drops is reported by `Runtime.stats().drops`.

    After a drop later positions move down, so that the sequence stays without a gap.
    """

    @property
    def n_keep(self) -> int:
        """Positions from 0 that are never dropped."""
        ...

    def n_fit(self, n_free: int, n_past: int) -> int:
        """Tokens that may come in before something has to go; 0 or less when it has to now.

        Args:
          n_free: empty cells.
          n_past: positions of the sequence.
        """
        ...

    def drop(self, n_past: int, n_new: int = 1) -> Drop | None:
        """What to remove, from n_keep on, so that n_new tokens may follow; None if nothing can."""
        ...
