"""What a scheduler decided for one step."""

import dataclasses

from kvrt.policies import Due
from kvrt.serving.request import SeqState


@dataclasses.dataclass(slots=True)
class StepPlan:
    """What one step computes.

    Attributes:
      n_left: tokens of the budget that nobody uses.
      decode: samples of which the step computes the last token.
      prompts: samples, and [start, start + n) of their tokens.
      admitted: samples that were admitted; their n_computed is the prefix hit.
      preempted: samples that were preempted, in order.
      offloaded: those of them whose tokens went to a tier.
      forks: a sample whose prompt ends in this step, and another one of the request that shares the
        prompt after it: both sample from the same logits.
      refused: samples that ended because there is no room for them; each has an error.
      edited: samples whose schedule changed positions, how long they were, and what was due.
      drafts: of some samples of `decode`, tokens that may follow, which the step verifies beside
        its other tokens.
    """

    n_left: int
    decode: list[SeqState] = dataclasses.field(default_factory=list)
    prompts: list[tuple[SeqState, int, int]] = dataclasses.field(default_factory=list)
    admitted: list[SeqState] = dataclasses.field(default_factory=list)
    preempted: list[SeqState] = dataclasses.field(default_factory=list)
    offloaded: list[SeqState] = dataclasses.field(default_factory=list)
    forks: list[tuple[SeqState, SeqState]] = dataclasses.field(default_factory=list)
    refused: list[SeqState] = dataclasses.field(default_factory=list)
    edited: list[tuple[SeqState, int, Due]] = dataclasses.field(default_factory=list)
    drafts: dict[SeqState, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """Tokens that the step computes beside drafts."""
        return len(self.decode) + sum(n for _, _, n in self.prompts)

    @property
    def ending(self) -> list[SeqState]:
        """Samples whose last token the step computes, so that there are logits to sample from."""
        return [*self.decode, *(s for s, start, n in self.prompts if start + n == len(s.tokens))]

    def compute(self, state: SeqState, n: int) -> None:
        """Adds the next n tokens of a sample."""
        if len(state.tokens) - state.n_computed == 1:
            self.decode.append(state)
        else:
            self.prompts.append((state, state.n_computed, n))
        self.n_left -= n

    def drop(self, state: SeqState) -> None:
        """Takes a sample out again."""
        if state in self.decode:
            self.decode.remove(state)
            self.n_left += 1
        self.n_left += sum(n for s, _, n in self.prompts if s is state)
        self.prompts = [p for p in self.prompts if p[0] is not state]
