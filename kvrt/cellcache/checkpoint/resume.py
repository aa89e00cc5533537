"""Positions that a sequence can be cut back to."""

import dataclasses

from kvrt.cellcache import window
from kvrt.cellcache.window import Intervals
from kvrt.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumePositions:
    """Positions that a sequence can be cut back to, a set: `93 in positions`. 0 is always one.

    Attributes:
      gaps: [a, b) where some layer lacks what the next token sees; ascending and apart.
      checkpoints: positions of its context checkpoints, ascending; each is in the set.
    """

    gaps: Intervals = ()
    checkpoints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuses gaps that are no intervals after 0."""
        if any(not 0 < a < b for a, b in self.gaps) or list(self.gaps) != sorted(self.gaps):
            raise UsageError(f"gaps {self.gaps}; they are intervals [a, b) after 0, ascending")

    @property
    def earliest(self) -> int:
        """The least position from which on all are in the set."""
        return self.gaps[-1][1] if self.gaps else 0

    def __contains__(self, pos: int) -> bool:
        """Whether a sequence can be cut back to a position as it is, or by a checkpoint."""
        return pos >= 0 and self.nearest(pos) == pos

    def nearest(self, pos: int) -> int:
        """The last of them at or before a position."""
        before = (x for x in self.checkpoints if x <= pos)
        whole = next((a - 1 for a, b in self.gaps if a <= pos < b), pos)
        return max((whole, *before))


def of_layers(gaps: Intervals, checkpoints: tuple[int, ...]) -> ResumePositions:
    """The positions of a sequence.

    Args:
      gaps: of all its layers, in any order; they may overlap.
      checkpoints: positions of its checkpoints.
    """
    return ResumePositions(gaps=window.union(gaps), checkpoints=checkpoints)
