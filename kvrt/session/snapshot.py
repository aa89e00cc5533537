"""What a runtime holds, taken out of it: used cells, what they mean, and what comes next.

It shares no memory with the runtime, so it can be written while decoding goes on, or put into
another runtime. Keys, values, states and logits may still be on the device.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from kvrt.arrays import AnyArray, Float, Shaped
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.saved import KeptStates, SavedCells
from kvrt.session.fingerprint import Fingerprint
from kvrt.store.quantized import AnyKVArray
from kvrt.whole_numbers import Count, Long, Real, Whole

BLOCK_CELLS = 256  # of a block: what is written, checked and kept together


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVBlock:
    """Up to 256 cells in every layer of a group as the store has them: [L, n, H, D].

    Keys have RoPE applied with rope="write" and are unrotated with rope="read".
    """

    k: AnyKVArray
    v: AnyKVArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupPart(SavedCells):
    """The used cells of one group, ascending, with their keys and values in blocks."""

    blocks: Sequence[KVBlock]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePart:
    """States of recurrent layers.

    Attributes:
      held: (pos, state index) of each sequence, counted in `tables`.
      tables: arrays of each layer's state, one entry a state. `[r, ...]`
    """

    held: Mapping[int, KeptStates]
    tables: tuple[tuple[Shaped[AnyArray, "r ..."], ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailPart(SavedCells):
    """The cells of a group that a checkpoint keeps, as those of sequence 0: [L, n, H, D]."""

    k: AnyKVArray
    v: AnyKVArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointPart:
    """A context checkpoint.

    Attributes:
      pos: the position of the next token.
      seq_ids: sequences that it is one of.
      tails: by group of attention layers; None where the group keeps every position.
      state: arrays of each recurrent layer's state; None without such layers.
    """

    pos: int
    seq_ids: tuple[int, ...]
    tails: tuple[TailPart | None, ...]
    state: tuple[tuple[AnyArray, ...], ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingState:
    """Where the sampling of a sequence was left.

    Attributes:
      token: the newest one, sampled but not evaluated; None if all were.
      n_drawn: tokens sampled so far, which is where the random numbers resume.
      sampling: how they were sampled, the fields of `kvrt.Sampling`.
    """

    token: Count | None
    n_drawn: Whole
    sampling: Mapping[Annotated[str, Meta(max_length=1000)], Long | Real]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A runtime's content.

    Attributes:
      fingerprint: what a runtime must share to resume it.
      groups: by group of attention layers, in the model's order.
      states: of recurrent layers, None without any.
      history: tokens of every sequence.
      ga_i: how far SelfExtend in the cache has come, by sequence.
      logits: position and logits of the newest token, by sequence, where they are known.
      draws: by sequence, where sampling was left.
      policy: what made room, by its name and settings; for whoever asks, since a policy holds no
        state and decides no value.
      policies: by sequence the policy by position that made room, by its name and settings.
      select: sparse reads by which tokens that are not exact may have been computed, by name and
        settings; None where all were computed by reads of everything before them.
      checkpoints: context checkpoints of the sequences.
      in_blocks: sequences whose position is the place, see `Runtime.to_blocks`; ascending.
    """

    fingerprint: Fingerprint
    groups: tuple[GroupPart, ...]
    states: StatePart | None
    history: TokenHistory
    ga_i: Mapping[int, int]
    logits: Mapping[int, tuple[int, Float[AnyArray, " V"]]]
    draws: Mapping[int, SamplingState] = dataclasses.field(default_factory=dict)
    policy: Mapping[str, Any] | None = None
    policies: Mapping[int, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    select: Mapping[str, Any] | None = None
    checkpoints: tuple[CheckpointPart, ...] = ()
    in_blocks: tuple[int, ...] = ()

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Sequences that hold something, ascending."""
        return tuple(sorted(self.history.pieces))
