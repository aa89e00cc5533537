"""Generation as an iterator: draw, feed back, shift the context when it is full, stop."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvrt.engine import sample
from kvrt.errors import BadConfig, BadToken

if TYPE_CHECKING:
    from kvrt.engine.stepper import Stepper


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """A drawn token; `best` are the most probable ids and their log-probabilities, if asked."""

    id: int
    best: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class After:
    """Where an earlier generation stopped.

    Attributes:
      token: the last one that it yielded, which is not in the cache.
      n_drawn: how many it had yielded, or earlier ones before it.
    """

    token: int
    n_drawn: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What to generate.

    Attributes:
      n_predict: tokens at most; None goes on until a stop or a full cache.
      seq_id: sequence to continue; its last token must just have been evaluated.
      sampling: how tokens are drawn.
      stop_ids: tokens that end it; the one drawn is still yielded.
      recent: tokens before the first draw, that of `after` included, for the repeat penalty.
      n_best: log-probabilities a token.
      stride: tokens a compiled run; the host sees them only at its end. The text is the same.
      after: where drawing was left: its newest token is fed first, and random numbers go on.
    """

    n_predict: int | None
    seq_id: int
    sampling: sample.Sampling
    stop_ids: tuple[int, ...]
    recent: tuple[int, ...]
    n_best: int
    stride: int
    after: After | None = None

    def __post_init__(self) -> None:
        """Refuses counts below their least value."""
        if (self.n_predict or 0) < 0 or self.n_best < 0 or self.stride < 1:
            raise BadConfig(
                f"n_predict {self.n_predict}, n_best {self.n_best}, stride {self.stride}; "
                "the first two must not be negative and stride at least 1"
            )


def tokens(stepper: "Stepper", request: Request) -> Iterator[Token]:
    """Yields tokens; those yielded are in the cache, but for the last.

    Raises:
      BadToken: the sequence has no logits to draw from.
      CacheFull: no cell is free and there is no context shift.
      BadLogits: logits hold NaN, +inf or no finite value. What was yielded before is right, and
        all of it is in the cache, its last token with damaged keys and values.
    """
    n_vocab, after = stepper.n_vocab, request.after
    if request.n_best > n_vocab:
        raise BadConfig(f"n_best is {request.n_best}; the vocabulary has {n_vocab}")
    if any(not 0 <= t < n_vocab for t in request.stop_ids):
        raise BadToken(f"stop ids {request.stop_ids}; the vocabulary has {n_vocab}")
    if after and not 0 <= after.token < n_vocab:
        raise BadToken(f"token {after.token} to go on after; the vocabulary has {n_vocab}")
    n_drawn = after.n_drawn if after else 0
    sampler = sample.create(request.sampling, [list(request.recent)], n_drawn=n_drawn)
    logits = None if after else stepper.last_logits(request.seq_id)
    return _run(stepper, request, logits, sampler)


def _run(stepper: "Stepper", request: Request, logits, sampler) -> Iterator[Token]:
    left = request.n_predict
    if left == 0:
        return
    new: list[Token] = []
    newest = request.after.token if request.after else -1
    if logits is not None:
        ids, sampler, best_ids, best = stepper.programs.draw(logits, sampler, request.n_best)
        # sync: the caller sees each token, and a stop ends the loop.
        new = [Token(id=int(ids[0]), best=_pairs(best_ids[0], best[0]))]
    while True:
        for token in new:
            if token.id == sample.NO_TOKEN:
                raise stepper.bad_logits(request.seq_id)
            yield token
            newest = token.id
            left = None if left is None else left - 1
            if left == 0 or token.id in request.stop_ids:
                return
        n = request.stride if left is None else min(request.stride, left)
        new, sampler = stepper.run_loop(newest, request, n, sampler)


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
