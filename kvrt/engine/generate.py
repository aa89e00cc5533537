"""Generation as an iterator: draw, feed back, shift the context when it is full, stop."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvrt.engine import sample
from kvrt.errors import BadConfig, BadToken

if TYPE_CHECKING:
    from kvrt.engine.runtime import Runtime


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """A drawn token; `best` are the most probable ids and their log-probabilities, if asked."""

    id: int
    best: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate.

    Attributes:
      n_predict: tokens at most; None goes on until a stop or a full cache.
      seq_id: sequence to continue; its last token must just have been evaluated.
      sampling: how tokens are drawn.
      stop_ids: tokens that end it; the one drawn is still yielded.
      recent: tokens before the first draw, for the repeat penalty.
      n_best: log-probabilities a token.
      stride: tokens a compiled run; the host sees them only at its end. The text is the same.
    """

    n_predict: int | None
    seq_id: int
    sampling: sample.Sampling
    stop_ids: tuple[int, ...]
    recent: tuple[int, ...]
    n_best: int
    stride: int

    def __post_init__(self) -> None:
        """Refuses counts below their least value."""
        if (self.n_predict or 0) < 0 or self.n_best < 0 or self.stride < 1:
            raise BadConfig(
                f"n_predict {self.n_predict}, n_best {self.n_best}, stride {self.stride}; "
                "the first two must not be negative and stride at least 1"
            )


def tokens(runtime: "Runtime", request: Request) -> Iterator[Token]:
    """Yields tokens; those yielded are in the cache, but for the last.

    Raises:
      BadToken: the sequence has no logits to draw from.
      CacheFull: no cell is free and there is no context shift.
    """
    logits = runtime.last_logits(request.seq_id)
    if request.n_best > logits.shape[1]:
        raise BadConfig(f"n_best is {request.n_best}; the vocabulary has {logits.shape[1]}")
    if any(not 0 <= t < logits.shape[1] for t in request.stop_ids):
        raise BadToken(f"stop ids {request.stop_ids}; the vocabulary has {logits.shape[1]}")
    sampler = sample.create(request.sampling, [list(request.recent)])
    return _run(runtime, request, logits, sampler)


def _run(runtime: "Runtime", request: Request, logits, sampler) -> Iterator[Token]:
    left = request.n_predict
    if left == 0:
        return
    ids, sampler, best_ids, best = runtime.programs.draw(logits, sampler, request.n_best)
    # sync: the caller sees each token, and a stop ends the loop.
    new = [Token(id=int(ids[0]), best=_pairs(best_ids[0], best[0]))]
    while True:
        for token in new:
            yield token
            left = None if left is None else left - 1
            if left == 0 or token.id in request.stop_ids:
                return
        n = request.stride if left is None else min(request.stride, left)
        new, sampler = runtime.run_loop(new[-1].id, request, n, sampler)


def _pairs(ids, values) -> tuple[tuple[int, float], ...]:
    return tuple(
        (int(i), float(x)) for i, x in zip(np.asarray(ids), np.asarray(values), strict=True)
    )


def read(drawn) -> list[Token]:
    """The tokens of a run, from the device."""
    n = int(drawn.n_steps)  # sync: how far the run came
    ids, best_ids, best = (np.asarray(x)[:n, 0] for x in (drawn.tokens, drawn.best_ids, drawn.best))
    return [
        Token(id=int(t), best=_pairs(i, b)) for t, i, b in zip(ids, best_ids, best, strict=True)
    ]
