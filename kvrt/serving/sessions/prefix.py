"""A prefix of a session on its way into the cache of an engine."""

from collections.abc import Sequence

import numpy as np

from kvrt.arrays import Int32
from kvrt.cellcache import history
from kvrt.cellcache.saved import of_sequence
from kvrt.session.snapshot import BlockCells, GroupPart, KVBlock, Snapshot, map_kv
from kvrt.store.recurrent import OneState


class SessionPrefix:
    """The first tokens of a sequence of a session that stand where a new request has them.

    Those behind a hole, or moved by a policy, are left out: no request with the same tokens would
    compute the same keys and values. Windows that a checkpoint keeps count as well.

    Attributes:
      tokens: token i is at position i.
      salt: of the requests that may find it.
      groups: what each group of attention layers has of them.
      state_ends: numbers of tokens after which the session has the state of recurrent layers.
      checkpoints: positions of its context checkpoints of them.
    """

    def __init__(
        self, snapshot: Snapshot, seq_id: int, *, salt: bytes = b"", n_most: int | None = None
    ):
        """Copies no keys and values yet; `n_most` is how many tokens are wanted, None is all."""
        n = history.n_as_alone(snapshot.history, seq_id)
        n = n if n_most is None else min(n, n_most)
        self.tokens: list[int] = history.tokens(snapshot.history, seq_id)[:n].tolist()
        self.salt = salt
        kept = [c for c in snapshot.checkpoints if seq_id in c.seq_ids and c.pos <= n]
        self.checkpoints = tuple(c.pos for c in kept)
        self.groups = [
            PrefixCells(part, [t for c in kept if (t := c.tails[i]) is not None], seq_id, n)
            for i, part in enumerate(snapshot.groups)
        ]
        self._part, self._held = snapshot.states, dict[int, int]()
        if snapshot.states is not None:
            held = snapshot.states.held.get(seq_id, ())
            self._held = {pos + 1: index for pos, index in held if pos < n}
        self._kept = {c.pos: c.state for c in kept if c.state is not None}
        self.state_ends = self._held.keys() | self._kept.keys()

    def state(self, end: int) -> OneState:
        """The state after so many tokens, one of `state_ends`."""
        if end in self._held:
            assert self._part is not None, "it has a state there"
            return self._part.one(self._held[end])
        return tuple(tuple(map(np.asarray, layer)) for layer in self._kept[end])


class PrefixCells:
    """What a session has of a prefix in one group of attention layers."""

    def __init__(self, part: GroupPart, tails: Sequence[GroupPart], seq_id: int, n_tokens: int):
        """Of a sequence's first tokens, in its cells and in the tails of its checkpoints."""
        self._cells = BlockCells([x for of in (part, *tails) for x in of.blocks])
        self._index = index = np.full(n_tokens, -1, np.int64)
        first = len(part.pos)
        for tail in tails:
            index[tail.pos] = first + np.arange(len(tail.pos))
            first += len(tail.pos)
        mine = np.flatnonzero(of_sequence(part.seqs, seq_id) & (part.pos < n_tokens))
        index[part.pos[mine]] = mine
        self._n_lacking = np.concatenate([[0], np.cumsum(index < 0)])

    def n_lacking(self, start: int, end: int) -> int:
        """Positions in [start, end) that there is no cell for."""
        return int(self._n_lacking[end] - self._n_lacking[start])

    def kv(self, pos: Int32[np.ndarray, " n"]) -> KVBlock:
        """Keys and values of positions in every layer of the group, on the host."""
        return map_kv(np.asarray, self._cells.take(self._index[pos]))
