"""Keyformer: attention received, with noise in place of what the evicted tokens took."""

import dataclasses

import jax
import jax.numpy as jnp

from kvrt.arrays import Array, Float, Int32
from kvrt.attention.scored.policy import Observed, ScoredPolicy, Seen
from kvrt.errors import BadConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keyformer(ScoredPolicy):
    """Scores are sums of softmax((x + g) / tau), x the logits and g Gumbel noise of each position.

    Attributes:
      tau: temperature of the first query.
      tau_end: temperature from `n_anneal` positions on; between them it grows in proportion.
      n_anneal: positions.
      seed: of the noise, which a position has in every layer, head and run.

    Source: arXiv:2403.09054, sec. 3; tau from 1 to 2 over the text.
    """

    n_sink: int = 0
    tau: float = 1.0
    tau_end: float = 2.0
    n_anneal: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses temperatures that no softmax has."""
        if not 0 < self.tau <= self.tau_end or self.n_anneal < 1:
            raise BadConfig(
                f"tau {self.tau} to {self.tau_end} over {self.n_anneal} positions; above 0, not "
                "falling, over at least 1"
            )
        ScoredPolicy.__post_init__(self)

    @property
    def recent(self) -> int:
        """Half of the budget."""
        return self.budget // 2 if self.n_recent is None else self.n_recent

    def observe(self, seen: Observed) -> Float[Array, "H G T S"]:
        """The softmax with noise."""
        # The newest token that a query sees is its own.
        pos = jnp.max(jnp.where(seen.visible, seen.pos[:, None, None], 0), axis=3, keepdims=True)
        part = jnp.minimum(pos.astype(jnp.float32) / self.n_anneal, 1.0)
        tau = self.tau + (self.tau_end - self.tau) * part
        x = (seen.logits + gumbel(seen.pos, self.seed)[:, None, None]) / tau
        return jax.nn.softmax(jnp.where(seen.visible, x, -jnp.inf), axis=3)

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """Sums so far."""
        return seen.sums


def gumbel(pos: Int32[Array, "..."], seed: int) -> Float[Array, "..."]:
    """Gumbel noise of positions: -ln(-ln u), u by a hash of position and seed.

    Source: the finaliser of MurmurHash3 for the hash.
    """
    x = pos.astype(jnp.uint32) + jnp.uint32(0x9E3779B9 * (seed + 1) & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    # 23 bits and a half: exact in float32, and never 0 or 1.
    u = ((x ^ (x >> 16)) >> 9).astype(jnp.float32) + 0.5
    return -jnp.log(-jnp.log(u / 2.0**23))
