"""What a beam search was asked for, in the words of Hugging Face's `generate`."""

import dataclasses
import math
from typing import Literal

from kvrt.options.sampling import Sampling

EarlyStopping = bool | Literal["never"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSpec:
    """A beam search.

    Attributes:
      num_beams: texts that go on at once.
      length_penalty: the score of a text of n sampled tokens is log-probability / n^penalty.
      early_stopping: when the search ends; see `BeamSearch`.
      n_predict: tokens of a hypothesis at most.
      stop_ids: tokens that end one.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    n_predict: int
    stop_ids: frozenset[int] = frozenset()

    @property
    def n_candidates(self) -> int:
        """Continuations of all beams together that are looked at: enough if all stops are there."""
        return max(2, 1 + len(self.stop_ids)) * self.num_beams

    def wrong(self, n: int, sampling: Sampling) -> str:
        """Why a request of n samples, sampled so, cannot have this search; empty if it can.

        One beam is no search, and has the default of all else.
        """
        if type(self.early_stopping) is not bool and self.early_stopping != "never":
            return f"early_stopping is {self.early_stopping!r}; true, false or 'never' is wanted"
        penalty = self.length_penalty
        if type(penalty) not in (int, float) or not math.isfinite(penalty):
            return f"length_penalty is {penalty!r}; a finite number is wanted"
        if self.num_beams == 1:
            given = (penalty, self.early_stopping) != (1.0, False)
            return "length_penalty and early_stopping are of beams; raise num_beams" * given
        if n > self.num_beams:
            return f"n is {n}, and {self.num_beams} beams give as many texts; lower n"
        if sampling.temp > 0:
            return (
                f"num_beams is {self.num_beams} and temp {sampling.temp}: a beam search takes the "
                "most probable continuations and samples none; set temp to 0, or num_beams to 1"
            )
        if sampling.repeat_penalty != 1:
            return (
                f"num_beams is {self.num_beams} and repeat_penalty {sampling.repeat_penalty}: "
                "beams are compared by probabilities, which a penalty changes; set it to 1"
            )
        return ""
