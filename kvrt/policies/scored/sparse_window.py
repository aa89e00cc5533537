"""ALISA's sparse window: the newest tokens, and those that lately got most attention."""

import dataclasses

from kvrt.arrays import Array, Float
from kvrt.attention.scored.policy import ScoredPolicy, Seen, Tap
from kvrt.errors import BadConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseWindow(ScoredPolicy):
    """Scores are attention received, which fades with each further query.

    Half of the budget are the newest tokens, and no sink is protected. The paper keeps all tokens
    somewhere and chooses anew at each step; but one that is not chosen gets no attention, so its
    score only fades and it never comes back: here it is evicted. Scores that let tokens come back
    are those of labels, `DoubleSparsity(n_cells=n, n_recent=n // 2, n_sink=0, by_cell=True)`.

    Attributes:
      score_horizon: queries by which what a token got fades to 1 / e.

    Source: ALISA, arXiv:2403.17312, sec. 4; what the paper leaves open is as above.
    """

    n_sink: int = 0
    score_horizon: int = 64

    def __post_init__(self) -> None:
        """Refuses to look back at no query."""
        if self.score_horizon < 2:
            raise BadConfig(f"score_horizon is {self.score_horizon}; it must be at least 2")
        ScoredPolicy.__post_init__(self)

    @property
    def recent(self) -> int:
        """Half of the budget."""
        return self.budget // 2 if self.n_recent is None else self.n_recent

    @property
    def observed_by(self) -> Tap:
        """All queries, the newest most."""
        return Tap(decay=1 - 1 / self.score_horizon)

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """What is left of the attention."""
        return seen.sums
