"""How the tokens of each row are drawn: settings by row on the host, a sampler for every step."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvrt.errors import BadRequest
from kvrt.program import sample
from kvrt.serving.request import Request, State

_NAMES = ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "seed")


class Draws:
    """Settings of up to n_rows sequences at once."""

    def __init__(self, n_rows: int, n_recent: int):
        """Nobody draws yet.

        Args:
          n_rows: outputs of a step.
          n_recent: recent tokens that a repeat penalty may look at.
        """
        self._n_rows, self._n_recent = n_rows, n_recent
        self._known: dict[State, tuple] = {}
        # Of the last step: mostly the same ones draw again.
        self._last: tuple[list[State], sample.Sampler, np.ndarray, np.ndarray] | None = None

    def check(self, request: Request) -> None:
        """Refuses a penalty that looks further back than this engine does.

        Raises:
          BadRequest: repeat_last_n is too large.
        """
        s = request.sampling
        if s.repeat_penalty != 1 and s.repeat_last_n > self._n_recent:
            raise BadRequest(
                f"{request.name}: repeat_last_n is {s.repeat_last_n}, this engine looks back "
                f"{self._n_recent} tokens; lower it or raise the engine's n_recent"
            )

    def forget(self, state: State) -> None:
        """A state ended."""
        self._known.pop(state, None)

    def sampler(self, states: Sequence[State]) -> sample.Sampler:
        """What draws the next token of each of some states, output by output."""
        if self._last is None or self._last[0] != states:
            self._last = (list(states), *self._columns(states))
        _, sampler, last_n, n_prompt = self._last
        n_drawn = np.zeros(self._n_rows, np.int32)
        n_drawn[: len(states)] = [len(s.tokens) for s in states]
        n_drawn[: len(states)] -= n_prompt
        recent = self._recent(states, last_n) if last_n.any() else sampler.recent
        return dataclasses.replace(sampler, n_drawn=n_drawn, recent=recent)

    def _columns(self, states: Sequence[State]) -> tuple[sample.Sampler, np.ndarray, np.ndarray]:
        """A new sampler, by row the recent tokens looked at, by state the tokens of its prompt."""
        rows = [self._of(s) for s in states]
        rows += [_GREEDY] * (self._n_rows - len(rows))
        *columns, last_n = (np.array(x) for x in zip(*rows, strict=True))
        dtypes = (np.float32, np.int32, np.float32, np.float32, np.float32, np.uint32)
        named = {n: x.astype(t) for n, x, t in zip(_NAMES, columns, dtypes, strict=True)}
        recent = np.full((self._n_rows, self._n_recent), -1, np.int32)
        n_drawn = np.zeros(self._n_rows, np.int32)
        n_prompt = np.array([s.n_prompt for s in states], np.int32)
        return sample.Sampler(**named, n_drawn=n_drawn, recent=recent), last_n, n_prompt

    def _of(self, state: State) -> tuple:
        known = self._known.get(state)
        if known is None:
            sampling = state.sampling
            last_n = sampling.repeat_last_n if sampling.repeat_penalty != 1 else 0
            known = (*(getattr(sampling, n) for n in _NAMES), last_n)
            self._known[state] = known
        return known

    def _recent(self, states: Sequence[State], last_n: np.ndarray) -> np.ndarray:
        recent = np.full((self._n_rows, self._n_recent), -1, np.int32)
        for row, state, n in zip(recent, states, last_n.tolist(), strict=False):
            if n:
                tail = state.tokens[-n:]
                row[-len(tail) :] = tail
        return recent


_DEFAULT = dataclasses.asdict(sample.Sampling())
_GREEDY = (*(_DEFAULT[n] for n in _NAMES), 0)
