"""Beam search itself: which continuations of which beams go on, and when it ends.

Host only, and plain: it knows log-probabilities and token ids, and no cache.

Source: Hugging Face transformers 4.57, `GenerationMixin._beam_search`, with do_sample=False.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from kvrt.serving.beams.spec import BeamSpec


class Hypothesis(NamedTuple):
    """A text that ended.

    Attributes:
      score: its log-probability, the stop token's included, / n^length_penalty of its n tokens.
      tokens: sampled ones, the stop token included.
      stopped: whether a stop token ended it, and not the length.
    """

    score: float
    tokens: tuple[int, ...]
    stopped: bool


class Candidate(NamedTuple):
    """A continuation of a beam; greater is better, of equal ones the lesser beam, then token."""

    log_prob: float
    beam: int
    token: int


class BeamSearch:
    """One search, step by step.

    A step looks at the n_candidates best continuations of all beams by the log-probability of the
    whole text. Those that end (by a stop token, or n_predict) are hypotheses if they are among the
    best num_beams, and of all hypotheses the best num_beams by score stay. Of those that do not end
    the best num_beams go on. The first step continues the prompt alone.

    The search ends at n_predict, or as soon as there are num_beams hypotheses and, by
    early_stopping: True: at once; False: the best beam's score, were it to end as it is, is not
    above the worst hypothesis; "never": nor would it be if no further token cost anything, which
    with a length_penalty above 0 is its score at n_predict.

    Attributes:
      spec: what was asked.
      is_done: whether it has ended.
      hypotheses: the best so far, best first.
    """

    def __init__(self, spec: BeamSpec) -> None:
        """One beam: the prompt."""
        self.spec, self.is_done = spec, False
        self.hypotheses: list[Hypothesis] = []
        self._log_probs: list[float] = [0.0]
        self._texts: list[tuple[int, ...]] = [()]

    @property
    def n_beams(self) -> int:
        """Beams that wait for their continuations."""
        return len(self._texts)

    def advance(
        self, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]
    ) -> list[tuple[int, int]]:
        """Takes one step.

        Args:
          ids: by beam its most probable next tokens: n_candidates, or all that there are.
          log_probs: likewise.

        Returns:
          By new beam, best first, which one it continues and with what token; none at the end.
        """
        spec, n = self.spec, len(self._texts[0]) + 1
        best = self._best(ids, log_probs)
        is_last = n >= spec.n_predict
        ends = [is_last or c.token in spec.stop_ids for c in best]
        for c, ended in list(zip(best, ends, strict=True))[: spec.num_beams]:
            if ended:
                self._add(c, n)
        going = [c for c, ended in zip(best, ends, strict=True) if not ended][: spec.num_beams]
        self.is_done = not going or self._has_ended(going[0].log_prob, n)
        if self.is_done:
            return []
        self._texts = [(*self._texts[c.beam], c.token) for c in going]
        self._log_probs = [c.log_prob for c in going]
        return [(c.beam, c.token) for c in going]

    def _best(
        self, ids: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]
    ) -> list[Candidate]:
        """The best continuations of all beams, best first."""
        every = (
            Candidate(so_far + log_prob, beam, token)
            for beam, so_far in enumerate(self._log_probs)
            for token, log_prob in zip(ids[beam], log_probs[beam], strict=True)
        )
        return heapq.nsmallest(
            self.spec.n_candidates, every, key=lambda c: (-c.log_prob, c.beam, c.token)
        )

    def _add(self, c: Candidate, n: int) -> None:
        """Takes a hypothesis in, if it is among the best; of equal ones the older is."""
        tokens = (*self._texts[c.beam], c.token)
        score = c.log_prob / n**self.spec.length_penalty
        new = Hypothesis(score, tokens, c.token in self.spec.stop_ids)
        self.hypotheses = sorted([*self.hypotheses, new], key=lambda h: -h.score)
        del self.hypotheses[self.spec.num_beams :]

    def _has_ended(self, best: float, n: int) -> bool:
        """Whether no beam is to go on; the best one's log-probability is that of n tokens."""
        spec = self.spec
        if len(self.hypotheses) < spec.num_beams:
            return False
        if spec.early_stopping is True:
            return True
        far = spec.early_stopping == "never" and spec.length_penalty > 0
        score = best / (spec.n_predict if far else n) ** spec.length_penalty
        return score <= self.hypotheses[-1].score
