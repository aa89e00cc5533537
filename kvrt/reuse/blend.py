"""Which tokens of chunks that were computed alone are computed again behind other text.

Source: arXiv:2405.16444 (CacheBlend), sec. 4.3; its code compares values, LMCache's keys. The first
tokens of each chunk are a simple rule beside it, and a strong one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Int32  # not from arrays: choosing needs no JAX

from kvrt.errors import UsageError
from kvrt.whole_numbers import take_whole_numbers

Named = Literal["values", "keys", "first"]
# From distances as in `to_recompute`, tokens of each chunk, and how many of them: which tokens.
Chooser = Callable[[Float[np.ndarray, "2 n"], Sequence[int], int], Int32[np.ndarray, " m"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlendSpec:
    """How much of cached chunks is computed again.

    Attributes:
      ratio: of the chunks' tokens, from 0 to 1, that are computed in every layer.
      check_layer: the layer whose entries are compared; all tokens are computed up to it. Layer 0
        sees no other token, so that at least the second layer, 1, tells tokens apart.
      rule: tokens whose "values" or "keys" are furthest from the cached ones, the "first" ones of
        each chunk, or what a function of one's own says.
      auto_ratio: takes a greater ratio than `ratio` where loading the chunks took so long that more
        recompute takes no longer, see `hidden_ratio`; the tokens then depend on measured times.
    """

    ratio: float = 0.15
    check_layer: int = 1
    rule: Named | Chooser = "values"
    auto_ratio: bool = False

    def __post_init__(self) -> None:
        """Raises UsageError for what is out of range."""
        take_whole_numbers(self)
        if not 0 <= self.ratio <= 1:
            raise UsageError(f"ratio {self.ratio} is not in [0, 1]")
        if self.check_layer < 0:
            raise UsageError(f"check_layer {self.check_layer} is negative; the first layer is 0")
        if not callable(self.rule) and self.rule not in get_args(Named):
            raise UsageError(f"rule {self.rule!r} is none of {', '.join(get_args(Named))}")


def hidden_ratio(load_s: float, prefill_s: float) -> float:
    """The largest share of a prefill that takes no longer than loading the chunks, at most 1.

    Args:
      load_s: that the chunks took from where they were kept; 0 if they were in memory.
      prefill_s: that computing them in all layers takes.

    Source: arXiv:2405.16444 (CacheBlend), sec. 5.1, its loading controller.
    """
    return 1.0 if load_s >= prefill_s else load_s / prefill_s


def to_recompute(
    apart: Float[np.ndarray, "2 n"], sizes: Sequence[int], spec: BlendSpec
) -> Int32[np.ndarray, " m"]:
    """Tokens of chunks that are computed in every layer, ascending; of equals the earlier ones.

    Args:
      apart: squared distance of each token's keys, then of its values, from the cached ones.
      sizes: tokens of each chunk, n in all.
      spec: how many, and by what.
    """
    n = int(sum(sizes) * spec.ratio)
    if callable(spec.rule):
        return np.unique(spec.rule(apart, sizes, n)).astype(np.int32)
    if spec.rule == "first":
        rank = np.concatenate([np.arange(size, dtype=np.float64) / size for size in sizes])
    else:
        rank = -np.asarray(apart[("keys", "values").index(spec.rule)], np.float64)
    return np.sort(np.argsort(rank, kind="stable")[:n]).astype(np.int32)
