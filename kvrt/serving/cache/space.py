"""The cache of an engine: a block manager decides, tables and cells follow.

In paged mode a block of the device's arrays is a block of the manager. In cell mode the manager's
blocks are single cells (states have blocks of `block_size` tokens as before, and hits may end
within them), and those that a sequence takes follow each other in blocks of the arrays.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from kvrt.arrays import Bool
from kvrt.cellcache.host_cells import Where
from kvrt.cells.edits import SeqEdit
from kvrt.config import GroupSpec
from kvrt.errors import CacheFull, CannotRewind
from kvrt.options.engine import EngineConfig
from kvrt.paged.hashing import Chain
from kvrt.paged.hits import Hit
from kvrt.paged.kinds import Moving
from kvrt.paged.layout.sizing import greatest
from kvrt.paged.layout.spec import NULL, PagedGroup, PagedPlan
from kvrt.paged.manager import BlockManager
from kvrt.paged.pool import BlockPool
from kvrt.paged.residency import Residency
from kvrt.paged.rules import BlockRules
from kvrt.policies import DropSchedule
from kvrt.program.device import Device
from kvrt.serving.cache.base import SessionFiller
from kvrt.serving.cache.checkpoints.chunk_ends import chunk_ends
from kvrt.serving.cache.checkpoints.in_blocks import PoolCheckpoints, interval
from kvrt.serving.cache.paged_arrays import PagedArrays
from kvrt.serving.cache.paged_sessions import BlockSessions
from kvrt.serving.metrics import CheckpointUse, PoolUse, use_of_blocks
from kvrt.serving.offload import PoolStores, open_tiers
from kvrt.serving.request import SeqState
from kvrt.serving.sessions.prefix import SessionPrefix
from kvrt.serving.sizing.requests import chain_of, reserved_of, wanted_of
from kvrt.serving.step_batch import StepBatch
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.snapshot import Snapshot

# In cell mode, tokens that a sequence gets cells for at once while there are plenty, and after how
# many tokens that it decodes they can be found.
_STRIDE = 16
# Strides of all sequences that are free where there are plenty.
_PLENTY = 4


class Space:
    """Sequence numbers, and blocks for their tokens: a `SchedulerSpace`, and a `StepSpace`.

    Attributes:
      n_seq_max: sequences at once.
      n_max: tokens that it holds of one sequence when no other one is there.
      pools: blocks on the device.
      manager: who holds which.
      residency: how long blocks stay.
      tiers: where blocks go beyond the device, if anywhere.
      sessions: fills the cache from sessions before a request is admitted, if anything does.
      state_size: tokens of a block that has a state; None where there are no such.
      keeps_others: whether a token that is thrown away leaves what others find as it was.
    """

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
        n_batch, hash_size = options.rules.n_batch, options.fine(config)
        n_ctx_seq = min(options.rules.n_ctx_seq or config.n_ctx, config.n_ctx)
        self.n_seq_max, self._plan, self._n_batch = config.n_seq_max, plan, n_batch
        self.pools = open_pools(plan, caching=options.prefix_cache)
        self._in_cells, self._caching = options.page(config) is not None, options.prefix_cache
        # Cells of dropped tokens stay in the first block that is kept and the first that moves.
        n_room = n_ctx_seq + 2 * max((g.block_size for g in plan.groups), default=0)
        self._interval = interval(plan.groups, config, in_cells=self._in_cells)
        rules = BlockRules(
            caching=options.prefix_cache,
            hash_block_size=hash_size,
            partial=hash_size is not None,
            n_in_flight=n_batch,
            n_in_advance=_STRIDE - 1 if self._in_cells else 0,
            n_ctx=n_room,
            # States of single tokens are too many to keep.
            marked_states=self._in_cells and (self._interval is not None or config.n_rs_seq > 0),
            checkpoint_interval=None if self._in_cells else self._interval,
        )
        self._checkpoints = PoolCheckpoints(plan) if config.n_checkpoints else None
        self.manager = BlockManager(plan.groups, self.pools, rules)
        self.n_max = greatest(lambda n: self.manager.fits(self.manager.n_peak(n)), n_ctx_seq)
        self._arrays = PagedArrays(plan, group_of, self.manager, device, self.n_seq_max, n_room)
        # Free numbers, and how many are for samples that will be forked from some that run.
        self._free, self._n_ahead = list(range(self.n_seq_max))[::-1], 0
        self._chunk_ends = chunk_ends(plan.groups, rules, self._interval, in_cells=self._in_cells)
        self._running: dict[int, SeqState] = {}
        # The step that was placed last, until its tokens are appended.
        self._placed: StepBatch | None = None
        self.residency = Residency()
        self.sessions: SessionFiller | None = None
        sizes = [g.block_size for g in plan.groups if g.kind == "recurrent"]
        self.state_size, self.keeps_others = (sizes or [None])[0], not sizes
        stores = [self._arrays.store_of.get(pool) for pool in range(len(self.pools))]
        on_device = PoolStores(plan=plan, stores=stores, pools=self.pools)
        self.tiers = open_tiers(options.tiers, on_device, self.manager, device, options.identity)
        self._sessions = BlockSessions(specs, on_device, self.manager, device, self.hit_size)

    @property
    def groups(self) -> tuple[PagedGroup, ...]:
        """Groups with a table each, in the manager's order."""
        return self._plan.groups

    @property
    def hit_size(self) -> int:
        """Tokens that a hit from a session is a multiple of: whole blocks, in cell mode any."""
        return 1 if self._in_cells else math.lcm(*(g.block_size for g in self.groups))

    @property
    def usage(self) -> float:
        """Blocks in use of the fullest pool, as a part of all."""
        return max((p.usage for p in self.pools), default=0.0)

    def pool_use(self) -> list[PoolUse]:
        """How full each pool is."""
        return list(map(use_of_blocks, self.pools, self.manager.promises.n_held()))

    @property
    def checkpoint_use(self) -> CheckpointUse | None:
        """Windows and states that hits can end with; None where none are kept for that."""
        return self._checkpoints and self._checkpoints.use

    def take_prefix(
        self, tokens: Sequence[int], salt: bytes, fingerprint: Fingerprint
    ) -> Snapshot | None:
        """A session of the cached prefix of some tokens; None if nothing of them is cached.

        Blocks of a tier are loaded first, where that is worth it.
        """
        return self._sessions.take(self._promoted(tokens, salt), fingerprint)

    def pin_prefix(self, tokens: Sequence[int], salt: bytes) -> tuple[Hashable, int] | None:
        """Keeps the cached prefix of some tokens until `unpin_prefix` gets the handle.

        Returns:
          The handle, and the tokens kept; None if nothing is cached.

        Raises:
          CacheFull: others' room would be lacking.
        """
        hit = self.manager.find_hit(self._promoted(tokens, salt))
        if not hit.n_tokens:
            return None
        return self.manager.promises.hold(hit), hit.n_tokens

    def unpin_prefix(self, handle: Hashable) -> None:
        """Lets a pinned prefix be evicted again, when its room is needed."""
        self.manager.promises.let_go(handle)

    def put_prefixes(self, prefixes: Sequence[SessionPrefix]) -> list[int]:
        """Fills free blocks with prefixes, to be found; tokens of each that can be.

        Raises:
          SessionMismatch: one of them can give no hit.
          CacheFull: there is no room for all.
        """
        ends, new = self._sessions.put(prefixes)
        if self.tiers and new:
            self.tiers.store(new)
        return ends

    def fits(self, context: DropSchedule) -> bool:
        """Whether there is room for a request of a context when no other one is there."""
        return self.manager.fits(self.manager.n_reserved(context))

    # --- what the scheduler asks ---------------------------------------------------------------

    def find_hit(self, state: SeqState) -> int | None:
        """See `SchedulerSpace`."""
        chain, wanted = chain_of(self.manager, state), wanted_of(state)
        hit = self.manager.find_hit(chain, wanted, read=state.request.cache)
        if not self.manager.is_ready(hit):
            return None
        if self.tiers and state.request.cache:
            more = self.tiers.promote(chain, hit, wanted)
            if more is None:
                return None
            if more:
                hit = self.manager.find_hit(chain, wanted)
        asks = state.request.cache and state.asks_sessions(hit)
        if self.sessions is not None and asks and self.manager.has_room(len(state.tokens)):
            # A hit is never the whole prompt.
            tokens = chain.tokens[: len(state.tokens) - 1].tolist()
            self.sessions.fill(state, tokens, hit.n_tokens)
            hit = self.manager.find_hit(chain, wanted)
        if state.lacks_prefix(hit):
            return None
        state.hit, state.n_shared = hit, hit.n_common
        return hit.n_tokens

    def n_cached(self, state: SeqState) -> int:
        """See `SchedulerSpace`."""
        chain, reads = chain_of(self.manager, state), state.request.cache
        return self.manager.find_hit(chain, wanted_of(state), read=reads).n_tokens

    def admit(self, state: SeqState, n_tokens: int, whole: int | None) -> int | None:
        """See `SchedulerSpace`."""
        if len(self._free) - self._n_ahead <= state.n_ahead:
            return None
        reserved = reserved_of(self.manager, state)
        if reserved and not self.manager.promises.spares(reserved):
            return None
        assert state.chain is not None and isinstance(state.hit, Hit), "find_hit comes first"
        seq_id, hit, state.hit = self._free[-1], state.hit, None
        room: int | Moving | None = whole
        if state.context is not None:
            # Blocks of all that it may have at once become its own; its tables grow with its steps.
            room = state.context
            n_tokens = min(n_tokens, hit.n_tokens + self._n_batch)
        chain: Chain | None = state.chain
        if state.folds:
            # It has copies of what it hits, and nobody finds it, since it will move.
            chain, hit = None, dataclasses.replace(hit, copied=True)
        new = self.manager.allocate(seq_id, n_tokens, chain=chain, hit=hit, whole=room)
        if new is None and state.folds and hit.n_tokens:
            # Copies take room beside what they are of, until they have run.
            hit = self.manager.find_hit(state.chain, read=False)
            new = self.manager.allocate(seq_id, n_tokens, hit=hit, whole=room)
        if new is None:
            return None
        self._start(state, self._free.pop())
        if self._checkpoints:
            self.manager.keep_hits(seq_id, self._ends_to_keep(state))
        if reserved:
            self.manager.reserve(seq_id, reserved)
            self._n_ahead += state.n_ahead
        self._arrays.update(seq_id, new)
        self._arrays.adopt(seq_id, hit.n_tokens)
        self.residency.hit(state.chain, hit, [g.block_size for g in self.groups])
        return hit.n_tokens

    def holds(self, state: SeqState) -> bool:
        """See `SchedulerSpace`."""
        n_blocks = reserved_of(self.manager, state)
        return state.n_ahead < self.n_seq_max and self.manager.fits(n_blocks)

    def grow(self, state: SeqState, n_tokens: int) -> bool:
        """See `SchedulerSpace`."""
        seq_id, gone = _seq_id(state), state.n_dropped
        new = self.manager.allocate(seq_id, n_tokens - gone, n_settled=state.n_computed - gone)
        if new is None:
            return False
        self._arrays.update(seq_id, new)
        self._note_capacity(state, seq_id)
        return True

    def grow_by_one(self, states: Sequence[SeqState]) -> bool:
        """See `SchedulerSpace`."""
        return all(self.grow(state, state.n_computed + 1) for state in states)

    def chunk(self, state: SeqState, start: int, n: int) -> int:
        """See `SchedulerSpace`."""
        if self._chunk_ends is None:
            return n
        borders = state.request.borders if self._checkpoints else ()
        kept = (*borders, *([] if state.n_shared is None else [state.n_shared]))
        sizes = {"n_prompt": state.n_prompt, "n_tokens": len(state.tokens)}
        return self._chunk_ends.fit(start, n, **sizes, kept=kept)

    def edit(self, state: SeqState, edits: Sequence[SeqEdit]) -> None:
        """See `SchedulerSpace`; what it moves nobody shares, for nobody finds it."""
        self._arrays.edit(_seq_id(state), edits, state.n_computed - state.n_dropped)
        if state.context is not None:
            # There is room, which its tables have yet to get.
            state.capacity = state.n_computed

    def fork(self, src: SeqState, dst: SeqState, n_tokens: int) -> bool:
        """See `SchedulerSpace`."""
        is_ahead = src.n_ahead > 0 and src.request is dst.request
        if src.seq_id is None or len(self._free) + is_ahead <= self._n_ahead:
            return False
        if is_ahead:
            self._take_ahead(src, 1)
        if self._fork(src, dst, n_tokens):
            return True
        if is_ahead:
            self._take_ahead(src, -1)
        return False

    def release(self, state: SeqState, *, damaged: bool = False, kept: bool = True) -> None:
        """See `SchedulerSpace`; of what is not kept nothing is found beyond its full blocks."""
        seq_id, self._n_ahead = _seq_id(state), self._n_ahead - state.n_ahead
        if self._in_cells and self._caching and kept and not damaged:
            # A step that is not over may have moved its state on.
            is_over = self._placed is None or seq_id not in self._placed.seq_ids
            self._learn(state, state.n_computed - state.n_past_read, is_end=is_over)
        for g, group in enumerate(self.groups) if damaged else ():
            held = self.manager.table(seq_id, g)
            self.pools[group.pool].forget([block for block in held if block != NULL])
        self._arrays.clear(seq_id)
        self.manager.free(seq_id)
        self._free.append(seq_id)
        del self._running[seq_id]
        state.seq_id, state.capacity = None, 0

    def offload(self, state: SeqState) -> bool:
        """See `SchedulerSpace`: full blocks went to a tier as soon as they could be found."""
        if self.tiers is None:
            return False
        self.release(state)
        return True

    # --- what the engine asks ------------------------------------------------------------------

    def begin_step(self) -> None:
        """A step begins; runs copies of requests that have ended, which hold blocks until then."""
        self._arrays.copy(self.manager.take_copies())
        self.manager.new_step()
        if self._in_cells:
            self._plan_ahead()
        for pool in self.pools:
            if events := pool.take_events():
                self.residency.follow(events)
                if self._checkpoints:
                    self._checkpoints.follow(events)
        if self.tiers:
            self.tiers.begin()

    def place(self, step: StepBatch) -> Where:
        """See `StepSpace`."""
        self._arrays.copy(self.manager.take_copies())
        self._placed = step
        return self._arrays.place(step)

    def append(self, step: StepBatch, stays: Bool[np.ndarray, " n"] | None = None) -> None:
        """See `StepSpace`."""
        self._arrays.append(step, stays)
        self._placed = None

    def learn(self, step: StepBatch) -> None:
        """The tokens of a step are known, and others may find what it computed.

        But for samples that have ended since: of those nothing of the step is found.
        """
        if not self._caching:
            return
        for state, end in step.ends(_STRIDE if self._in_cells else self.manager.block_size):
            if state.seq_id is not None:
                self._learn(state, end)

    def has_room(self, n: int) -> bool:
        """Whether n samples that run, whichever, find room for a token each.

        Each needs a block of each group at most.
        """
        needs = Counter(g.pool for g in self.groups)
        return self.manager.promises.spares([n * needs[i] for i in range(len(self.pools))])

    # --- below ---------------------------------------------------------------------------------

    def _ends_to_keep(self, state: SeqState) -> tuple[int, ...]:
        """Where checkpoints of a prompt are kept, but for those that the manager's rules keep."""
        every = self._interval if self._in_cells else 0
        regular = range(every, state.n_prompt + 1, every) if every else ()
        return (*state.request.borders, *regular)

    def _plan_ahead(self) -> None:
        """Says whether samples get cells in advance; takes those back that they have, if not."""
        n = _PLENTY * _STRIDE * self.n_seq_max
        is_plenty = all(self.pools[i].n_free >= n for i in self._arrays.store_of)
        had, self.manager.has_plenty = self.manager.has_plenty, is_plenty
        for seq_id, state in self._running.items() if had and not is_plenty else ():
            if self.manager.shrink(seq_id, state.n_computed - state.n_dropped):
                self._arrays.shrink(seq_id)
                self._note_capacity(state, seq_id)

    def _promoted(self, tokens: Sequence[int], salt: bytes) -> Chain:
        """The hashes of some tokens, after what a tier has of them was loaded."""
        # Nothing is planned now, so what is to be copied before the next step can be.
        self._arrays.copy(self.manager.take_copies())
        self.manager.new_step()
        chain = Chain(self.manager.block_size, salt=salt)
        # One more than is wanted, for a hit is never all of a prompt.
        chain.extend([*tokens, 0])
        while self.tiers and self.tiers.promote(chain, self.manager.find_hit(chain)) is None:
            self.tiers.wait()
            self.begin_step()
        return chain

    def _fork(self, src: SeqState, dst: SeqState, n_tokens: int) -> bool:
        seq_id, chain, src_id = self._free[-1], chain_of(self.manager, src).copy(), _seq_id(src)
        n = n_tokens - src.n_dropped
        # A context has all its room from the start, as an admitted one's.
        room = {"moving": dst.context or src.context, "n_shared": src.n_never_moved}
        try:
            copies = self.manager.fork(
                src_id, seq_id, n, chain=None if src.folds else chain, **room
            )
        except (CacheFull, CannotRewind):
            return False
        if reserved := reserved_of(self.manager, dst):
            self.manager.reserve(seq_id, reserved)
            if not self.manager.promises.spares([0] * len(self.pools)):
                self.manager.free(seq_id)
                return False
        dst.chain, dst.n_until = chain, src.n_until
        self._start(dst, self._free.pop())
        if src.schedule is not None:
            self._arrays.fork_moved(src_id, seq_id, copies)
        else:
            self._arrays.fork(seq_id, n_tokens, copies)
        return True

    def _take_ahead(self, src: SeqState, n: int) -> None:
        """So many samples fewer are to be forked from one, whose room is not kept any more."""
        src.n_ahead, self._n_ahead = src.n_ahead - n, self._n_ahead - n
        self.manager.reserve(_seq_id(src), reserved_of(self.manager, src))

    def _learn(self, state: SeqState, end: int, *, is_end: bool = False) -> None:
        """The first `end` tokens of a sample are there, and full blocks of them may be found.

        So may be the states after them where it computes no more, `is_end`, unless others may find
        fewer of its tokens.
        """
        n_found = len(chain_of(self.manager, state).tokens)
        moved = state.context is not None and not 0 < n_found <= end
        if moved or state.folds or not end:
            return
        # The manager is told all that are there, for a state is that of all.
        found = self.manager.register(_seq_id(state), end - state.n_dropped)
        if is_end and end <= n_found:
            self.manager.register_end(_seq_id(state), end)
        if self.tiers and found:
            self.tiers.store(found)

    def _start(self, state: SeqState, seq_id: int) -> None:
        state.start(seq_id, 0)
        self._running[seq_id] = state
        self._note_capacity(state, seq_id)

    def _note_capacity(self, state: SeqState, seq_id: int) -> None:
        state.capacity = self.manager.n_capacity(seq_id) + state.n_dropped
        if state.context is not None and state.n_until is not None:
            state.capacity = min(state.capacity, state.n_until)


def open_pools(plan: PagedPlan, *, caching: bool) -> list[BlockPool]:
    """The pools of a plan; blocks that lie in one block of the arrays are taken together."""
    spans = {g.pool: g.n_span for g in plan.groups if g.kind != "recurrent"}
    return [
        BlockPool(p.n_blocks, caching=caching, events=True, span=spans.get(i, 1))
        for i, p in enumerate(plan.pools)
    ]


def _seq_id(state: SeqState) -> int:
    assert state.seq_id is not None, "a sample that runs has a sequence number"
    return state.seq_id
