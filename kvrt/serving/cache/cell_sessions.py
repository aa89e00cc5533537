"""Prefixes out of the cells of an engine for a session, and out of a session into cells."""

from collections.abc import Sequence

import numpy as np

from kvrt.cache import capture, checkpoint
from kvrt.cache.cell_cache import CellCache
from kvrt.cellcache import window
from kvrt.cellcache.checkpoint.checkpoints import Checkpoints
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.group import must_stay
from kvrt.cells import owned
from kvrt.errors import SessionMismatch
from kvrt.serving.cache.prefixes import CellPrefixes
from kvrt.serving.request import CellHit
from kvrt.serving.sessions.prefix import (
    SessionPrefix,
    TakenPrefix,
    part_of_tail,
    state_part_of,
)
from kvrt.session.snapshot import CheckpointPart, GroupPart, StatePart


class CellSessions:
    """Takes prefixes out of cells, and puts them into empty ones, where requests find them."""

    def __init__(self, cache: CellCache, prefixes: CellPrefixes):
        """Of an engine's cells."""
        self._cache, self._host, self._prefixes = cache, cache.host, prefixes

    def take(self, tokens: Sequence[int], salt: bytes) -> TakenPrefix | None:
        """Copies of what cells have of some tokens; None of nothing."""
        hit = self._prefixes.find(np.array(tokens, np.int32), salt)
        if hit is None:
            return None
        # What is pending is rotated before it is copied.
        self._cache.upload()
        self._cache.shift_keys()
        kept = [x for x in self._host.checkpoints.of(hit.seq_id) if x.pos <= hit.n_tokens]
        saved = checkpoint.parts(Checkpoints(kept={0: tuple(kept)}))
        # Where windows and states moved on, those of the checkpoint at its end are there.
        end = None if self._prefixes.checkpoint(hit) is None else saved[-1]
        return TakenPrefix(
            n_tokens=hit.n_tokens,
            groups=tuple(self._part(i, hit, end) for i in range(len(self._host.groups))),
            states=self._state_part(hit, end),
            checkpoints=saved,
        )

    def missing(self, prefixes: Sequence[SessionPrefix]) -> tuple[list[int], list[int]]:
        """Tokens of the longest hit that each prefix can give, and which cannot be had yet.

        Raises:
          SessionMismatch: one of them can give none.
        """
        ends = [self._longest(prefix) for prefix in prefixes]
        return ends, [i for i, p in enumerate(prefixes) if not self._is_found(p, ends[i])]

    def put(self, prefix: SessionPrefix, end: int) -> None:
        """Writes the first tokens of a prefix to empty cells, of which there are enough."""
        pos = np.arange(end, dtype=np.int32)
        groups = [x.group for x in self._host.groups]
        wanted = [pos[must_stay(g, pos, end)] if g.rolls else pos for g in groups]
        snapshot = prefix.snapshot(end, wanted)

        def write(before: CacheContents, number: int) -> CacheContents:
            return capture.put_sequences(self._cache, before, snapshot, {0: number})

        ids = np.array(prefix.tokens[:end], np.int32)
        self._prefixes.adopt(ids, prefix.salt, write)

    def _is_found(self, prefix: SessionPrefix, end: int) -> bool:
        hit = self._prefixes.find(np.array(prefix.tokens[:end], np.int32), prefix.salt)
        return hit is not None and hit.n_tokens >= end

    def _longest(self, prefix: SessionPrefix) -> int:
        """Tokens of the longest hit that a prefix can give."""
        ends = range(len(prefix.tokens), 0, -1)
        if self._host.states is not None:
            ends = sorted(prefix.state_ends, reverse=True)
        for end in ends:
            if not any(x.n_lacking(self._floor(i, end), end) for i, x in enumerate(prefix.groups)):
                return end
        n = len(prefix.tokens)
        raise SessionMismatch(
            f"{n} tokens of the session can begin a request, and at none of them it has what all "
            "layers see: windows moved on, or there is no state of recurrent layers; save it with "
            "checkpoints, with swa_full, or from an engine"
        )

    def _floor(self, group: int, end: int) -> int:
        """The first position of a group that the token after so many sees."""
        held = self._host.groups[group].group
        return window.horizon(held.mask, end) if held.rolls else 0

    def _part(self, i: int, hit: CellHit, end: CheckpointPart | None) -> GroupPart:
        tail = end and end.tails[i]
        if tail is not None:
            return part_of_tail(tail, hit.n_tokens)
        indexed = self._host.groups[i]
        cells, group = indexed.cells, indexed.group
        mine = owned(cells, hit.seq_id) & (cells.pos < hit.n_tokens)
        index = np.flatnonzero(mine).astype(np.int32)
        lost = window.within(group.lost.get(hit.seq_id, ()), 0, hit.n_tokens)
        return GroupPart(
            n_cells=indexed.extent.n_cells,
            head=group.head,
            index=index,
            pos=np.asarray(cells.pos)[index],
            seqs=np.ones((len(index), 1), np.uint32),
            lost={0: lost} if lost else {},
            blocks=capture.copied_blocks(self._cache, i, index),
        )

    def _state_part(self, hit: CellHit, end: CheckpointPart | None) -> StatePart | None:
        if self._host.states is None:
            return None
        if end is not None and end.state is not None:
            return state_part_of(end.state, hit.n_tokens)
        index = dict(self._host.states.kept[hit.seq_id])[hit.n_tokens - 1]
        return state_part_of(self._cache.device.take_state(index), hit.n_tokens)
