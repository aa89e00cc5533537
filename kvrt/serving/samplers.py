"""How next tokens are sampled: one sampler a step, of the parameters of its requests."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvrt.errors import BadRequest
from kvrt.options.sampling import Sampling
from kvrt.program.sample import Sampler
from kvrt.serving.request import Request, SeqState

_NAMES = ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "seed")


class Samplers:
    """Makes the sampler of each step, of up to n_seq_max sequences.

    Attributes:
      looks_back: whether the last one looks at recent tokens.
    """

    def __init__(self, n_seq_max: int, n_recent: int):
        """Nothing was sampled yet.

        Args:
          n_seq_max: outputs of a step.
          n_recent: recent tokens that a repeat penalty may look at.
        """
        self._n_seq_max, self._n_recent = n_seq_max, n_recent
        self.looks_back = False
        # Of the last step: mostly the same samples go on.
        self._last: tuple[list[SeqState], Sampler, np.ndarray, np.ndarray] | None = None

    def check(self, request: Request) -> None:
        """Refuses a penalty that looks further back than this engine does.

        Raises:
          BadRequest: repeat_last_n is too large.
        """
        s = request.sampling
        if s.repeat_penalty != 1 and s.repeat_last_n > self._n_recent:
            raise BadRequest(
                f"{request.name}: repeat_last_n is {s.repeat_last_n}, this engine looks back "
                f"{self._n_recent} tokens; lower it or raise n_recent, of EngineConfig or "
                "kvrt batch"
            )

    def sampler(self, states: Sequence[SeqState]) -> Sampler:
        """What chooses the next token of each of some samples, output by output."""
        if self._last is None or self._last[0] != states:
            self._last = (list(states), *self._columns(states))
        _, sampler, last_n, n_prompt = self._last
        n_sampled = np.zeros(self._n_seq_max, np.uint32)
        n_sampled[: len(states)] = [len(s.tokens) for s in states]
        n_sampled[: len(states)] -= n_prompt
        self.looks_back = bool(last_n.any())
        recent = self._recent(states, last_n) if self.looks_back else sampler.recent
        return dataclasses.replace(sampler, n_sampled=n_sampled, recent=recent)

    def _columns(self, states: Sequence[SeqState]) -> tuple[Sampler, np.ndarray, np.ndarray]:
        """A new sampler, by output the recent tokens looked at, by sample its prompt's tokens."""
        parameters = [_parameters(s) for s in states]
        parameters += [_GREEDY] * (self._n_seq_max - len(parameters))
        *columns, last_n = (np.array(x) for x in zip(*parameters, strict=True))
        dtypes = (np.float32, np.int32, np.float32, np.float32, np.float32, np.uint32)
        named = {n: x.astype(t) for n, x, t in zip(_NAMES, columns, dtypes, strict=True)}
        recent = np.full((self._n_seq_max, self._n_recent), -1, np.int32)
        n_sampled = np.zeros(self._n_seq_max, np.uint32)
        n_prompt = np.array([s.n_prompt for s in states], np.uint32)
        return Sampler(**named, n_sampled=n_sampled, recent=recent), last_n, n_prompt

    def _recent(self, states: Sequence[SeqState], last_n: np.ndarray) -> np.ndarray:
        recent = np.full((self._n_seq_max, self._n_recent), -1, np.int32)
        for row, state, n in zip(recent, states, last_n.tolist(), strict=False):
            if n:
                tail = state.tokens[-n:]
                row[-len(tail) :] = tail
        return recent


def last_n_of(state: SeqState) -> int:
    """Tokens that count as recent for a sample's repeat penalty; 0 without one."""
    return _parameters(state)[-1]


def _parameters(state: SeqState) -> tuple:
    if state.sampler is None:
        sampling = state.sampling
        last_n = sampling.repeat_last_n if sampling.repeat_penalty != 1 else 0
        state.sampler = (*(getattr(sampling, n) for n in _NAMES), last_n)
    return state.sampler


_DEFAULT = dataclasses.asdict(Sampling())
_GREEDY = (*(_DEFAULT[n] for n in _NAMES), 0)
