"""A text read chunk by chunk, and what it cost: the figures of `perplexity.py`."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvrt import Runtime


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """A text as a mode read it, chunk by chunk.

    Attributes:
      losses: negative log-likelihood of each token but the first.
      starts: where each chunk began, in tokens.
      seconds: of each chunk.
      cache_bytes: of the cache after each chunk.
      live_bytes: of all arrays on the device after each chunk, weights and logits too.
    """

    losses: np.ndarray
    starts: np.ndarray
    seconds: np.ndarray
    cache_bytes: np.ndarray
    live_bytes: np.ndarray


def read(
    runtime: Runtime,
    tokens: Sequence[int],
    chunk: int,
    *,
    afresh: int | None = None,
    done: Callable[[int], None] = lambda n: None,
) -> Reading:
    """Reads tokens, chunk by chunk.

    Args:
      runtime: empty.
      tokens: at least two.
      chunk: tokens of a step, at most the runtime's n_ubatch if a policy drops some.
      afresh: tokens of a window that is evaluated anew for each chunk; None goes on from the last.
      done: told how many more were read.
    """
    starts = np.arange(0, len(tokens), chunk)
    losses, rows = [], []
    for first in starts.tolist():
        before = time.perf_counter()
        if afresh is not None:
            runtime.clear()
            if past := tokens[max(first + chunk - afresh, 0) : first]:
                runtime.append(past)
        part = tokens[first : first + chunk]
        losses.append(_chunk_losses(runtime, part, tokens[first + 1 : first + 1 + len(part)]))
        seconds = time.perf_counter() - before
        n_live_bytes = sum(x.nbytes for x in jax.live_arrays())
        rows.append((seconds, runtime.stats().cache_bytes, n_live_bytes))
        done(len(part))
    columns = dict(zip(("seconds", "cache_bytes", "live_bytes"), np.array(rows).T, strict=True))
    return Reading(losses=np.concatenate(losses), starts=starts, **columns)


def figures(reading: Reading, segment: int) -> dict[str, Any]:
    """Perplexities, medians of the time of a chunk, and bytes at the end of each segment."""
    number = reading.starts // segment
    ends = np.append(np.flatnonzero(np.diff(number)), len(number) - 1)
    steps = [np.median(reading.seconds[number == i]) * 1e3 for i in np.unique(number)]
    return {
        "perplexity": by_segment(reading.losses, segment),
        "whole": perplexity(reading.losses),
        "step_ms": [round(float(x), 1) for x in steps],
        "cache_bytes": reading.cache_bytes[ends].astype(int).tolist(),
        "live_bytes": reading.live_bytes[ends].astype(int).tolist(),
        "seconds": round(float(reading.seconds.sum()), 1),
    }


def perplexity(losses: np.ndarray) -> float:
    """Of these tokens together."""
    return round(float(np.exp(losses.mean())), 3)


def by_segment(losses: np.ndarray, segment: int) -> list[float]:
    """Perplexity of each segment, the last as long as it is."""
    cuts = range(segment, len(losses), segment)
    return [perplexity(part) for part in np.split(losses, list(cuts))]


def _chunk_losses(runtime: Runtime, part: Sequence[int], following: Sequence[int]) -> np.ndarray:
    logits = runtime.append(part, out_ids=range(len(part)))
    targets = np.asarray(following, np.int32)
    return np.asarray(_losses(logits[: len(targets)], targets))  # sync: a figure a chunk


@jax.jit
def _losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihoods of the tokens that came next."""
    found = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - found
