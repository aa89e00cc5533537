"""LRU: the least recently used block is evicted first."""

import itertools
from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvrt.paged.tiers.policy import Key, TierBlock, Victims


class Lru:
    """Blocks in the order of their last use."""

    def __init__(self) -> None:
        """Starts empty."""
        self._blocks: OrderedDict[Key, TierBlock] = OrderedDict()

    def __len__(self) -> int:
        """Blocks that are there or coming."""
        return len(self._blocks)

    def get(self, key: Key) -> TierBlock | None:
        """The block of a key."""
        return self._blocks.get(key)

    def insert(self, key: Key, block: TierBlock) -> None:
        """Adds a block as the most recent one."""
        self._blocks[key] = block

    def remove(self, key: Key) -> TierBlock:
        """Takes a block out."""
        return self._blocks.pop(key)

    def touch(self, keys: Sequence[Key]) -> None:
        """Makes keys the most recent ones, the first of them the most recent."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def evict(self, n: int, keep: Collection[Key]) -> Victims | None:
        """Evicts the n least recently used idle blocks; all or none."""
        idle = ((k, h) for k, h in self._blocks.items() if h.is_idle and k not in keep)
        victims = list(itertools.islice(idle, n))
        if len(victims) < n:
            return None
        for key, _ in victims:
            del self._blocks[key]
        return victims
