"""Attention sinks: the first tokens and a window of the newest, re-numbered without a gap.

Source: arXiv:2309.17453, sec. 3.2.
"""

import dataclasses
import functools
from typing import Annotated

from msgspec import Meta

from kvrt.errors import BadConfig
from kvrt.options.option import option
from kvrt.policies.policy import Drop
from kvrt.whole_numbers import take_whole_numbers

_policy = functools.partial(option, group="Context", advanced=True, line=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSinks:
    """Keeps n_sink + n_window tokens of a sequence, whatever the cache could hold.

    Positions are those inside the cache: a model never sees one that is greater.

    Attributes:
      n_window: newest tokens.
      n_sink: first tokens; 0 is a plain window, which drops the tokens that most attention goes to.
      n_drop: tokens dropped at once, at least. With rope="write" each drop costs a K-shift, which
        rounds the keys that it moves to their KV dtype again: unless keys are f32, at least a
        quarter of the window is dropped at once, so that between three quarters of it and all of
        it stay. With rope="read" nothing is rounded again.
    """

    n_window: int = _policy(
        dataclasses.MISSING,
        "newest tokens that attention_sinks keeps; 0 takes what the context leaves",
        "N",
        cli=0,
        made=True,
        line=Annotated[int, Meta(ge=2, le=2**31 - 1)],
        decides=("policy",),
    )
    n_sink: int = _policy(4, "first tokens that attention_sinks keeps", "N", decides=("policy",))
    n_drop: int = _policy(
        1,
        "tokens that attention_sinks drops at once, at least; a quarter of the window, unless keys "
        "are f32 or stored unrotated: each drop rounds the others again",
        "N",
        low=1,
        decides=("policy", "n_drop"),
    )

    def __post_init__(self) -> None:
        """Refuses an empty window, and drops that would not leave a token in it."""
        take_whole_numbers(self)
        if self.n_sink < 0 or self.n_window < 2 or not 1 <= self.n_drop < self.n_window:
            raise BadConfig(
                f"attention sinks with n_sink {self.n_sink}, n_window {self.n_window} and n_drop "
                f"{self.n_drop}; n_sink must be at least 0, n_window at least 2 and n_drop from 1 "
                "to below n_window"
            )

    @property
    def n_keep(self) -> int:
        """The sinks."""
        return self.n_sink

    def n_fit(self, n_free: int, n_past: int) -> int:
        """Tokens until the window is full."""
        return min(n_free, self.n_sink + self.n_window - n_past)

    def drop(self, n_past: int, n_new: int = 1) -> Drop | None:
        """The oldest tokens behind the sinks."""
        over = n_past + n_new - self.n_sink - self.n_window
        n = min(max(over, self.n_drop), n_past - self.n_sink)
        return Drop(p0=self.n_sink, p1=self.n_sink + n) if n > 0 else None
