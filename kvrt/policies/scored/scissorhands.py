"""Scissorhands: tokens that lately were seldom of little weight."""

import dataclasses

import jax.numpy as jnp

from kvrt.arrays import Array, Float
from kvrt.attention.scored.policy import Observed, ScoredPolicy, Seen, Tap


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scissorhands(ScoredPolicy):
    """Counts, over the queries since the last eviction, how often a token got more than its share.

    The share is one by the number of tokens that the query sees. `interval` is the history window
    of the paper, and what one eviction takes.

    Source: arXiv:2305.17118, algorithm 2.
    """

    @property
    def observed_by(self) -> Tap:
        """All queries since the last eviction."""
        return Tap(horizon=self.interval)

    def observe(self, seen: Observed) -> Float[Array, "H G T S"]:
        """1 for a probability above the share."""
        n = jnp.sum(seen.visible.astype(jnp.float32), axis=3, keepdims=True)
        above = seen.visible & (seen.probabilities * n > 1.0)
        return above.astype(jnp.float32)

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """How often."""
        return seen.sums
