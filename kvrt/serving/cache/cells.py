"""The cache of an engine in cells: whatever is empty serves, and there are no prefix hits."""

from collections.abc import Sequence

import numpy as np

from kvrt.cache.cell_cache import CellCache
from kvrt.cellcache import contents
from kvrt.cellcache.blocks import CellCopies
from kvrt.cellcache.host_cells import SlotPlan
from kvrt.cells.edits import Copy, Remove, Shift
from kvrt.cells.slots import Places, pad
from kvrt.errors import CannotRewind
from kvrt.policies import Drop, PolicyContext
from kvrt.serving.cache.base import SessionFiller
from kvrt.serving.metrics import PoolUse
from kvrt.serving.request import SeqState
from kvrt.serving.sessions.prefix import SessionPrefix, TakenPrefix
from kvrt.serving.step_batch import StepBatch
from kvrt.store.recurrent import StateIndex


class CellSpace:
    """Sequence numbers, and cells for their tokens; see `kvrt.serving.cache.base.Space`.

    Attributes:
      n_seq_max: sequences at once.
      n_max: tokens that it holds of one sequence when no other one is there.
      residency: None, for nothing is found again.
      tiers: None, for tiers keep blocks.
      sessions: None, for nothing is found again.
    """

    residency = None
    tiers = None
    sessions: SessionFiller | None = None

    def __init__(self, cache: CellCache):
        """Empty."""
        self.n_seq_max = cache.config.n_seq_max
        self.n_max = min(cache.host.n_free, cache.config.n_ctx)
        self._cache, self._host = cache, cache.host
        self._free = list(range(self.n_seq_max))[::-1]
        # Tokens for which sequences have room, and which are not computed yet.
        self._n_promised = 0
        # Cells to copy before the next step, for shared ones that moved.
        self._copies: list[tuple[CellCopies, ...]] = []
        self._planned: SlotPlan | None = None

    @property
    def usage(self) -> float:
        """See `Space`."""
        return max((x.n_used / x.extent.n_cells for x in self._host.groups), default=0.0)

    def pool_use(self) -> list[PoolUse]:
        """See `Space`; a group's cells are a pool."""
        groups = self._host.groups
        return [
            PoolUse(n_units=x.extent.n_cells, n_free=x.extent.n_cells - x.n_used) for x in groups
        ]

    def take_prefix(self, tokens: Sequence[int], salt: bytes) -> TakenPrefix | None:
        """See `Space`; `EngineSessions` asks nobody who finds nothing again."""
        return None

    def put_prefixes(self, prefixes: Sequence[SessionPrefix]) -> list[int]:
        """See `Space`; likewise."""
        return [0] * len(prefixes)

    def fits(self, context: PolicyContext) -> bool:
        """See `Space`."""
        return context.n_most <= self.n_max

    # --- what the scheduler asks ---------------------------------------------------------------

    def find_hit(self, state: SeqState) -> int | None:
        """See `Space`: nothing is found."""
        return 0

    def admit(self, state: SeqState, n_tokens: int, whole: int | None) -> int | None:
        """See `Space`."""
        if not self._free or max(n_tokens, whole or 0) > self._n_left:
            return None
        self._start(state, n_tokens)
        self._n_promised += n_tokens
        return 0

    def grow(self, state: SeqState, n_tokens: int) -> bool:
        """See `Space`."""
        more = n_tokens - state.capacity
        if more > self._n_left:
            return False
        state.capacity = n_tokens
        self._n_promised += more
        return True

    def chunk(self, state: SeqState, start: int, n: int) -> int:
        """See `Space`: a state that nobody finds again may end anywhere."""
        return n

    def advance(self, state: SeqState, drops: Sequence[Drop]) -> None:
        """See `Space`."""
        assert state.seq_id is not None and state.n_until is not None, "it runs, with a context"
        n_free = self._host.n_free
        for drop in drops:
            remove = Remove(seq_id=state.seq_id, p0=drop.p0, p1=drop.p1)
            cut, _ = contents.apply(self._host.contents, remove)
            moved, copies = contents.apply(cut, Shift(seq_id=state.seq_id, p0=drop.p1, d=-drop.n))
            self._host.commit(moved)
            self._copies.append(copies)
        # What is freed stays its own; what is copied was promised to it, or to who shared it.
        self._n_promised += self._host.n_free - n_free
        state.capacity = state.n_until

    def fork(self, src: SeqState, dst: SeqState, n_tokens: int) -> bool:
        """See `Space`."""
        # Sooner or later its policy moves what is shared, and then it needs cells of its own.
        n_own = 0 if dst.context is None else dst.n_whole
        if not self._free or src.seq_id is None or n_own > self._n_left:
            return False
        end = n_tokens - src.n_dropped
        try:
            self._cache.apply(Copy(src=src.seq_id, dst=self._free[-1], p1=end))
        except CannotRewind:
            return False
        dst.n_until = src.n_until
        self._start(dst, n_tokens)
        self._n_promised += n_own
        return True

    def release(self, state: SeqState, *, damaged: bool = False) -> None:
        """See `Space`; what is damaged is found by nobody, as all else."""
        assert state.seq_id is not None, "a sample that runs has a sequence number"
        self._free.append(state.seq_id)
        n_free = self._host.n_free
        # The last one leaves a cache as good as new: what comes does not depend on the past.
        if len(self._free) == self.n_seq_max:
            self._cache.clear()
        else:
            self._cache.apply(Remove(seq_id=state.seq_id))
        if state.context is None:
            self._n_promised -= state.capacity - state.n_computed
        else:
            # Cells that it shared may be in use still, at the cost of who was promised his own.
            self._n_promised -= state.n_whole - (self._host.n_free - n_free)
        state.seq_id, state.capacity = None, 0

    def offload(self, state: SeqState) -> bool:
        """See `Space`: cells have no tiers."""
        return False

    # --- what the engine asks ------------------------------------------------------------------

    def begin_step(self) -> None:
        """See `Space`."""

    def place(self, step: StepBatch) -> tuple[tuple[Places, ...], StateIndex | None]:
        """See `Space`."""
        for copies in self._copies:
            self._cache.copy_cells(copies)
        self._copies = []
        self._cache.upload()
        self._cache.shift_keys()
        first = {c.seq_id: c.pos for c in step.chunks}
        self._planned = planned = self._host.find(step.seq_ids, first)
        places = []
        for group, found in zip(self._host.groups, planned.found, strict=True):
            rows = group.seq_blocks([(c.seq_id, c.pos) for c in step.decode], step.n_seq_max)
            blocks = group.visible_blocks({c.seq_id: c.pos for c in step.prompts})
            slots = step.spread(found.slots, group.extent.n_slots)
            n_blocks = np.asarray(len(blocks), np.int32)
            blocks = pad(blocks, group.extent.n_blocks, 0)
            places.append(Places(slots=slots, blocks=blocks, n_blocks=n_blocks, seq_blocks=rows))
        if planned.states is None:
            return tuple(places), None
        none = planned.states.after.n_states + 1
        src, dst = (step.spread(x, none) for x in (planned.states.src, planned.states.dst))
        return tuple(places), StateIndex(src=src, dst=dst)

    def commit(self, step: StepBatch) -> None:
        """See `Space`."""
        assert self._planned is not None, "place comes first"
        self._host.append(self._planned, step.pos, step.tokens)
        self._n_promised -= sum(c.n for c in step.chunks)

    def _start(self, state: SeqState, n_tokens: int) -> None:
        state.seq_id = self._free.pop()
        state.capacity = n_tokens if state.n_until is None else state.n_until

    @property
    def _n_left(self) -> int:
        """Cells that nobody has and nobody was promised."""
        return self._host.n_free - self._n_promised
