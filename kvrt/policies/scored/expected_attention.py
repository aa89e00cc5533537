"""Expected attention: what queries to come will attend to, by the statistics of those so far."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from kvrt.arrays import AnyArray, Array, Float, Int32
from kvrt.attention.scored.policy import ScoredPolicy, Seen, Tap
from kvrt.config import RopeSpec
from kvrt.errors import BadConfig
from kvrt.store import rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpectedAttention(ScoredPolicy):
    """Queries are taken as normal, with mean and covariance of those so far before RoPE.

    The score of a key is the softmax of k.m / sqrt(D) + k.C.k / 2D, m and C rotated by the mean
    rotation of the next `n_future` positions, averaged over the query heads of a kv head, times the
    norm of its value.

    Attributes:
      n_future: positions that the rotation is averaged over.
      epsilon: added to the softmax before norms of values count.

    Source: arXiv:2510.00636, sec. 3; KVPress `ExpectedAttentionPress` and its defaults.
    """

    n_future: int = 512
    epsilon: float = 0.0

    tap: ClassVar[Tap] = Tap(queries=True)

    def __post_init__(self) -> None:
        """Refuses to look at no position."""
        if self.n_future < 1:
            raise BadConfig(f"n_future is {self.n_future}; it must be at least 1")
        ScoredPolicy.__post_init__(self)

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """See the class."""
        sums, group = seen.queries, seen.group
        assert sums is not None, "a tap with queries"
        n = jnp.maximum(sums.n, 1.0)
        mean = sums.q / n
        cov = sums.qq / n - mean[:, :, None] * mean[:, None]
        if group.rope is not None:
            freqs = rope.frequencies(group.rope, seen.n_ctx)
            size = rope.magnitude(group.rope, seen.n_ctx)
            to = seen.next_place + jnp.arange(self.n_future, dtype=jnp.int32)
            matrix = size * mean_rotation(group.rope, freqs, to, mean.shape[1])
            mean = mean @ matrix.T
            cov = jnp.einsum("de,qef,gf->qdg", matrix, cov, matrix)
        n_kv, scale = group.n_kv_heads, jnp.float32(group.score_scale)
        mean = mean.reshape(n_kv, -1, mean.shape[1])
        cov = cov.reshape(n_kv, -1, *cov.shape[1:])
        logits = jnp.einsum("hsd,hgd->hgs", seen.keys, mean) * scale
        logits += jnp.einsum("hsd,hgde,hse->hgs", seen.keys, cov, seen.keys) * (scale * scale / 2)
        # As KVPress: sinks are no candidates, and take no part in the softmax.
        sink = (seen.pos < self.n_sink)[:, None]
        weight = jnp.mean(jax.nn.softmax(jnp.where(sink, -jnp.inf, logits), axis=2), axis=1)
        norm = jnp.sqrt(jnp.sum(seen.values * seen.values, axis=2))
        return (weight + self.epsilon) * norm


def mean_rotation(
    spec: RopeSpec, freqs: Float[AnyArray, " R"], pos: Int32[Array, " P"], head_dim: int
) -> Float[Array, "D D"]:
    """The mean of the matrices that rotate a vector to some positions."""
    c, s = (jnp.mean(x, axis=0) for x in rope.angles(jnp.asarray(freqs), pos))
    half = spec.n_rot // 2
    pairs = jnp.arange(half)
    a, b = (2 * pairs, 2 * pairs + 1) if spec.layout == "norm" else (pairs, pairs + half)
    matrix = jnp.eye(head_dim).at[a, a].set(c).at[b, b].set(c)
    return matrix.at[a, b].set(-s).at[b, a].set(s)
