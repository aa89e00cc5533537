"""A prefix on its way between a session and the cache of an engine."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from kvrt.arrays import Int32
from kvrt.cellcache import history
from kvrt.cellcache.history import TokenHistory
from kvrt.session import kv_arrays
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.snapshot import (
    BLOCK_CELLS,
    CheckpointPart,
    GroupPart,
    KVBlock,
    Snapshot,
    StatePart,
    TailPart,
)
from kvrt.store.quantized import AnyKVArray, each
from kvrt.store.recurrent import OneState


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakenPrefix:
    """What a cache has of some tokens.

    Attributes:
      n_tokens: of them, from the first on.
      groups: cells of sequence 0 by group of attention layers, in the model's order.
      states: the state after the last of them; None without recurrent layers.
      checkpoints: of sequence 0, before the last of them or there.
    """

    n_tokens: int
    groups: tuple[GroupPart, ...]
    states: StatePart | None
    checkpoints: tuple[CheckpointPart, ...] = ()


def part_of(pos: Int32[np.ndarray, " n"], end: int, blocks: Sequence[KVBlock]) -> GroupPart:
    """Cells of sequence 0 at ascending positions; the others of [0, end) are lost."""
    n, ends = len(pos), np.concatenate([[-1], pos, [end]]).tolist()
    gaps = tuple((a + 1, b) for a, b in itertools.pairwise(ends) if b > a + 1)
    return GroupPart(
        n_cells=n,
        head=n,
        index=np.arange(n, dtype=np.int32),
        pos=pos,
        seqs=np.ones((n, 1), np.uint32),
        lost={0: gaps} if gaps else {},
        blocks=blocks,
    )


def tail_of(part: GroupPart) -> TailPart:
    """Cells of sequence 0 as the window of a checkpoint."""
    k, v = ([getattr(x, side) for x in part.blocks] for side in "kv")
    cells = {x: getattr(part, x) for x in ("n_cells", "head", "index", "pos", "seqs", "lost")}
    return TailPart(**cells, k=kv_arrays.join_blocks(k), v=kv_arrays.join_blocks(v))


def state_part_of(state: OneState, end: int) -> StatePart:
    """The state of sequence 0 after its first `end` tokens."""
    tables = tuple(tuple(x[None] for x in layer) for layer in state)
    return StatePart(held={0: ((end - 1, 0),)}, tables=tables)


def snapshot_of(fingerprint: Fingerprint, tokens: Sequence[int], taken: TakenPrefix) -> Snapshot:
    """A session of a prefix, as sequence 0."""
    n = taken.n_tokens
    pos = np.arange(n, dtype=np.int32)
    entries = np.stack([pos, np.array(tokens[:n], np.int32), pos])
    return Snapshot(
        fingerprint=fingerprint,
        groups=taken.groups,
        states=taken.states,
        history=TokenHistory(pieces={0: (entries,)}, n_marks=n, unshared=frozenset({0})),
        ga_i={},
        logits={},
        checkpoints=taken.checkpoints,
    )


class SessionPrefix:
    """The first tokens of a sequence of a session that stand where a new request has them.

    Those behind a hole, or moved by a policy, are left out: no request with the same tokens would
    compute the same keys and values. Windows that a checkpoint keeps count as well.

    Attributes:
      tokens: token i is at position i.
      salt: of the requests that may find it.
      groups: what each group of attention layers has of them.
      state_ends: numbers of tokens after which the session has the state of recurrent layers.
      checkpoints: its context checkpoints of them, as those of sequence 0.
    """

    def __init__(
        self, snapshot: Snapshot, seq_id: int, *, salt: bytes = b"", n_most: int | None = None
    ):
        """Copies no keys and values yet; `n_most` is how many tokens are wanted, None is all."""
        n = history.n_as_alone(snapshot.history, seq_id)
        n = n if n_most is None else min(n, n_most)
        self.tokens: list[int] = history.tokens(snapshot.history, seq_id)[:n].tolist()
        self.salt, self._fingerprint = salt, snapshot.fingerprint
        kept = [c for c in snapshot.checkpoints if seq_id in c.seq_ids and c.pos <= n]
        self.checkpoints = tuple(dataclasses.replace(c, seq_ids=(0,)) for c in kept)
        self.groups = [
            PrefixCells(part, [t for c in kept if (t := c.tails[i]) is not None], seq_id, n)
            for i, part in enumerate(snapshot.groups)
        ]
        held = snapshot.states.held.get(seq_id, ()) if snapshot.states else ()
        self._tables = snapshot.states.tables if snapshot.states else ()
        self._states = {pos + 1: index for pos, index in held if pos < n}
        self._kept = {c.pos: c.state for c in kept if c.state is not None}
        self.state_ends = self._states.keys() | self._kept.keys()

    def state(self, end: int) -> OneState:
        """The state after so many tokens, one of `state_ends`."""
        if end in self._states:
            at = self._states[end]
            return tuple(tuple(np.asarray(x[at]) for x in layer) for layer in self._tables)
        return tuple(tuple(map(np.asarray, layer)) for layer in self._kept[end])

    def snapshot(self, end: int, wanted: Sequence[Int32[np.ndarray, " _"]]) -> Snapshot:
        """Tokens [0, end) as sequence 0, of each group the wanted positions that there are."""
        states = None
        if self._tables or self._kept:
            states = state_part_of(self.state(end), end)
        groups = (x.part(pos, end) for x, pos in zip(self.groups, wanted, strict=True))
        kept = tuple(c for c in self.checkpoints if c.pos <= end)
        taken = TakenPrefix(n_tokens=end, groups=tuple(groups), states=states, checkpoints=kept)
        return snapshot_of(self._fingerprint, self.tokens, taken)


class PrefixCells:
    """What a session has of a prefix in one group of attention layers."""

    def __init__(self, part: GroupPart, tails: Sequence[TailPart], seq_id: int, n_tokens: int):
        """Of a sequence's first tokens, in its cells and in the tails of its checkpoints."""
        self._sources = (*part.blocks, *tails)
        self._index = index = np.full(n_tokens, -1, np.int64)
        first = len(part.pos)
        for tail in tails:
            index[tail.pos] = first + np.arange(len(tail.pos))
            first += len(tail.pos)
        word, bit = divmod(seq_id, 32)
        if word < part.seqs.shape[1]:
            mine = np.flatnonzero(part.seqs[:, word] >> np.uint32(bit) & np.uint32(1))
            mine = mine[part.pos[mine] < n_tokens]
            index[part.pos[mine]] = mine
        self._n_lacking = np.concatenate([[0], np.cumsum(index < 0)])

    def n_lacking(self, start: int, end: int) -> int:
        """Positions in [start, end) that there is no cell for."""
        return int(self._n_lacking[end] - self._n_lacking[start])

    def kv(self, layer: int, pos: Int32[np.ndarray, " n"]) -> tuple[AnyKVArray, AnyKVArray]:
        """Keys and values of positions in the i-th layer of the group, [n, H, D] on the host."""
        where = self._index[pos]
        k, v = (each(lambda x: x[layer, where], x) for x in self._joined)
        return k, v

    def part(self, pos: Int32[np.ndarray, " n"], end: int) -> GroupPart:
        """Some positions of [0, end), those that there are, as cells of sequence 0."""
        pos = pos[self._index[pos] >= 0]
        if not len(pos):
            return part_of(pos, end, [])
        where = self._index[pos]
        pieces = [where[i : i + BLOCK_CELLS] for i in range(0, len(where), BLOCK_CELLS)]
        k, v = self._joined
        blocks = [KVBlock(k=kv_arrays.some(k, i), v=kv_arrays.some(v, i)) for i in pieces]
        return part_of(pos, end, blocks)

    @functools.cached_property
    def _joined(self) -> tuple[AnyKVArray, AnyKVArray]:
        """All that may be asked for, one behind the other, as `_index` counts them."""
        k, v = ([getattr(x, side) for x in self._sources] for side in "kv")
        return kv_arrays.join_blocks(k), kv_arrays.join_blocks(v)
