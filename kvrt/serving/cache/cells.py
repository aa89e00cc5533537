"""The cache of an engine in cells: whatever is empty serves, and prefixes are shared by owners."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from kvrt.arrays import Bool, Int32
from kvrt.cache.cell_cache import CellCache
from kvrt.cache.runner import CellSteps
from kvrt.cellcache import contents
from kvrt.cellcache.blocks import CellCopies
from kvrt.cellcache.host_cells import Where
from kvrt.cellcache.indexed_group import IndexedGroup
from kvrt.cells import owned
from kvrt.cells.edits import Copy, Remove, SeqEdit
from kvrt.cells.slots import StepTokens
from kvrt.errors import CacheFull, CannotRewind
from kvrt.policies import DropSchedule
from kvrt.serving.cache.base import SessionFiller
from kvrt.serving.cache.cell_sessions import CellSessions
from kvrt.serving.cache.checkpoints.in_cells import CellCheckpoints
from kvrt.serving.cache.engine_cells import EngineGroup
from kvrt.serving.cache.prefixes import CellPrefixes
from kvrt.serving.metrics import CheckpointUse, PoolUse
from kvrt.serving.request import CellHit, SeqState
from kvrt.serving.sessions.prefix import SessionPrefix, TakenPrefix
from kvrt.serving.step_batch import StepBatch

# One in so many cells is kept free, at most, for homes of sequences that run.
_FREE_FOR_HOMES = 4


class CellSpace:
    """Sequence numbers, and cells for their tokens; see `kvrt.serving.cache.base.Space`.

    Attributes:
      n_seq_max: sequences at once.
      n_max: tokens that it holds of one sequence when no other one is there.
      residency: None, for cells are not followed one by one.
      tiers: None, for tiers keep blocks.
      hit_size: 1, for a hit ends at any token.
      in_blocks, state_size: False and None.
      sessions: fills the cache from sessions before a request is admitted, if anything does.
      keeps_others: where no window uses cells again and there are no states, which move on.
      n_pinned: first positions of each sequence that no layer forgets; None without a policy.
    """

    residency = None
    tiers = None
    hit_size, in_blocks = 1, False
    state_size: int | None = None

    def __init__(self, cache: CellCache, *, prefix_cache: bool):
        """Empty; with `prefix_cache` the cache has room for `prefixes.N_KEPT` kept sequences."""
        self.n_seq_max = cache.config.n_seq_max
        self.n_max = min(cache.host.n_free, cache.config.n_ctx)
        self._cache, self._host, self.n_pinned = cache, cache.host, cache.host.n_pinned
        self._groups = [x for x in cache.host.groups if isinstance(x, EngineGroup)]
        self._free = list(range(self.n_seq_max))[::-1]
        # Tokens for which sequences have room, and which are not computed yet.
        self._n_promised = 0
        # Numbers that nobody else gets: of samples to be forked, of pins of windows or states.
        self._n_ahead = 0
        self._steps = CellSteps(cache)
        # Runs before the next step: copies of shared cells that moved, what checkpoints have.
        self._later: list[Callable[[], None]] = []
        prefixes = CellPrefixes(cache.host, self.n_seq_max) if prefix_cache else None
        self._prefixes, self._sessions = prefixes, prefixes and CellSessions(cache, prefixes)
        self._checkpoints: CellCheckpoints | None = None
        if prefixes is not None and cache.checkpoints is not None:
            self._checkpoints = CellCheckpoints(cache, cache.checkpoints, prefixes)
        self.sessions: SessionFiller | None = None
        self.keeps_others = not cache.host.rolls and cache.host.states is None
        # Those with a schedule that run, and the tokens of each that others computed and it has no
        # cells of its own for: with a context for good, else until positions move.
        self._shared: dict[SeqState, int] = {}

    @property
    def usage(self) -> float:
        """See `Space`."""
        return max((use.usage for use in self.pool_use()), default=0.0)

    def pool_use(self) -> list[PoolUse]:
        """See `Space`; a group's cells are a pool."""
        return pool_use(self._host.groups, self._prefixes)

    @property
    def checkpoint_use(self) -> CheckpointUse | None:
        """See `Space`."""
        return self._checkpoints and self._checkpoints.use

    def take_prefix(self, tokens: Sequence[int], salt: bytes) -> TakenPrefix | None:
        """See `Space`."""
        assert self._sessions is not None, "there is a prefix cache"
        self._run_pending()
        return self._sessions.take(tokens, salt)

    def pin_prefix(self, tokens: Sequence[int], salt: bytes) -> tuple[Hashable, int] | None:
        """See `Space`; a pin has a sequence's windows and states, unless a checkpoint has them."""
        assert self._prefixes is not None, "there is a prefix cache"
        hit = self._prefixes.find(np.asarray(tokens, np.int32), salt)
        if hit is None:
            return None
        if self._checkpoints:
            self._checkpoints.check_pin(hit)
        n_seqs = self._prefixes.n_seqs_of(hit)
        if len(self._free) - self._n_ahead < n_seqs or self._prefixes.n_idle_of(hit) > self._n_left:
            raise CacheFull(
                f"to pin {hit.n_tokens} tokens takes room that {self._n_running} requests run in "
                "or have reserved; wait for one of them, or unpin another prefix"
            )
        handle = self._prefixes.pin(hit, tokens, salt)
        self._n_ahead += n_seqs
        self._prefixes.make_room_beside(self._n_running)
        return handle, hit.n_tokens

    def unpin_prefix(self, handle: Hashable) -> None:
        """See `Space`."""
        assert self._prefixes is not None, "there is a prefix cache"
        self._n_ahead -= self._prefixes.unpin(handle)

    def put_prefixes(self, prefixes: Sequence[SessionPrefix]) -> list[int]:
        """See `Space`."""
        assert self._sessions is not None and self._prefixes is not None, "there is a prefix cache"
        ends, new = self._sessions.missing(prefixes)
        n = sum(ends[i] for i in new) if self._host.complete else 0
        if n > self._n_left:
            raise CacheFull(
                f"the session needs {n} cells, {max(self._n_left, 0)} of {self.n_max} are free; "
                "raise n_ctx, or trim the session"
            )
        self._prefixes.check_room_beside(self._n_running, len(new))
        # Nothing that is still to be copied from may be written over.
        self._run_pending()
        self._promise(n)
        try:
            self._prefixes.make_room_beside(self._n_running + len(new))
            for i in new:
                self._sessions.put(prefixes[i], ends[i])
        finally:
            self._n_promised -= n
        return ends

    def fits(self, context: DropSchedule) -> bool:
        """See `Space`."""
        return context.n_most <= self.n_max

    # --- what the scheduler asks ---------------------------------------------------------------

    def find_hit(self, state: SeqState) -> int | None:
        """See `Space`; of one whose policy will drop tokens only what it never drops is shared."""
        state.hit = None
        if self._prefixes is None or not state.request.cache:
            return 0
        ids = findable(state)
        hit = self._prefixes.find(ids, state.request.salt)
        if self.sessions is not None and state.asks_sessions(hit) and len(ids) <= self._n_left:
            self.sessions.fill(state, ids.tolist(), hit.n_tokens if hit else 0)
            hit = self._prefixes.find(ids, state.request.salt)
        state.hit, n_hit = hit, hit.n_tokens if hit else 0
        return None if state.lacks_prefix(hit) else n_hit

    def n_cached(self, state: SeqState) -> int:
        """See `SchedulerSpace`."""
        if self._prefixes is None or not state.request.cache:
            return 0
        hit = self._prefixes.find(findable(state), state.request.salt)
        return hit.n_tokens if hit else 0

    def admit(self, state: SeqState, n_tokens: int, whole: int | None) -> int | None:
        """See `Space`."""
        hit, state.hit = state.hit, None
        assert hit is None or isinstance(hit, CellHit), "what this cache has found"
        n_hit = hit.n_tokens if hit else 0
        n_left = self._n_left - (self._prefixes.n_idle_of(hit) if self._prefixes and hit else 0)
        # What it will move it needs cells of its own for, sooner or later.
        n_given = 0 if state.folds else n_hit
        n_room, n_ahead = max(n_tokens, state.n_reserved), state.n_ahead * n_each(state)
        if len(self._free) - self._n_ahead <= state.n_ahead:
            return None
        if max(n_room, whole or 0) + n_ahead - n_given > n_left:
            return None
        self._start(state, n_room, n_hit, hit)
        self._promise(n_room + n_ahead - n_given)
        self._n_ahead += state.n_ahead
        return n_hit

    def holds(self, state: SeqState) -> bool:
        """See `Space`."""
        n = state.n_reserved + state.n_ahead * n_each(state)
        return state.n_ahead < self.n_seq_max and n <= self.n_max

    def grow(self, state: SeqState, n_tokens: int) -> bool:
        """See `Space`."""
        more = n_tokens - state.capacity
        if more > self._n_left:
            return False
        state.capacity = n_tokens
        self._promise(more)
        return True

    def grow_by_one(self, states: Sequence[SeqState]) -> bool:
        """See `Space`."""
        if len(states) > self._n_left:
            return False
        for state in states:
            state.capacity += 1
        self._promise(len(states))
        return True

    def chunk(self, state: SeqState, start: int, n: int) -> int:
        """See `Space`: it ends where a checkpoint is due."""
        if self._checkpoints is None:
            return n
        return self._checkpoints.fit(state, start, n, n_findable(state))

    def edit(self, state: SeqState, edits: Sequence[SeqEdit]) -> None:
        """See `Space`."""
        assert state.seq_id is not None and state.n_until is not None, "it runs, with a schedule"
        n_free = self._host.n_free
        after, copies = contents.edited(self._host.contents, state.seq_id, edits)
        for some in copies:
            self._copy_later(some)
        (self._prefixes or self._host).commit(after)
        if state.context is None:
            # What it shared with a hit it has copies of now.
            self._n_promised -= self._shared.pop(state, 0)
            return
        # What is freed stays its own; what is copied was promised to it, or to who shared it.
        self._n_promised += self._host.n_free - n_free
        state.capacity = state.n_until

    def fork(self, src: SeqState, dst: SeqState, n_tokens: int) -> bool:
        """See `Space`."""
        # Sooner or later its policy moves what is shared, and then it needs cells of its own.
        n_hit = self._shared.get(src, 0) if src.context is not None else 0
        n_room = max(n_tokens, dst.n_reserved)
        n_own = n_room - n_tokens if dst.context is None else dst.n_whole - n_hit
        n_copied = n_tokens if src.folds else 0
        is_ahead = src.n_ahead > 0 and src.request is dst.request
        n_ahead = n_each(src) if is_ahead else 0
        if src.seq_id is None or len(self._free) + is_ahead <= self._n_ahead:
            return False
        if n_own + n_copied > self._n_left + n_ahead:
            return False
        try:
            self._cache.apply(Copy(src=src.seq_id, dst=self._free[-1], p1=n_tokens - src.n_gone))
        except CannotRewind:
            return False
        dst.n_until = src.n_until
        src.n_ahead, self._n_ahead = src.n_ahead - is_ahead, self._n_ahead - is_ahead
        self._start(dst, n_room, n_hit)
        assert dst.seq_id is not None, "it has just started"
        self._learn(dst, dst.seq_id, n_tokens)
        self._promise(n_own + n_copied - n_ahead)
        if n_copied:
            after, copies = contents.with_own_cells(self._host.contents, dst.seq_id)
            self._copy_later(copies)
            (self._prefixes or self._host).commit(after)
            self._n_promised -= n_copied
        return True

    def release(self, state: SeqState, *, damaged: bool = False, kept: bool = True) -> None:
        """See `Space`; what is damaged is found by nobody, nor what shares cells with it."""
        assert state.seq_id is not None, "a sample that runs has a sequence number"
        self._n_promised -= state.n_ahead * n_each(state)
        self._n_ahead -= state.n_ahead
        seq_id, state.seq_id = state.seq_id, None
        if state.context is None:
            self._n_promised -= state.capacity - state.n_computed + self._shared.pop(state, 0)
        else:
            n_shared, (group, *_) = self._shared.pop(state), self._host.complete
            others = {s.seq_id: n for s, n in self._shared.items()}
            self._n_promised -= state.n_whole - n_taken(group, seq_id, n_shared, others)
        self._free.append(seq_id)
        for group in self._groups:
            group.leave_home(seq_id)
        state.capacity = 0
        if self._prefixes is None:
            self._cache.apply(Remove(seq_id=seq_id))
        elif damaged:
            self._prefixes.forget(seq_id)
            self._prefixes.release(seq_id)
        elif not kept:
            self._prefixes.drop(seq_id)
        else:
            self._learn(state, seq_id, state.n_computed - state.n_past_read)
            self._prefixes.release(seq_id)
        # The last one leaves a cache as good as new: what comes does not depend on the past.
        if not (self._n_running or (self._prefixes and self._prefixes.n_kept)):
            self._cache.clear()

    def offload(self, state: SeqState) -> bool:
        """See `Space`: cells have no tiers."""
        return False

    # --- what the engine asks ------------------------------------------------------------------

    def begin_step(self) -> None:
        """See `Space`."""

    def place(self, step: StepTokens) -> Where:
        """See `StepSpace`."""
        if self._later:
            self._run_pending()
        self._free_homes(step.seq_ids)
        return self._steps.place(step)

    def append(self, step: StepTokens, stays: Bool[np.ndarray, " n"] | None = None) -> None:
        """See `StepSpace`."""
        self._steps.append(step, stays)
        self._n_promised -= len(step.pos)

    def learn(self, step: StepBatch) -> None:
        """See `Space`; what was decoded is found once its sample has ended."""
        for c in step.prompts:
            self._learn(c.state, c.seq_id, c.end)
            if self._checkpoints and c.end <= n_findable(c.state):
                self._checkpoints.add(c.state, c.seq_id, c.end)

    def has_room(self, n: int) -> bool:
        """See `Space`."""
        return n <= self._n_left

    @property
    def _n_left(self) -> int:
        """Cells that nobody who runs has or was promised."""
        n_idle = self._prefixes.n_idle if self._prefixes else 0
        return self._host.n_free + n_idle - self._n_promised

    @property
    def _n_running(self) -> int:
        return self.n_seq_max - len(self._free)

    def _copy_later(self, copies: Sequence[CellCopies]) -> None:
        """Cells of each group to copy, for some that moved and that others share."""
        self._later.append(lambda: self._cache.copy_cells(copies))

    def _run_pending(self) -> None:
        later, self._later = self._later, []
        for run in later:
            run()

    def _start(
        self, state: SeqState, n_tokens: int, n_shared: int, hit: CellHit | None = None
    ) -> None:
        seq_id = self._free.pop()
        state.start(seq_id, n_tokens)
        if state.schedule is not None:
            self._shared[state] = n_shared
        if self._prefixes is None:
            return
        checkpoint = self._prefixes.share(hit, seq_id) if hit else None
        found = ids_of(state, 0, min(hit.n_tokens if hit else 0, n_findable(state)))
        self._prefixes.start(seq_id, found, state.request.salt)
        self._prefixes.make_room_beside(self._n_running)
        if checkpoint is not None:
            assert self._checkpoints is not None, "without them none is hit"
            self._later.append(self._checkpoints.resume(seq_id, checkpoint))

    def _promise(self, n: int) -> None:
        """Promises cells, which are empty from now on."""
        self._n_promised += n
        n_lacking = self._n_promised - self._host.n_free
        if self._prefixes and n_lacking > 0:
            self._prefixes.evict(n_lacking)

    def _free_homes(self, seq_ids: np.ndarray) -> None:
        """Evicts for whole blocks, rather than let sequences that run share what is left of some.

        No more than leaves a part of all cells free.
        """
        if self._prefixes is None or not self._prefixes.n_kept:
            return
        n = max((x.n_cells_wanted(seq_ids) for x in self._groups), default=0)
        n = min(n, self.n_max // _FREE_FOR_HOMES - (self._host.n_free - self._n_promised))
        if n > 0:
            self._prefixes.evict(n)

    def _learn(self, state: SeqState, seq_id: int, n: int) -> None:
        """The first n tokens of a sample are there, and may be found."""
        n_found = self._prefixes.n_known(seq_id) if self._prefixes else None
        end = min(n, n_findable(state))
        if self._prefixes and n_found is not None and n_found < end:
            self._prefixes.extend(seq_id, ids_of(state, n_found, end))


# --- what is counted -------------------------------------------------------------------------


def n_each(state: SeqState) -> int:
    """Cells of each of the samples that are to be forked from one, beside those that it shares."""
    return state.n_whole - (0 if state.schedule else state.n_prompt)


def n_findable(state: SeqState) -> int:
    """Tokens of a sample that others may find: none of one that SelfExtend will move."""
    return 0 if state.folds else state.n_unmoved


def findable(state: SeqState) -> Int32[np.ndarray, " n"]:
    """Tokens of a sample that a hit may have: what it never drops or moves, and not the last."""
    n = min(state.n_unmoved, len(state.tokens) - 1)
    if state.context is not None:
        # The first token after a hit is computed before anything is dropped.
        n = min(n, state.context.n_part(state.n_prompt) - 1)
    return ids_of(state, 0, n)


def ids_of(state: SeqState, start: int, end: int) -> Int32[np.ndarray, " n"]:
    """Tokens [start, end) of a sample."""
    n = state.n_prompt
    prompt = np.frombuffer(state.request.text, ">u4")[start:end].astype(np.int32)
    if end <= n:
        return prompt
    return np.concatenate([prompt, np.array(state.tokens[max(start, n) : end], np.int32)])


def n_taken(
    group: IndexedGroup, seq_id: int, n_shared: int, others: Mapping[int | None, int]
) -> int:
    """Cells of a sample with a context that were promised to it, or that nobody paid for.

    Its share of a hit, n_shared; and what it took and none of the others of the kind has as well,
    of which there is the share of each.
    """
    mine = owned(group.cells, seq_id) & (group.cells.pos >= n_shared)
    for other, n in others.items():
        assert other is not None, "those that have a context run"
        mine &= ~(owned(group.cells, other) & (group.cells.pos >= n))
    return n_shared + int(np.count_nonzero(mine))


def pool_use(groups: Sequence[IndexedGroup], prefixes: CellPrefixes | None) -> list[PoolUse]:
    """How full each group is; kept prefixes are free, but for those that are pinned."""
    out = []
    for i, group in enumerate(groups):
        n, n_idle = group.extent.n_cells, prefixes.count_idle(group) if prefixes else 0
        use = PoolUse(
            n_units=n,
            n_free=n - group.n_used + n_idle,
            n_cached=n_idle,
            n_evicted=prefixes.n_evicted[i] if prefixes else 0,
            n_pinned=int(np.count_nonzero(prefixes.pinned.cells(group))) if prefixes else 0,
        )
        out.append(use)
    return out
