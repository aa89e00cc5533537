"""ALISA's sparse window: the newest tokens, and those that lately got most attention."""

import dataclasses

from kvrt.arrays import Array, Float
from kvrt.attention.scored.policy import Reads, ScoredPolicy, Seen, Tap
from kvrt.errors import BadConfig
from kvrt.options.policies import SparseReadSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseWindow(SparseReadSizes, ScoredPolicy):
    """Scores are attention received, which fades with each further query.

    Half of the budget are the newest tokens, and no sink is protected. The paper keeps all tokens
    somewhere and chooses anew at each step; but one that is not chosen gets no attention, so its
    score only fades and it never comes back: here it is evicted. Two kinds of scores let tokens
    come back. With `n_read` a query reads so many of the budget's tokens, half of them the newest;
    one every `refresh_every` positions reads all, and its attention alone is the score. Labels are
    the other, `DoubleSparsity(n_cells=n, n_recent=n // 2, n_sink=0, by_cell=True)`.

    Attributes:
      score_horizon: queries by which what a token got fades to 1 / e.
      n_read: tokens that a query reads, a multiple of `refresh_every`; None reads the whole budget,
        by attention of what is read.
      refresh_every: positions from one query that reads all to the next; at most half of `n_read`.

    Source: ALISA, arXiv:2403.17312, sec. 4; what the paper leaves open is as above.
    """

    n_sink: int = 0
    score_horizon: int = 64

    def __post_init__(self) -> None:
        """Refuses to look back at no query."""
        if self.score_horizon < 2:
            raise BadConfig(f"score_horizon is {self.score_horizon}; it must be at least 2")
        if self.n_read is not None and self.n_read > self.budget:
            raise BadConfig(
                f"n_read is {self.n_read}, and a head keeps {self.budget} tokens; read fewer, or "
                "raise the budget"
            )
        ScoredPolicy.__post_init__(self)

    @property
    def recent(self) -> int:
        """Half of the budget."""
        return self.budget // 2 if self.n_recent is None else self.n_recent

    @property
    def observed_by(self) -> Tap:
        """All queries, the newest most."""
        return Tap(decay=1 - 1 / self.score_horizon)

    @property
    def reads(self) -> Reads | None:
        """Half are the newest."""
        if self.n_read is None:
            return None
        n = self.n_read
        return Reads(n_read=n, n_recent=n // 2, every=self.refresh_every)

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """What is left of the attention."""
        return seen.sums
