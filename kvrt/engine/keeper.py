"""What happens between steps: room is made, positions move, rows are packed and turned."""

from collections.abc import Callable, Sequence

import numpy as np

from kvrt import cells as meaning
from kvrt.config import CacheConfig, GroupSpec
from kvrt.engine import checks
from kvrt.engine.device import Device
from kvrt.engine.extender import Extender
from kvrt.engine.ledger import LastLogits, Ledger
from kvrt.engine.stats import Counts, DropEvent
from kvrt.policies import Policy, plan_room
from kvrt.upkeep.defrag import plan_defrag, should_defrag


class Keeper:
    """Keeps host cells and device rows in step; each change is planned before anything moves."""

    def __init__(
        self,
        host: Ledger,
        device: Device,
        config: CacheConfig,
        groups: Sequence[GroupSpec],
        policy: Policy | None,
    ):
        """Takes the runtime's two sides.

        Raises:
          BadConfig: what makes room, or what extends, does not fit the cache or the model.
        """
        if policy:
            checks.keeps(policy.n_keep, config.n_ctx)
        if config.self_extend:
            checks.extends(config.self_extend, groups, shifts=policy is not None)
        self._host, self._device, self._config = host, device, config
        self.policy = policy
        self.extender = Extender(config.self_extend)
        self.logits = LastLogits()
        self.counts = Counts()

    @property
    def n_free(self) -> int:
        """Empty cells."""
        return self._config.n_ctx - self._host.n_used

    def n_fit(self, seq_id: int) -> int:
        """Tokens that a sequence may take in before something has to go."""
        if self.policy is None:
            return self.n_free
        return self.policy.n_fit(self.n_free, self._host.pos_max(seq_id) + 1)

    def n_part(self, seq_id: int, n: int) -> int:
        """Tokens of n to make room for at once: all, or a step's if more than can stay come in.

        Raises:
          CacheFull: cells that others own as well could get in the way of a part.
        """
        if self.policy is None:
            return n
        n_keep, cells = self.policy.n_keep, self._host.cells
        own = int(np.count_nonzero(meaning.owned(cells, seq_id)))
        n_most = self.policy.n_fit(self.n_free + own - n_keep, n_keep)
        if n <= max(n_most, self.n_fit(seq_id)) or n_most < 1:
            return n
        if meaning.n_shared(cells, seq_id, 0):
            self.need(n, self.n_free)
        return min(n_most, self._config.n_ubatch)

    def make_room(self, seq_id: int, n: int) -> None:
        """See `Runtime.make_room`."""
        meaning.check_seq_id(seq_id, self._config.n_seq_max)
        checks.end(self._host.pos_max(seq_id) + 1 + n)
        room = None
        if self.policy and self.n_fit(seq_id) < n:
            room = plan_room(self._host.cells, self._host.head, seq_id, n, self.policy)
        n_cells = n + self.extender.n_copies(self._host.cells, seq_id, n)
        self.need(n_cells, int(meaning.n_free(room.cells)) if room else self.n_free)
        if room is None or not room.drops:
            return
        for rows_moved in room.copies:
            self._device.copy_rows(*rows_moved)
        self._host.set(room.cells, room.head)
        self.counts.drops += [
            DropEvent(seq_id=seq_id, n_past=n_past, n_dropped=drop.n) for drop, n_past in room.drops
        ]

    def defrag(self, *, by_sequence: bool = False) -> int:
        """See `Runtime.defrag`."""
        cells, plan = plan_defrag(self._host.cells, by_sequence=by_sequence)
        for moves in plan.rounds:
            self._device.copy_rows(moves[:, 0], moves[:, 1])
        self._host.set(cells, int(meaning.n_used(cells)))
        self.counts.n_defrag += plan.n_moves > 0
        return plan.n_moves

    def flush(self) -> None:
        """See `Runtime.flush`."""
        if self._host.stale and should_defrag(self._host.cells, self._config.defrag_threshold):
            self.defrag()
        if self._host.stale:
            self._device.upload(self._host.cells)
            self._host.stale = False
        if self._host.pending:
            self._device.shift()
            self._host.settle()
            self.counts.n_kshift += 1

    def move(
        self,
        seq_id: int,
        p0: int,
        p1: int | None,
        needed: bool,
        move: Callable[[meaning.Cells], meaning.Cells],
        head: Callable[[meaning.Cells, meaning.Cells], meaning.Scalar] | None = None,
    ) -> None:
        """A change of positions; cells that seq_id shares are copied first."""
        meaning.check_seq_id(seq_id, self._config.n_seq_max)
        if not needed:
            move(self._host.cells)  # what is wrong with it is said all the same
            return
        split, *rows_moved = meaning.plan_split(self._host.cells, seq_id, p0, p1, self._host.head)
        new = move(split)
        self._device.copy_rows(*rows_moved)
        self.logits.forget(seq_id)
        self._host.set(new, head(split, new) if head else self._host.head)

    def extend(self, seq_id: int) -> None:
        """The rounds of SelfExtend that are due before the next step."""
        plan = self.extender.plan(self._host.cells, self._host.head, seq_id)
        if plan is not None:
            self._device.copy_rows(*plan.copies)
            self._host.set(plan.cells, self._host.head)
            self.extender.took(seq_id, plan)
            self.counts.n_extend += plan.n_rounds

    def need(self, n: int, n_free: int) -> None:
        """Refuses n cells where only n_free are empty; raises CacheFull."""
        checks.fits(n, n_free, self._config.n_ctx, shifts=self.policy is not None)
