"""Controls: policies by score that look at nothing, which a method has to beat."""

import dataclasses

from kvrt.arrays import Array, Float
from kvrt.attention.scored.policy import ScoredPolicy, Seen
from kvrt.policies.scored.keyformer import gumbel


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecentOnly(ScoredPolicy):
    """Sinks and the newest tokens; `n_sink=0` is the control without sinks."""

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """Positions."""
        return seen.pos.astype(seen.sums.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomTokens(ScoredPolicy):
    """Tokens by a hash of their positions.

    Attributes:
      seed: of the hash.
    """

    seed: int = 0

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """The hash."""
        return gumbel(seen.pos, self.seed)
