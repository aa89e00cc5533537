"""The cache of an engine in blocks: a block manager decides, tables and cells follow."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from kvrt.cells.edits import SeqEdit
from kvrt.cells.slots import Places
from kvrt.config import GroupSpec
from kvrt.errors import CacheFull, CannotRewind
from kvrt.paged.hashing import Chain
from kvrt.paged.hits import Hit
from kvrt.paged.layout.sizing import greatest
from kvrt.paged.layout.spec import NULL, PagedGroup, PagedPlan
from kvrt.paged.manager import BlockManager, BlockRules
from kvrt.paged.pool import BlockPool, BlockRemoved, BlockStored
from kvrt.paged.residency import Residency
from kvrt.policies import Drop, PolicyContext
from kvrt.program.device import Device
from kvrt.serving.cache.base import SessionFiller
from kvrt.serving.cache.checkpoints.chunk_ends import chunk_ends
from kvrt.serving.cache.checkpoints.in_blocks import PoolCheckpoints, interval
from kvrt.serving.cache.paged_arrays import PagedArrays
from kvrt.serving.cache.paged_sessions import BlockSessions
from kvrt.serving.config import EngineConfig
from kvrt.serving.metrics import CheckpointUse, PoolUse
from kvrt.serving.offload import PoolStores, Tiers
from kvrt.serving.request import SeqState
from kvrt.serving.sessions.prefix import SessionPrefix, TakenPrefix
from kvrt.serving.step_batch import StepBatch
from kvrt.store.recurrent import StateIndex


class PagedSpace:
    """Sequence numbers, and blocks for their tokens; see `kvrt.serving.cache.base.Space`.

    Attributes:
      n_seq_max: sequences at once.
      n_max: tokens that it holds of one sequence when no other one is there.
      pools: blocks on the device.
      manager: who holds which.
      residency: how long blocks stay.
      tiers: where blocks go beyond the device, if anywhere.
      sessions: fills the cache from sessions before a request is admitted, if anything does.
      in_blocks: True.
      n_pinned: None, for a block of a window goes with its window.
    """

    in_blocks = True
    n_pinned = None

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        plan: PagedPlan,
        group_of: Sequence[int],
        device: Device,
        options: EngineConfig,
    ):
        """Empty.

        Args:
          specs: the model's groups of attention layers.
          plan: groups and pools.
          group_of: by group of the device's layout, the plan's group whose tables it has.
          device: runs copies.
          options: of the engine, its rules given.
        """
        assert options.rules is not None, "an engine has rules"
        config = device.spec.config
        n_batch, hash_size = options.rules.n_batch, options.hash_block_size
        n_ctx_seq = min(options.rules.n_ctx_seq or config.n_ctx, config.n_ctx)
        self.n_seq_max, self._plan = config.n_seq_max, plan
        self.pools = [
            BlockPool(p.n_blocks, caching=options.prefix_cache, events=True) for p in plan.pools
        ]
        # Cells of dropped tokens stay in the first block that is kept and the first that moves.
        n_room = n_ctx_seq + 2 * max((g.block_size for g in plan.groups), default=0)
        rules = BlockRules(
            caching=options.prefix_cache,
            hash_block_size=hash_size,
            partial=hash_size is not None,
            n_in_flight=n_batch,
            n_ctx=n_room,
            checkpoint_interval=interval(plan.groups, config),
        )
        self._checkpoints = PoolCheckpoints(plan) if config.n_checkpoints else None
        self.manager = BlockManager(plan.groups, self.pools, rules)
        self.n_max = greatest(self._fits_alone, n_ctx_seq)
        self._arrays = PagedArrays(plan, group_of, self.manager, device, self.n_seq_max, n_room)
        self._free = list(range(self.n_seq_max))[::-1]
        self._chunk_ends = chunk_ends(plan.groups, rules)
        self.residency = Residency()
        self.sessions: SessionFiller | None = None
        stores = [self._arrays.store_of.get(pool) for pool in range(len(self.pools))]
        on_device = PoolStores(plan=plan, stores=stores, pools=self.pools)
        self.tiers = _tiers(on_device, self.manager, device, options)
        self._sessions = BlockSessions(specs, on_device, self.manager, device)

    @property
    def groups(self) -> tuple[PagedGroup, ...]:
        """Groups with a table each, in the manager's order."""
        return self._plan.groups

    @property
    def hit_size(self) -> int:
        """See `Space`: whole blocks of all groups."""
        return math.lcm(*(g.block_size for g in self.groups))

    @property
    def usage(self) -> float:
        """See `Space`."""
        return max((p.usage for p in self.pools), default=0.0)

    def pool_use(self) -> list[PoolUse]:
        """See `Space`."""
        return [
            PoolUse(
                n_units=p.n_blocks - 1,
                n_free=p.n_free,
                n_cached=p.n_cached,
                n_evicted=p.n_evicted,
            )
            for p in self.pools
        ]

    @property
    def checkpoint_use(self) -> CheckpointUse | None:
        """See `Space`."""
        return self._checkpoints and self._checkpoints.use

    def take_prefix(self, tokens: Sequence[int], salt: bytes) -> TakenPrefix | None:
        """See `Space`; what a tier has is loaded first, where that is worth it."""
        # Nothing is planned now, so what is to be copied before the next step can be.
        self._arrays.copy(self.manager.take_copies())
        self.manager.new_step()
        chain = Chain(self.manager.block_size, salt=salt)
        # One more than is wanted, for a hit is never all of a prompt.
        chain.extend([*tokens, 0])
        while self.tiers and self.tiers.promote(chain, self.manager.find_hit(chain)) is None:
            self.tiers.wait()
            self.begin_step()
        return self._sessions.take(chain)

    def put_prefixes(self, prefixes: Sequence[SessionPrefix]) -> list[int]:
        """See `Space`."""
        ends, new = self._sessions.put(prefixes)
        if self.tiers and new:
            self.tiers.store(new)
        return ends

    def fits(self, context: PolicyContext) -> bool:
        """See `Space`."""
        return self._fits_alone(context.n_most + self._n_gap(context))

    # --- what the scheduler asks ---------------------------------------------------------------

    def find_hit(self, state: SeqState) -> int | None:
        """See `Space`."""
        chain = self._chain(state)
        hit = self.manager.find_hit(chain, read=state.request.cache)
        if not self.manager.is_ready(hit):
            return None
        if self.tiers and state.request.cache:
            more = self.tiers.promote(chain, hit)
            if more is None:
                return None
            if more:
                hit = self.manager.find_hit(chain)
        asks = state.request.cache and state.n_session is None
        if self.sessions is not None and asks and self._has_room(state):
            # A hit is never the whole prompt.
            tokens = chain.tokens[: len(state.tokens) - 1].tolist()
            self.sessions.fill(state, tokens, hit.n_tokens)
            hit = self.manager.find_hit(chain)
        state.hit, state.n_shared = hit, hit.n_common
        return hit.n_tokens

    def admit(self, state: SeqState, n_tokens: int, whole: int | None) -> int | None:
        """See `Space`."""
        if not self._free:
            return None
        assert state.chain is not None and isinstance(state.hit, Hit), "find_hit comes first"
        seq_id, hit, state.hit = self._free[-1], state.hit, None
        if state.context is not None:
            n_tokens, whole = n_tokens + self._n_gap(state.context), None
        chain: Chain | None = state.chain
        if state.extend is not None:
            # It has copies of what it hits, and nobody finds it, since it will move.
            chain, hit = None, dataclasses.replace(hit, copied=True)
        new = self.manager.allocate(seq_id, n_tokens, chain=chain, hit=hit, whole=whole)
        if new is None and state.extend is not None and hit.n_tokens:
            # Copies take room beside what they are of, until they have run.
            hit = self.manager.find_hit(state.chain, read=False)
            new = self.manager.allocate(seq_id, n_tokens, hit=hit, whole=whole)
        if new is None:
            return None
        self._start(state, self._free.pop())
        self.manager.keep_hits(seq_id, self._borders(state))
        self._arrays.update(seq_id, new)
        self._arrays.adopt(seq_id, hit.n_tokens)
        self._note_use(state.chain, hit)
        return hit.n_tokens

    def grow(self, state: SeqState, n_tokens: int) -> bool:
        """See `Space`."""
        seq_id = _seq_id(state)
        new = self.manager.allocate(seq_id, n_tokens, n_settled=state.n_computed)
        if new is None:
            return False
        self._arrays.update(seq_id, new)
        state.capacity = self.manager.n_capacity(seq_id)
        return True

    def grow_by_one(self, states: Sequence[SeqState]) -> bool:
        """See `Space`."""
        return all(self.grow(state, state.n_computed + 1) for state in states)

    def chunk(self, state: SeqState, start: int, n: int) -> int:
        """See `Space`."""
        if self._chunk_ends is None:
            return n
        kept = (*self._borders(state), *([] if state.n_shared is None else [state.n_shared]))
        sizes = {"n_prompt": state.n_prompt, "n_tokens": len(state.tokens)}
        return self._chunk_ends.fit(start, n, **sizes, kept=kept)

    def advance(self, state: SeqState, drops: Sequence[Drop]) -> None:
        """See `Space`; what it moves nobody shares, for nobody finds it."""
        seq_id, n_past = _seq_id(state), state.n_past
        assert state.n_until is not None, "it has a context"
        for drop in drops:
            self._arrays.drop(seq_id, drop, n_past)
            n_past -= drop.n
        state.capacity = state.n_until

    def extend(self, state: SeqState, edits: Sequence[SeqEdit]) -> None:
        """See `Space`."""
        self._arrays.extend(_seq_id(state), edits, state.n_computed)

    def fork(self, src: SeqState, dst: SeqState, n_tokens: int) -> bool:
        """See `Space`."""
        # What a policy moves is not shared: each sample computes the prompt beyond what it keeps.
        if not self._free or src.seq_id is None or src.moves:
            return False
        seq_id, chain = self._free[-1], self._chain(src).copy()
        try:
            copies = self.manager.fork(src.seq_id, seq_id, n_tokens, chain=chain)
        except (CacheFull, CannotRewind):
            return False
        dst.chain = chain
        self._start(dst, self._free.pop())
        self._arrays.fork(seq_id, n_tokens, copies)
        return True

    def release(self, state: SeqState, *, damaged: bool = False) -> None:
        """See `Space`."""
        seq_id = _seq_id(state)
        for g, group in enumerate(self.groups) if damaged else ():
            held = self.manager.table(seq_id, g)
            self.pools[group.pool].forget([block for block in held if block != NULL])
        self._arrays.clear(seq_id)
        self.manager.free(seq_id)
        self._free.append(seq_id)
        state.seq_id, state.capacity = None, 0

    def offload(self, state: SeqState) -> bool:
        """See `Space`: full blocks went to a tier as soon as they could be found."""
        if self.tiers is None:
            return False
        self.release(state)
        return True

    # --- what the engine asks ------------------------------------------------------------------

    def begin_step(self) -> None:
        """See `Space`."""
        self.manager.new_step()
        for pool in self.pools:
            for event in pool.take_events():
                if self._checkpoints:
                    self._checkpoints.count(event)
                if isinstance(event, BlockStored):
                    self.residency.born((event.group, x) for x in event.hashes)
                elif isinstance(event, BlockRemoved):
                    self.residency.gone([(event.group, event.hash)])
        if self.tiers:
            self.tiers.begin()

    def place(self, step: StepBatch) -> tuple[tuple[Places, ...], StateIndex | None]:
        """See `Space`."""
        self._arrays.copy(self.manager.take_copies())
        return self._arrays.place(step)

    def commit(self, step: StepBatch) -> None:
        """See `Space`."""
        self._arrays.commit(step)
        fine, n = self.manager.block_size, len(step.decode)
        full = np.flatnonzero(step.pos[:n] % fine == fine - 1).tolist()
        ended = [(step.decode[i], int(step.starts[i]) + 1) for i in full]
        for state, end in (*ended, *((c.state, c.end) for c in step.prompts)):
            self._learn(state, end)

    # --- below ---------------------------------------------------------------------------------

    def _borders(self, state: SeqState) -> tuple[int, ...]:
        """Where checkpoints of a prompt are worth keeping beside the regular ones."""
        return state.request.borders if self._checkpoints else ()

    def _learn(self, state: SeqState, end: int) -> None:
        """The first `end` tokens of a sample are there, and full blocks of them may be found."""
        n_found = len(self._chain(state).tokens)
        moved = state.context is not None and not 0 < n_found <= end
        if moved or state.extend is not None:
            return
        found = self.manager.register(_seq_id(state), min(end, n_found))
        if self.tiers and found:
            self.tiers.store(found)

    def _n_gap(self, context: PolicyContext) -> int:
        """Cells of dropped tokens that a sequence may have between others, at most."""
        sizes = [g.block_size for g in self.groups]
        return max((-context.policy.n_keep % b + b - 1 for b in sizes), default=0)

    def _has_room(self, state: SeqState) -> bool:
        """Whether a sample's tokens would fit now, none of them shared."""
        peaks = self.manager.n_peak(len(state.tokens))
        return all(n <= pool.n_free for n, pool in zip(peaks, self.pools, strict=True))

    def _fits_alone(self, n_tokens: int) -> bool:
        peaks = self.manager.n_peak(n_tokens)
        return all(n < pool.n_blocks for n, pool in zip(peaks, self.pools, strict=True))

    def _chain(self, state: SeqState) -> Chain:
        """The hashes of a sample's tokens so far, or of what it never drops or moves of them."""
        if state.chain is None:
            state.chain = Chain(self.manager.block_size, salt=state.request.salt)
        state.chain.extend(state.tokens[len(state.chain.tokens) : state.n_unmoved])
        return state.chain

    def _start(self, state: SeqState, seq_id: int) -> None:
        state.start(seq_id, self.manager.n_capacity(seq_id))

    def _note_use(self, chain: Chain, hit: Hit) -> None:
        for g, blocks in enumerate(hit.blocks):
            entries = chain.entries(self.groups[g].block_size // chain.block_size)
            # A block that a hit ends within is one of its own for what was found before it.
            whole = zip(entries, blocks, strict=False)
            self.residency.used((g, entry.digest) for entry, block in whole if block != NULL)


def _tiers(
    on_device: PoolStores, manager: BlockManager, device: Device, options: EngineConfig
) -> Tiers | None:
    if options.tiers is None:
        return None
    fingerprint = _fingerprint(device) if options.tiers.disk else b""
    return Tiers(options.tiers, on_device, manager, device, fingerprint)


def _seq_id(state: SeqState) -> int:
    assert state.seq_id is not None, "a sample that runs has a sequence number"
    return state.seq_id


def _fingerprint(device: Device) -> bytes:
    """What blocks on a disk must share with another run to be used by it."""
    config = device.spec.config
    said = (config.type_k, config.type_v, config.hadamard)
    said += (config.rope, config.block_size, config.n_ctx)
    if config.self_extend is not None:  # what a token sees decides what later layers keep of it
        said += (config.self_extend,)
    return f"{device.programs.weights_digest} {said} {device.layout.groups}".encode()
