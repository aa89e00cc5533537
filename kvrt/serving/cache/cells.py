"""The cache of an engine in cells: whatever is empty serves, and there are no prefix hits."""

import numpy as np

from kvrt.cache.cell_cache import CellCache
from kvrt.cellcache.host_cells import SlotPlan
from kvrt.cells.edits import Copy, Remove
from kvrt.cells.slots import Places, pad
from kvrt.errors import CannotRewind
from kvrt.serving.metrics import PoolUse
from kvrt.serving.request import SeqState
from kvrt.serving.step_batch import StepBatch
from kvrt.store.recurrent import StateIndex


class CellSpace:
    """Sequence numbers, and cells for their tokens; see `kvrt.serving.cache.base.Space`.

    Attributes:
      n_seq_max: sequences at once.
      n_max: tokens that it holds of one sequence when no other one is there.
      residency: None, for nothing is found again.
      tiers: None, for tiers keep blocks.
    """

    residency = None
    tiers = None

    def __init__(self, cache: CellCache):
        """Empty."""
        self.n_seq_max = cache.config.n_seq_max
        self.n_max = min(cache.host.n_free, cache.config.n_ctx)
        self._cache, self._host = cache, cache.host
        self._free = list(range(self.n_seq_max))[::-1]
        # Tokens for which sequences have room, and which are not computed yet.
        self._n_promised = 0
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

    # --- what the scheduler asks ---------------------------------------------------------------

    def find_hit(self, state: SeqState) -> int | None:
        """See `Space`: nothing is found."""
        return 0

    def admit(self, state: SeqState, n_tokens: int, whole: int | None) -> int | None:
        """See `Space`."""
        if not self._free or max(n_tokens, whole or 0) > self._n_left:
            return None
        state.seq_id, state.capacity = self._free.pop(), n_tokens
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

    def fork(self, src: SeqState, dst: SeqState, n_tokens: int) -> bool:
        """See `Space`."""
        if not self._free or src.seq_id is None:
            return False
        try:
            self._cache.apply(Copy(src=src.seq_id, dst=self._free[-1], p1=n_tokens))
        except CannotRewind:
            return False
        dst.seq_id, dst.capacity = self._free.pop(), n_tokens
        return True

    def release(self, state: SeqState, *, damaged: bool = False) -> None:
        """See `Space`; what is damaged is found by nobody, as all else."""
        assert state.seq_id is not None, "a sample that runs has a sequence number"
        self._free.append(state.seq_id)
        self._n_promised -= state.capacity - state.n_computed
        # The last one leaves a cache as good as new: what comes does not depend on the past.
        if len(self._free) == self.n_seq_max:
            self._cache.clear()
        else:
            self._cache.apply(Remove(seq_id=state.seq_id))
        state.seq_id, state.capacity = None, 0

    def offload(self, state: SeqState) -> bool:
        """See `Space`: cells have no tiers."""
        return False

    # --- what the engine asks ------------------------------------------------------------------

    def begin_step(self) -> None:
        """See `Space`."""

    def place(self, step: StepBatch) -> tuple[tuple[Places, ...], StateIndex | None]:
        """See `Space`."""
        self._cache.upload()
        first = {c.seq_id: c.start for c in step.chunks}
        self._planned = planned = self._host.find(step.seq_ids, first)
        places = []
        for group, found in zip(self._host.groups, planned.found, strict=True):
            rows = group.seq_blocks([(c.seq_id, c.start) for c in step.decode], step.n_seq_max)
            blocks = group.visible_blocks({c.seq_id: c.start for c in step.prompts})
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

    @property
    def _n_left(self) -> int:
        """Cells that nobody has and nobody was promised."""
        return self._host.n_free - self._n_promised
