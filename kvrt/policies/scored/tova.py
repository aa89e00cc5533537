"""TOVA: the tokens that the newest query attends to, one set for all heads of a layer."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvrt.arrays import Array, Float
from kvrt.attention.scored.policy import ScoredPolicy, Seen, Tap
from kvrt.errors import BadConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TOVA(ScoredPolicy):
    """Scores are the last query's probabilities, averaged over all heads.

    Source: arXiv:2401.06104, sec. 3.2; KVPress `TOVAPress`.
    """

    n_sink: int = 0

    tap: ClassVar[Tap] = Tap(horizon=1)

    def __post_init__(self) -> None:
        """Refuses a budget that heads share: they all keep the same."""
        if self.head_share < 1:
            raise BadConfig(
                f"head_share is {self.head_share}, and TOVA keeps the same tokens in all heads of "
                "a layer; leave it out, or use SnapKV"
            )
        ScoredPolicy.__post_init__(self)

    @property
    def recent(self) -> int:
        """The newest token alone."""
        return 1 if self.n_recent is None else self.n_recent

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """The same for every head."""
        mean = jnp.mean(seen.sums, axis=0, keepdims=True)
        return jnp.broadcast_to(mean, seen.sums.shape)
