"""What a runtime holds, taken out of it: rows of used cells, their meaning, and what comes next.

It shares no memory with the runtime, so it can be written while decoding goes on, or put into
another runtime. Rows, states and logits may still be on the device.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvrt.arrays import AnyArray, Float
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.saved import KeptStates, SavedCells
from kvrt.session.fingerprint import Fingerprint
from kvrt.store.quantized import AnyKVArray

ROWS = 256  # rows of a block: what is written, checked and kept together


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Rows of up to 256 cells in every layer of a group as the store has them: [L, n, H, D].

    Keys are rotated to their positions with rope="write" and not at all with rope="read".
    """

    k: AnyKVArray
    v: AnyKVArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupPart(SavedCells):
    """The used cells of one group, ascending, and their rows: 256 in each block but the last."""

    blocks: Sequence[RowBlock]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePart:
    """States of recurrent layers.

    Attributes:
      held: (pos, row) of the states of each sequence, rows counted in `tables`.
      tables: arrays of each layer's state, one row a state. `[r, ...]`
    """

    held: Mapping[int, KeptStates]
    tables: tuple[tuple[Float[AnyArray, "r ..."], ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """Where the drawing of a sequence's tokens was left.

    Attributes:
      token: the newest one, drawn but not evaluated; None if all were.
      n_drawn: draws so far, which is where the random numbers go on.
      sampling: how they were sampled, the fields of `kvrt.Sampling`.
    """

    token: int | None
    n_drawn: int
    sampling: Mapping[str, float | int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A runtime's content.

    Attributes:
      fingerprint: what a runtime must share to restore it.
      groups: by group of attention layers, in the model's order.
      states: of recurrent layers, None without any.
      text: tokens of every sequence.
      ga_i: how far SelfExtend in the cache has come, by sequence.
      logits: position and logits of the newest token, by sequence, where they are known.
      draws: by sequence, where tokens were sampled.
      policy: what made room, by its name and settings; for whoever asks, since a policy holds no
        state and decides no row's value.
    """

    fingerprint: Fingerprint
    groups: tuple[GroupPart, ...]
    states: StatePart | None
    text: TokenHistory
    ga_i: Mapping[int, int]
    logits: Mapping[int, tuple[int, Float[AnyArray, " V"]]]
    draws: Mapping[int, Draw] = dataclasses.field(default_factory=dict)
    policy: Mapping[str, Any] | None = None

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Sequences that hold something, ascending."""
        return tuple(sorted(self.text.pieces))
