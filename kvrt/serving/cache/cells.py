"""The cache of an engine in cells: whatever is empty serves, and nothing is found again."""

import numpy as np

from kvrt.cellcache import contents
from kvrt.cellcache.planning import Host, Planned
from kvrt.config import CacheConfig
from kvrt.errors import CannotRewind
from kvrt.program.batch import Places, pad
from kvrt.program.device import Device
from kvrt.serving.metrics import PoolUse
from kvrt.serving.request import State
from kvrt.serving.step_batch import Work
from kvrt.store.recurrent import StateRows


class CellSpace:
    """Rows for sequences, and cells for their tokens; see `kvrt.serving.cache.base.Space`."""

    def __init__(self, host: Host, device: Device, config: CacheConfig):
        """Empty."""
        self.n_rows = config.n_seq_max
        self.n_max = min(host.n_free, config.n_ctx)
        self._host, self._device = host, device
        self._free = list(range(self.n_rows))[::-1]
        # Tokens that a row has cells for, and that it was promised cells for.
        self._held = np.zeros(self.n_rows, np.int64)
        self._capacity = np.zeros(self.n_rows, np.int64)
        self._planned: Planned | None = None

    @property
    def n_free_rows(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """How full the fullest group's cells are."""
        return max((x.n_used / x.extent.n_cells for x in self._host.ledgers), default=0.0)

    def pool_use(self) -> list[PoolUse]:
        """How full each group's cells are."""
        ledgers = self._host.ledgers
        return [
            PoolUse(n_units=x.extent.n_cells, n_free=x.extent.n_cells - x.n_used) for x in ledgers
        ]

    # --- what the scheduler asks ---------------------------------------------------------------

    def hit(self, state: State) -> int | None:
        """See `Space.hit`."""
        return 0

    def admit(self, state: State, n_tokens: int, whole: int | None) -> int | None:
        """See `Space.admit`."""
        if not self._free or max(n_tokens, whole or 0) > self._n_left:
            return None
        state.row = self._free.pop()
        self._held[state.row], self._capacity[state.row] = 0, n_tokens
        return 0

    def capacity(self, row: int) -> int:
        """See `Space.capacity`."""
        return int(self._capacity[row])

    def grow(self, row: int, n_tokens: int, n_computed: int) -> bool:
        """See `Space.grow`."""
        if n_tokens - self._capacity[row] > self._n_left:
            return False
        self._capacity[row] = n_tokens
        return True

    def cut(self, state: State, start: int, n: int) -> int:
        """See `Space.cut`: a state that nobody finds again may end anywhere."""
        return n

    def fork(self, src: State, dst: State, n_tokens: int) -> bool:
        """See `Space.fork`."""
        if not self._free or src.row is None:
            return False
        row = self._free[-1]
        try:
            self._host.commit(contents.cp(self._host.memory, src.row, row, 0, n_tokens))
        except CannotRewind:
            return False
        dst.row = self._free.pop()
        self._held[row] = self._capacity[row] = n_tokens
        return True

    def release(self, row: int, state: State) -> None:
        """See `Space.release`."""
        self._held[row] = self._capacity[row] = 0
        self._free.append(row)
        held = self._host.memory
        # The last one leaves a cache as good as new: what comes does not depend on the past.
        empty = len(self._free) == self.n_rows
        self._host.commit(contents.clear(held) if empty else contents.rm(held, row))

    def park(self, row: int, state: State) -> bool:
        """See `Space.park`: cells have no tiers."""
        return False

    # --- what the engine asks ------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins."""

    def forget(self, state: State) -> None:
        """A state ended."""

    def places(self, work: Work) -> tuple[tuple[Places, ...], StateRows | None]:
        """Slots and blocks of a step's tokens, by group, and rows of states."""
        for i, ledger in enumerate(self._host.ledgers):
            if ledger.stale:
                self._device.upload(i, ledger.cells)
                ledger.stale = False
        first = {c.row: c.start for c in work.chunks}
        self._planned = planned = self._host.find(work.rows, first)
        places = []
        for ledger, found in zip(self._host.ledgers, planned.found, strict=True):
            rows = ledger.rows([(c.row, c.start) for c in work.decode], work.n_rows)
            blocks = ledger.listed({c.row: c.start for c in work.prompts})
            slots = work.spread(found.slots, ledger.extent.n_rows)
            n_blocks = np.asarray(len(blocks), np.int32)
            blocks = pad(blocks, ledger.extent.n_blocks, 0)
            places.append(Places(slots=slots, blocks=blocks, n_blocks=n_blocks, rows=rows))
        if planned.states is None:
            return tuple(places), None
        none = planned.states.after.n_rows + 1
        src, dst = (work.spread(x, none) for x in (planned.states.src, planned.states.dst))
        return tuple(places), StateRows(src=src, dst=dst)

    def wrote(self, work: Work) -> None:
        """The step ran: its tokens are there."""
        assert self._planned is not None, "places come first"
        self._host.append(self._planned, work.pos, work.tokens)
        for c in work.chunks:
            self._held[c.row] = c.end

    @property
    def _n_left(self) -> int:
        """Cells that nobody has and nobody was promised."""
        return self._host.n_free - int((self._capacity - self._held).sum())
