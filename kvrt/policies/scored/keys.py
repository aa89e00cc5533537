"""Scores of keys alone, which need no attention: their norms, and how they differ."""

import dataclasses

import jax.numpy as jnp

from kvrt.arrays import Array, Float
from kvrt.attention.scored.policy import ScoredPolicy, Seen


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyNorm(ScoredPolicy):
    """Keeps keys of small norm, which queries tend to attend to.

    Source: arXiv:2406.11430; KVPress `KnormPress`.
    """

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """Less for longer keys."""
        return -jnp.sqrt(jnp.sum(seen.keys * seen.keys, axis=2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyDiff(ScoredPolicy):
    """Keeps keys that differ most from the mean direction of all.

    Source: arXiv:2504.15364, sec. 3; KVPress `KeyDiffPress`.
    """

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """Less for keys that are like the mean of the keys at length one."""
        norms = jnp.sqrt(jnp.sum(seen.keys * seen.keys, axis=2, keepdims=True))
        unit = seen.keys / jnp.maximum(norms, 1e-8)
        mean = jnp.sum(jnp.where(seen.taken[:, :, None], unit, 0.0), axis=1, keepdims=True)
        mean /= jnp.maximum(jnp.sqrt(jnp.sum(mean * mean, axis=2, keepdims=True)), 1e-8)
        return -jnp.sum(unit * mean, axis=2)
