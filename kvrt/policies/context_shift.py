"""Context shift: when the cache is full, drop the older half and move the rest down.

Source: llama.cpp `examples/main` (n_keep, n_discard = n_left / 2).
"""

import dataclasses

from kvrt.errors import BadConfig
from kvrt.options.option import option
from kvrt.policies.policy import Drop
from kvrt.whole_numbers import take_whole_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextShift:
    """Keeps the first n_keep positions and drops n_discard of those that follow.

    Attributes:
      n_keep: positions never dropped (instructions, attention sinks).
      n_discard: positions dropped at once; None is half of what is not kept. With rope="write" and
        keys other than f32 at least a quarter of it is dropped, see `AttentionSinks`.
    """

    n_keep: int = option(
        0,
        "tokens of the prompt that a shift never drops, BOS not counted; -1 keeps all; if not "
        "given, a session's",
        "N",
        group="Context",
        flag="keep",
        low=-1,
        made=True,
        line=True,
        decides=("policy",),
    )
    n_discard: int | None = option(
        None,
        "tokens that a context shift drops at once; 0 is half of what --keep leaves",
        "N",
        group="Context",
        none_at=0,
        advanced=True,
        line=True,
        decides=("policy", "n_discard"),
    )

    def __post_init__(self) -> None:
        """Refuses negative counts."""
        take_whole_numbers(self)
        if self.n_keep < 0 or (self.n_discard is not None and self.n_discard < 1):
            raise BadConfig(
                f"context shift with n_keep {self.n_keep} and n_discard {self.n_discard}; "
                "n_keep must be at least 0 and n_discard at least 1"
            )

    def n_fit(self, n_free: int, n_past: int) -> int:
        """Tokens until the last free cell but one, which llama.cpp keeps free."""
        return n_free - 1 if n_past else n_free

    def drop(self, n_past: int, n_new: int = 1) -> Drop | None:
        """The older part of what is not kept, however many tokens come."""
        n_left = n_past - self.n_keep
        n = n_left // 2 if self.n_discard is None else min(self.n_discard, n_left)
        return Drop(p0=self.n_keep, p1=self.n_keep + n) if n > 0 else None
