"""Context checkpoints in blocks: where they are kept, and how many there are.

A checkpoint is what a hit needs at its end of windows and states: blocks that can be found by their
hashes, in pools that have room for them (`kvrt.paged.layout.checkpoints`).
"""

import math
from collections.abc import Iterable, Sequence

from kvrt.errors import BadConfig
from kvrt.options.cache import CacheConfig
from kvrt.paged.layout.checkpoints import keeps_checkpoints
from kvrt.paged.layout.spec import PagedGroup, PagedPlan
from kvrt.paged.pool import BlockRemoved, BlockStored, Event
from kvrt.serving.metrics import CheckpointUse


class PoolCheckpoints:
    """Counts blocks of windows and states that can be found."""

    def __init__(self, plan: PagedPlan):
        """None can be."""
        # By group, the bytes of a block; of those alone that a hit needs at its end.
        self._bytes = {
            i: plan.pools[g.pool].block_bytes
            for i, g in enumerate(plan.groups)
            if keeps_checkpoints(g)
        }
        self._n = dict.fromkeys(self._bytes, 0)
        self._n_evicted = 0

    @property
    def use(self) -> CheckpointUse:
        """Blocks of all groups, as of the last step."""
        n_bytes = sum(n * self._bytes[i] for i, n in self._n.items())
        return CheckpointUse(n=sum(self._n.values()), n_bytes=n_bytes, n_evicted=self._n_evicted)

    def follow(self, events: Iterable[Event]) -> None:
        """Takes in what became of blocks."""
        for event in events:
            if event.group in self._n and isinstance(event, BlockStored):
                self._n[event.group] += len(event.hashes)
            elif event.group in self._n and isinstance(event, BlockRemoved):
                self._n[event.group] -= 1
                self._n_evicted += 1


def interval(
    groups: Sequence[PagedGroup], config: CacheConfig, *, in_cells: bool = False
) -> int | None:
    """Tokens between checkpoints; None keeps what any hit needs, as long as it lasts.

    Raises:
      BadConfig: it is no multiple of what hits are, which end at any token in cells.
    """
    if not (config.n_checkpoints and any(map(keeps_checkpoints, groups))):
        return None
    found, size = config.checkpoint_interval, math.lcm(*(g.block_size for g in groups))
    if in_cells:
        return config.n_ubatch if found is None else found
    if found and found % size:
        raise BadConfig(
            f"checkpoint_interval is {found} tokens, and hits end with blocks of {size}; it must "
            "be a multiple of that, or 0 for the ends of prompts alone"
        )
    return found
