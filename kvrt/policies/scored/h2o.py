"""H2O, heavy hitters: the tokens that got most attention since they came in, and the newest."""

import dataclasses

from kvrt.arrays import Array, Float
from kvrt.attention.scored.policy import ScoredPolicy, Seen


@dataclasses.dataclass(frozen=True, kw_only=True)
class H2O(ScoredPolicy):
    """Scores are sums of probabilities over all queries so far, prompt included.

    Half of the budget are the newest tokens, unless `n_recent` says otherwise, and no sink is
    protected: those stay by their scores.

    Attributes:
      normalised: sums are divided by the number of queries that could see a token, for older
        tokens have had more of them.

    Source: arXiv:2306.14048, sec. 4.2; KVPress `ObservedAttentionPress` (normalised).
    """

    n_sink: int = 0
    normalised: bool = False

    @property
    def recent(self) -> int:
        """Half of the budget."""
        return self.budget // 2 if self.n_recent is None else self.n_recent

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """Attention received."""
        return seen.sums / seen.n_queries if self.normalised else seen.sums
