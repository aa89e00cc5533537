"""What a drafter is asked and gives, and how a generation is told to use one."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from kvrt.arrays import Int32
from kvrt.drafts.layer_skip import LayerSkip
from kvrt.errors import BadConfig
from kvrt.whole_numbers import take_whole_numbers

MAX_DRAFT = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftContext:
    """What a drafter continues.

    Attributes:
      tokens: ids that the sequence holds, by position, and its newest one, which is not evaluated
        yet. `[n]`
      seq_id: the sequence.
      n_sampled: tokens that its sampler has sampled, so that a drafter may use the random numbers
        that the next ones are sampled by.
      sampling: how its tokens are sampled, a `kvrt.Sampling`, where requests differ in it; None is
        what the drafter was made with.
    """

    tokens: Int32[np.ndarray, " n"]
    seq_id: int
    n_sampled: int
    sampling: object | None = None


@runtime_checkable
class Drafter(Protocol):
    """Says what may come next: prompt lookup, a smaller model, exit or prediction heads.

    It is asked once a round and may keep what it likes in between; that a round was refused it sees
    by the tokens of the next. Drafts never change the text, only how fast it comes.
    """

    def check(self, n_vocab: int) -> None:
        """Refuses a model that it cannot draft for, with a vocabulary of n_vocab tokens; raises."""
        ...

    def draft(self, context: DraftContext, n: int) -> Sequence[int]:
        """Returns at most n tokens that may follow, the next one first; none costs no round."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """Decoding with drafts, several tokens a step where they are right.

    Attributes:
      drafter: says what may come next; `LayerSkip` lets the model's own first layers say it.
      n_draft: drafts a round at most; a step of n_draft + 1 tokens is compiled for them.
    """

    drafter: Drafter | LayerSkip
    n_draft: int = 8

    @property
    def exit_layer(self) -> int | None:
        """How many of the model's first layers draft; None where drafts come from elsewhere."""
        return self.drafter.exit_layer if isinstance(self.drafter, LayerSkip) else None

    @property
    def traits(self) -> dict[str, str]:
        """Names that the rules of `kvrt.options.compose` refer to, and their words."""
        return {"drafts": ""}

    def __post_init__(self) -> None:
        """Refuses rounds of no drafts, or of so many that most would be refused."""
        take_whole_numbers(self)
        if not 1 <= self.n_draft <= MAX_DRAFT:
            raise BadConfig(f"n_draft is {self.n_draft}; it must lie in [1, {MAX_DRAFT}]")
