"""KVzip: the tokens that a model attends to while it repeats a text."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from kvrt.arrays import Array, Float
from kvrt.attention.scored.policy import Observed, ScoredPolicy, Seen, Tap


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVzip(ScoredPolicy):
    """Scores are the most attention that a query has given a token; sinks stay.

    A prompt is read by `kvrt.runtime.compress.compress_prompt`, which has the model repeat it: only
    queries of the repetition count there, so that what stays serves any question. That takes
    several times a prefill, and slots for the prompt twice meanwhile. What `append` takes in behind
    the prompt is judged by all queries since.

    Departures: each kv head keeps `budget` tokens, or each layer by `head_share`, where the paper
    shares its budget between heads and layers; a prompt is repeated as a whole and not in pieces of
    2,048 tokens.

    Source: arXiv:2505.23416; KVPress `KVzipPress`.
    """

    tap: ClassVar[Tap] = Tap(greatest=True)
    reads_whole: ClassVar[bool] = True

    def score(self, seen: Seen) -> Float[Array, "H S"]:
        """The most attention received."""
        return seen.sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repetition(KVzip):
    """The same while a prompt is repeated: queries from position n_prompt on count."""

    n_prompt: int

    def observe(self, seen: Observed) -> Float[Array, "H G T S"]:
        """Probabilities, 0 for queries of the prompt."""
        n_tokens = seen.probabilities.shape[2]
        repeats = seen.pos[:, None, -n_tokens:, None] >= self.n_prompt
        return jnp.where(repeats, seen.probabilities, 0.0)
