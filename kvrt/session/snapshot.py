"""What a runtime holds, taken out of it: used cells, what they mean, and what comes next.

It shares no memory with the runtime, so it can be written while decoding goes on, or put into
another runtime. Keys, values, states and logits may still be on the device.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from kvrt.arrays import AnyArray, Bool, Float, Int32, Shaped
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.saved import KeptStates, SavedCells, one_owner
from kvrt.cellcache.window import Intervals
from kvrt.session import kv_arrays
from kvrt.session.fingerprint import Fingerprint
from kvrt.store.quantized import AnyKVArray, Quantized, each
from kvrt.whole_numbers import Count, Long, Real, Whole

BLOCK_CELLS = 256  # of a block: what is written, checked and kept together


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVBlock:
    """Up to 256 cells in every layer of a group as the store has them: [L, n, H, D].

    Keys have RoPE applied with rope="write" and are unrotated with rope="read".
    """

    k: AnyKVArray
    v: AnyKVArray

    @property
    def n(self) -> int:
        """Its cells."""
        return (self.k.data if isinstance(self.k, Quantized) else self.k).shape[1]

    def some(self, at: slice) -> "KVBlock":
        """Some of its cells; itself where they are all."""
        is_whole = at.indices(self.n) == (0, self.n, 1)
        return self if is_whole else map_kv(lambda x: x[:, at], self)


def map_kv(function: Callable[..., AnyArray], *blocks: KVBlock) -> KVBlock:
    """A function of each array of a block, or of those that several blocks have for the same."""
    k, v = (each(function, *(getattr(x, side) for x in blocks)) for side in "kv")
    return KVBlock(k=k, v=v)


def block_from(found: kv_arrays.Tensors, fingerprint: Fingerprint, group: int) -> KVBlock:
    """The tensors `k` and `v` of a group as a block; raises BadSession as `kv_arrays.kinds`."""
    kinds = zip("kv", kv_arrays.kinds(fingerprint, group), strict=True)
    k, v = (kv_arrays.kv_from_tensors(found, side, kind.type) for side, kind in kinds)
    return KVBlock(k=k, v=v)


def joined_block(blocks: Sequence[KVBlock]) -> KVBlock:
    """Blocks as one: a single one as it is, several one behind the other on the host."""
    if len(blocks) == 1:
        return blocks[0]
    return map_kv(lambda *x: np.concatenate(list(map(np.asarray, x)), axis=1), *blocks)


class BlockCells:
    """The cells of blocks that follow each other, by their numbers."""

    def __init__(self, blocks: Sequence[KVBlock]):
        """Copies nothing yet."""
        self._blocks, self._starts = blocks, np.cumsum([0, *(x.n for x in blocks)])

    def take(self, which: np.ndarray) -> KVBlock:
        """Some cells, at least one, on the host but for a block that is taken whole."""
        of = np.searchsorted(self._starts, which, side="right") - 1
        used, place = np.unique(of, return_inverse=True)
        blocks = [self._blocks[i] for i in used.tolist()]
        at = which - self._starts[of] + np.cumsum([0, *(x.n for x in blocks)])[place]
        found = joined_block(blocks)
        if np.array_equal(at, np.arange(found.n)):
            return found
        return map_kv(lambda x: np.asarray(x)[:, at], found)

    def in_blocks(self, which: np.ndarray) -> list[KVBlock]:
        """Some cells, 256 in each block but the last."""
        starts = range(0, len(which), BLOCK_CELLS)
        return [self.take(which[start : start + BLOCK_CELLS]) for start in starts]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupPart(SavedCells):
    """The used cells of one group, ascending, with their keys and values in blocks.

    Blocks have 256 cells but for the last one; those of a checkpoint's tail have any number.
    """

    blocks: Sequence[KVBlock]


def with_kv(cells: SavedCells, blocks: Sequence[KVBlock]) -> GroupPart:
    """Cells with their keys and values."""
    fields = (f.name for f in dataclasses.fields(SavedCells))
    return GroupPart(**{name: getattr(cells, name) for name in fields}, blocks=blocks)


def some_of_part(part: GroupPart, left: Bool[np.ndarray, " n"]) -> GroupPart:
    """A part with some of its cells."""
    return dataclasses.replace(
        part,
        index=part.index[left],
        pos=part.pos[left],
        seqs=part.seqs[left],
        blocks=BlockCells(part.blocks).in_blocks(np.flatnonzero(left)),
    )


def packed_part(
    pos: Int32[np.ndarray, " n"],
    lost: Mapping[int, Intervals],
    blocks: Sequence[KVBlock],
    head: int = 0,
) -> GroupPart:
    """Cells of sequence 0, in a cache that has no others."""
    n = len(pos)
    return GroupPart(
        n_cells=n,
        head=head,
        index=np.arange(n, dtype=np.int32),
        pos=pos,
        seqs=one_owner(n, 0),
        lost=lost,
        blocks=blocks,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatePart:
    """States of recurrent layers.

    Attributes:
      held: (pos, state index) of each sequence, counted in `tables`.
      tables: arrays of each layer's state, one entry a state. `[r, ...]`
    """

    held: Mapping[int, KeptStates]
    tables: tuple[tuple[Shaped[AnyArray, "r ..."], ...], ...]

    def one(self, index: int) -> tuple[tuple[AnyArray, ...], ...]:
        """One of the states, on the host."""
        return tuple(tuple(np.asarray(x[index]) for x in layer) for layer in self.tables)


def only_state(state: Sequence[Sequence[AnyArray]], pos: int, seq_id: int = 0) -> StatePart:
    """The state of a sequence after the token at a position, and no other one."""
    tables = tuple(tuple(np.asarray(x)[None] for x in layer) for layer in state)
    return StatePart(held={seq_id: ((pos, 0),)}, tables=tables)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointPart:
    """A context checkpoint.

    Attributes:
      pos: the position of the next token.
      seq_ids: sequences that it is one of.
      tails: by group of attention layers, the cells that the next token sees as those of sequence
        0; None where the group keeps every position.
      state: arrays of each recurrent layer's state; None without such layers.
    """

    pos: int
    seq_ids: tuple[int, ...]
    tails: tuple[GroupPart | None, ...]
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
    ga_i: Mapping[int, int] = dataclasses.field(default_factory=dict)
    logits: Mapping[int, tuple[int, Float[AnyArray, " V"]]] = dataclasses.field(
        default_factory=dict
    )
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
