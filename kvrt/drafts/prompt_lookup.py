"""Drafts from the text itself: what followed its last tokens where they stood before."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvrt.arrays import Int32
from kvrt.drafts.drafter import DraftContext
from kvrt.errors import BadConfig
from kvrt.whole_numbers import take_whole_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """Drafts what followed the newest n-gram at its last occurrence in prompt and output.

    Attributes:
      n_max: tokens of the n-gram that is looked up first.
      n_min: the shortest one that is looked up where no longer one occurs; short ones match by
        chance, and a round that is refused costs as much as several tokens.

    Source: github.com/apoorvumang/prompt-lookup-decoding; arXiv:2304.04487 (LLMA).
    """

    n_max: int = 4
    n_min: int = 3

    def __post_init__(self) -> None:
        """Refuses n-grams of no token, and bounds that cross."""
        take_whole_numbers(self)
        if not 1 <= self.n_min <= self.n_max:
            raise BadConfig(
                f"n_min is {self.n_min} and n_max {self.n_max}; 1 <= n_min <= n_max is wanted"
            )

    def check(self, n_vocab: int) -> None:
        """Drafts for every model: its tokens are the model's own."""

    def draft(self, context: DraftContext, n: int) -> Sequence[int]:
        """See `Drafter`."""
        for size in range(self.n_max, self.n_min - 1, -1):
            found = followed_by(context.tokens, size, n)
            if len(found):
                return found.tolist()
        return ()


def followed_by(tokens: Int32[np.ndarray, " T"], size: int, n: int) -> Int32[np.ndarray, " m"]:
    """Up to n tokens that followed the last `size` tokens where they stood before.

    Of several places the last counts that n tokens follow, else the first: in a text that repeats
    a short piece the newest place has hardly anything behind it.
    """
    ends = len(tokens) - size
    if ends < 1:
        return tokens[:0]
    same = np.ones(ends, bool)
    for i in range(size):
        same &= tokens[i : i + ends] == tokens[ends + i]
    starts = np.flatnonzero(same) + size
    if not len(starts):
        return tokens[:0]
    whole = starts[starts + n <= len(tokens)]
    start = int(whole[-1]) if len(whole) else int(starts[0])
    return tokens[start : start + n]
