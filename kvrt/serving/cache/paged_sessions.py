"""Prefixes out of the blocks of an engine for a session, and out of a session into blocks."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from kvrt.arrays import Int32
from kvrt.cache.kv_blocks import put_cells, take_cells
from kvrt.cellcache.history import TokenHistory
from kvrt.config import GroupSpec
from kvrt.errors import CacheFull, SessionMismatch
from kvrt.paged.hashing import Chain, PrefixHash
from kvrt.paged.hits import Hit
from kvrt.paged.kinds import kind_of
from kvrt.paged.layout.checkpoints import keeps_checkpoints
from kvrt.paged.layout.spec import NULL, PagedGroup
from kvrt.paged.manager import BlockManager
from kvrt.paged.requests.transaction import Registered
from kvrt.program.device import Device
from kvrt.serving.offload import PoolStores
from kvrt.serving.sessions.prefix import SessionPrefix
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.snapshot import (
    BLOCK_CELLS,
    CheckpointPart,
    GroupPart,
    KVBlock,
    Snapshot,
    StatePart,
    map_kv,
    only_state,
    packed_part,
)

_Key = tuple[int, PrefixHash]  # a group, and what its block is found by


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """Where the contents of a block are: the index-th of a prefix, or the state after `end`."""

    prefix: SessionPrefix
    index: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Filling:
    """Blocks that prefixes need.

    Attributes:
      sources: where their contents are.
      lacking: by pool, those that are to be filled.
      cached: by pool, blocks that are cached already.
    """

    sources: Mapping[_Key, _Source]
    lacking: Sequence[list[_Key]]
    cached: Sequence[list[int]]


class BlockSessions:
    """Takes prefixes out of blocks, and puts them into free ones, where requests find them."""

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        on_device: PoolStores,
        manager: BlockManager,
        device: Device,
        hit_size: int,
    ):
        """Of an engine's pools.

        Args:
          specs: the model's groups of attention layers, as sessions have them.
          on_device: pools and stores.
          manager: finds what is cached.
          device: has the bytes.
          hit_size: hits that sessions give are multiples of it, in tokens.
        """
        self._hit_size = hit_size
        self._specs, self._plan, self._pools = specs, on_device.plan, on_device.pools
        self._store_of, self._manager, self._device = on_device.stores, manager, device
        self._kinds = [kind_of(g, manager.align) for g in self._plan.groups]
        # By layer, its group in the model and its place there.
        self._layers = {x: (i, j) for i, g in enumerate(specs) for j, x in enumerate(g.layers)}

    # --- out of blocks -------------------------------------------------------------------------

    def take(self, chain: Chain, fingerprint: Fingerprint) -> Snapshot | None:
        """Copies of what blocks have of a chain's tokens but the last, as sequence 0; or None."""
        hit = self._manager.find_hit(chain)
        n = hit.n_tokens
        if not n:
            return None
        pos = np.arange(n, dtype=np.int32)
        entries = np.stack([pos, np.array(chain.tokens[:n], np.int32), pos])
        return Snapshot(
            fingerprint=fingerprint,
            groups=tuple(self._part(spec, hit) for spec in self._specs),
            states=self._state_part(hit),
            history=TokenHistory(pieces={0: (entries,)}, n_marks=n, unshared=frozenset({0})),
            checkpoints=self._checkpoints(chain, n),
        )

    def _checkpoints(self, chain: Chain, n_tokens: int) -> tuple[CheckpointPart, ...]:
        """Shorter hits that there would be as well, as many as a sequence has checkpoints.

        One at the end of a chunk is left out: its next token sees no cell, and a session says where
        a sequence ends by its newest one.
        """
        out: list[CheckpointPart] = []
        config, align = self._device.spec.config, self._manager.align
        interval = config.checkpoint_interval
        every = -(-(config.n_ubatch if interval is None else interval or align) // align) * align
        if not any(map(keeps_checkpoints, self._plan.groups)):
            return ()
        while n_tokens > 1 and len(out) < config.n_checkpoints:
            # A hit is never all of a chain.
            wanted = max((n_tokens - 1) // every * every, 0)
            hit = self._manager.find_hit(chain.beginning(wanted + 1))
            n_tokens = hit.n_tokens
            part = self._checkpoint(hit) if n_tokens else None
            if part and all(tail is None or len(tail.pos) for tail in part.tails):
                out.append(part)
        return tuple(out[::-1])

    def _checkpoint(self, hit: Hit) -> CheckpointPart:
        """What a hit needs of windows and states at its end."""
        state = self._state_part(hit)
        return CheckpointPart(
            pos=hit.n_tokens,
            seq_ids=(0,),
            tails=tuple(
                self._part(spec, hit) if self._slides(spec) else None for spec in self._specs
            ),
            state=state and state.one(0),
        )

    def _slides(self, spec: GroupSpec) -> bool:
        """Whether blocks of a group of the model are there for its window alone."""
        of = [g for g in self._plan.groups if set(g.layers) & {*spec.layers}]
        return any(map(keeps_checkpoints, of))

    def _part(self, spec: GroupSpec, hit: Hit) -> GroupPart:
        homes = [
            g for g, group in enumerate(self._plan.groups) if set(group.layers) & {*spec.layers}
        ]
        size = self._plan.groups[homes[0]].block_size
        # All of them see alike, so that they have blocks of the same positions.
        held = np.flatnonzero(np.array(hit.blocks[homes[0]], np.int32) != NULL)
        pos = (held[:, None] * size + np.arange(size)).reshape(-1).astype(np.int32)
        pos = pos[pos < hit.n_tokens]
        blocks = [
            self._block(spec, homes, hit, pos[start : start + BLOCK_CELLS])
            for start in range(0, len(pos), BLOCK_CELLS)
        ]
        ends = np.concatenate([[-1], pos, [hit.n_tokens]]).tolist()
        gaps = tuple((a + 1, b) for a, b in itertools.pairwise(ends) if b > a + 1)
        return packed_part(pos, {0: gaps} if gaps else {}, blocks, head=len(pos))

    def _block(self, spec: GroupSpec, homes: Sequence[int], hit: Hit, pos: np.ndarray) -> KVBlock:
        found: dict[int, KVBlock] = {}
        for g in homes:
            group = self._plan.groups[g]
            slots = _cells(np.array(hit.blocks[g], np.int32), group, pos)
            # sync: the copies leave the device, where layers of a group lie beside those of others
            taken = map_kv(np.asarray, take_cells(self._device, self._store(g), slots))
            found |= {layer: _layer(taken, i) for i, layer in enumerate(group.layers)}
        return _stacked([found[layer] for layer in spec.layers]).some(slice(len(pos)))

    def _state_part(self, hit: Hit) -> StatePart | None:
        for g, group in enumerate(self._plan.groups):
            if group.kind == "recurrent":
                state = self._device.take_state(hit.blocks[g][-1])
                return only_state(state, hit.n_tokens - 1)
        return None

    # --- into blocks ---------------------------------------------------------------------------

    def put(self, prefixes: Sequence[SessionPrefix]) -> tuple[list[int], list[Registered]]:
        """Fills free blocks with prefixes; blocks that are cached already stay as they are.

        Returns:
          Tokens of each prefix that can be found now, and the blocks that were filled.

        Raises:
          SessionMismatch: no hit can be had from one of them.
          CacheFull: there are too few free blocks.
        """
        ends, wanted = [], dict[_Key, _Source]()
        for prefix in prefixes:
            end, why = self._longest(prefix)
            if not end:
                raise SessionMismatch(why)
            ends.append(end)
            wanted |= self._sources(prefix, end)
        none = [[] for _ in self._pools]
        filling = self._extended(_Filling(sources={}, lacking=none, cached=none), wanted)
        if self._device.spec.config.n_checkpoints:
            for prefix, end in zip(prefixes, ends, strict=True):
                filling = self._with_checkpoints(prefix, end, filling)
        return ends, self._fill(filling)

    def _extended(self, filling: _Filling, sources: Mapping[_Key, _Source]) -> _Filling:
        """The blocks of a filling and further ones; raises CacheFull if too few are free."""
        new = {key: x for key, x in sources.items() if key not in filling.sources}
        lacking, cached = list(map(list, filling.lacking)), list(map(list, filling.cached))
        for g, entry in new:
            pool = self._plan.groups[g].pool
            block = self._pools[pool].find(g, entry)
            if block is None:
                lacking[pool].append((g, entry))
            else:
                cached[pool].append(block)
        for keys, blocks, pool in zip(lacking, cached, self._pools, strict=True):
            n_free = pool.n_free - pool.count(list(dict.fromkeys(blocks)), n_refs=0)
            if len(keys) > n_free:
                raise CacheFull(
                    f"the session needs {len(keys)} {'cells' if self._hit_size == 1 else 'blocks'}"
                    f", {n_free} of {pool.n_blocks - 1} are free; raise n_ctx, or trim the session"
                )
        return _Filling(sources={**filling.sources, **new}, lacking=lacking, cached=cached)

    def _with_checkpoints(self, prefix: SessionPrefix, end: int, filling: _Filling) -> _Filling:
        """Adds what shorter hits need, the longest first, as far as there is room for it."""
        size = self._hit_size
        for at in sorted(set(prefix.checkpoints), reverse=True):
            if at >= end or at % size or any(self._refusal(prefix, g, at) for g in self._groups):
                continue
            try:
                filling = self._extended(filling, self._sources(prefix, at))
            except CacheFull:
                break
        return filling

    def _longest(self, prefix: SessionPrefix) -> tuple[int, str]:
        """Tokens of the longest hit that a prefix can give, and why it is none."""
        size = self._hit_size
        n, why = len(prefix.tokens), ""
        for end in range(n // size * size, 0, -size):
            found = next(filter(None, (self._refusal(prefix, g, end) for g in self._groups)), "")
            if not found:
                return end, ""
            why = why or found
        return 0, why or (
            f"{n} tokens of the session can begin a request, which is less than a block of {size}; "
            "use smaller blocks, or a longer session"
        )

    def _refusal(self, prefix: SessionPrefix, g: int, end: int) -> str:
        """Why a hit of so many tokens cannot be had in a group; empty if it can."""
        group = self._plan.groups[g]
        if group.kind == "recurrent":
            if end in prefix.state_ends:
                return ""
            return (
                f"the session has no state of recurrent layers at token {end} or another multiple "
                f"of {self._hit_size}; save it with checkpoints there, or from an engine"
            )
        size, first = group.block_size, self._first(g, end) * group.block_size
        n_head = min(self._kinds[g].n_head() * size, first)
        parts = (prefix.groups[i] for i in {self._layers[x][0] for x in group.layers})
        lacking = [x.n_lacking(0, n_head) + x.n_lacking(first, end) for x in parts]
        if not any(lacking):
            return ""
        who = f"with a {group.kind} of {group.size}" if group.size else "that keep all here"
        said = f"0 to {group.n_sink - 1} and " if group.n_sink and first else ""
        return (
            f"{max(lacking)} of the positions {said}{first} to {end - 1} are not in the session, "
            f"of layers {who}, and a prefix hit at token {end} needs them in whole blocks; save "
            "the session from an engine, or with swa_full"
        )

    def _sources(self, prefix: SessionPrefix, end: int) -> dict[_Key, _Source]:
        """Blocks that a hit of so many tokens needs, and where their contents are."""
        chain = Chain(self._manager.block_size, salt=prefix.salt)
        chain.extend(prefix.tokens[:end])
        out: dict[_Key, _Source] = {}
        for g in self._groups:
            size, fine = self._plan.groups[g].block_size, chain.block_size
            entries = chain.entries(size // fine)
            for i in self._needed(g, end):
                n = min((i + 1) * size, end)
                part = i * size // fine, n // fine - i * size // fine
                entry = entries[i] if i < len(entries) else chain.part(*part)
                out[g, entry] = _Source(prefix=prefix, index=i, end=n)
        return out

    def _fill(self, filling: _Filling) -> list[Registered]:
        """Writes what is lacking into free blocks, and lets it be found."""
        # What is cached must not go for the rest.
        for pool, blocks in zip(self._pools, filling.cached, strict=True):
            pool.touch(blocks)
        pools = zip(self._pools, filling.lacking, strict=True)
        out, taken = [], [pool.take(len(keys)) for pool, keys in pools]
        try:
            for keys, blocks in zip(filling.lacking, taken, strict=True):
                for g in dict.fromkeys(g for g, _ in keys):
                    mine = [(b, e) for b, (of, e) in zip(blocks, keys, strict=True) if of == g]
                    self._write(g, [(block, filling.sources[g, entry]) for block, entry in mine])
                    out += [Registered(g, block, entry) for block, entry in mine]
            for g, block, entry in out:
                self._pools[self._plan.groups[g].pool].register(block, g, entry)
        finally:
            for pool, blocks, new in zip(self._pools, filling.cached, taken, strict=True):
                pool.free((blocks + new)[::-1])
        return out

    def _write(self, g: int, blocks: Sequence[tuple[int, _Source]]) -> None:
        """Writes the contents of blocks of a group."""
        group = self._plan.groups[g]
        if group.kind == "recurrent":
            for block, of in blocks:
                self._device.put_state(block, of.prefix.state(of.end))
            return
        n = max(BLOCK_CELLS // group.block_size, 1)
        for prefix in dict.fromkeys(of.prefix for _, of in blocks):
            mine = [(block, of.index) for block, of in blocks if of.prefix is prefix]
            for start in range(0, len(mine), n):
                self._write_some(g, prefix, np.array(mine[start : start + n], np.int32))

    def _write_some(self, g: int, prefix: SessionPrefix, some: Int32[np.ndarray, "n 2"]) -> None:
        group, store, size = self._plan.groups[g], self._store(g), self._plan.groups[g].block_size
        inside = np.arange(size, dtype=np.int32)
        slots, pos = ((x[:, None] * np.int32(size) + inside).reshape(-1) for x in some.T)
        slots += np.int32(group.first_cell)
        places = [self._layers[x] for x in group.layers]
        taken = {i: prefix.groups[i].kv(pos) for i in {i for i, _ in places}}
        layers = [_layer(taken[i], j) for i, j in places]
        # Groups of fewer layers leave arrays of the pool unused.
        layers += layers[:1] * (self._plan.pools[group.pool].n_buffers - len(layers))
        put_cells(self._device, store, slots, _stacked(layers), max(BLOCK_CELLS, size))

    @property
    def _groups(self) -> list[int]:
        """Groups with blocks of their own."""
        return [g for g, kind in enumerate(self._kinds) if kind.has_blocks]

    def _first(self, g: int, end: int) -> int:
        """The first block of a group that a hit of so many tokens needs."""
        kind = self._kinds[g]
        return kind.n_skipped(end) // kind.block_size

    def _needed(self, g: int, end: int) -> list[int]:
        """The blocks of a group that a hit of so many tokens needs: sinks, and what is seen."""
        n, first = -(-end // self._plan.groups[g].block_size), self._first(g, end)
        return [*range(min(self._kinds[g].n_head(), first)), *range(first, n)]

    def _store(self, g: int) -> int:
        store = self._store_of[self._plan.groups[g].pool]
        assert store is not None, "states have no keys and values"
        return store


def _cells(blocks: np.ndarray, group: PagedGroup, pos: np.ndarray) -> np.ndarray:
    """The cells of positions in a table of blocks."""
    size = np.int32(group.block_size)
    return blocks[pos // size] * size + np.int32(group.first_cell) + pos % size


def _layer(kv: KVBlock, i: int) -> KVBlock:
    return map_kv(lambda x: x[i], kv)


def _stacked(layers: Sequence[KVBlock]) -> KVBlock:
    """Keys and values of several layers as one."""
    return map_kv(lambda *x: np.stack(x), *layers)
