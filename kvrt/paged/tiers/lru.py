"""Least recently used goes first."""

import itertools
from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvrt.paged.tiers.policy import Held, Key, Victims


class Lru:
    """Blocks in the order of their last use."""

    def __init__(self) -> None:
        """Starts empty."""
        self._blocks: OrderedDict[Key, Held] = OrderedDict()

    def __len__(self) -> int:
        """Blocks that are there or coming."""
        return len(self._blocks)

    def get(self, key: Key) -> Held | None:
        """The block of a key."""
        return self._blocks.get(key)

    def insert(self, key: Key, held: Held) -> None:
        """Adds a block as the most recent one."""
        self._blocks[key] = held

    def remove(self, key: Key) -> Held:
        """Takes a block out."""
        return self._blocks.pop(key)

    def touch(self, keys: Sequence[Key]) -> None:
        """Makes keys the most recent ones, the first of them the very most."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def evict(self, n: int, keep: Collection[Key]) -> Victims | None:
        """Takes out the n idle blocks whose last use is longest ago; all or none."""
        idle = ((k, h) for k, h in self._blocks.items() if h.is_idle and k not in keep)
        victims = list(itertools.islice(idle, n))
        if len(victims) < n:
            return None
        for key, _ in victims:
            del self._blocks[key]
        return victims

    def clear(self) -> None:
        """Forgets everything."""
        self._blocks.clear()


class Counter:
    """How often keys were looked up; of the n_max keys that were looked up last.

    Args:
      n_max: keys that are remembered.
    """

    def __init__(self, n_max: int) -> None:
        """Starts empty."""
        self._n_max = n_max
        self._counts: OrderedDict[Key, int] = OrderedDict()

    def add(self, key: Key) -> None:
        """Counts one lookup; the key whose last one is longest ago may be forgotten for it."""
        self._counts[key] = self._counts.get(key, 0) + 1
        self._counts.move_to_end(key)
        if len(self._counts) > self._n_max:
            self._counts.popitem(last=False)

    def count(self, key: Key) -> int:
        """Lookups of a key that are remembered."""
        return self._counts.get(key, 0)
