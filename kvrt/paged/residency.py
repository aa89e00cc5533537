"""How long cached blocks live, how long they are idle before eviction, how soon they are reused.

One of n_every blocks is followed from when it can be found, so that millions cost little. A short
lifetime says that the cache is too small, a long idle time that it keeps what nobody wants, and
reuse gaps say how large it would have to be for the hits that there are.

Source: vLLM's KV cache residency metrics.
"""

import bisect
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from kvrt.errors import BadConfig
from kvrt.paged.hashing import Chain
from kvrt.paged.hits import Hit
from kvrt.paged.layout.spec import NULL
from kvrt.paged.pool import BlockRemoved, BlockStored, Event

BOUNDS_S = (0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0)


class Histogram:
    """Counts of values by bounds, each value in the first bucket whose bound it does not exceed.

    Args:
      bounds: in order; what is beyond the last one is counted as well.
    """

    def __init__(self, bounds: Iterable[float] = BOUNDS_S) -> None:
        """Starts empty."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = self._max = 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value
        self._max = max(self._max, value)

    def report(self) -> dict[str, Any]:
        """Count, sum and greatest of all values, and how many do not exceed each bound."""
        n, buckets = 0, {}
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            n += count
            buckets[bound] = n
        return {"count": n, "sum": self._sum, "max": self._max, "buckets": buckets}


class Residency:
    """Follows a sample of blocks by their keys.

    Args:
      n_every: one of so many new blocks is followed.
      n_max: blocks that are followed at once.
      clock: seconds.
    """

    def __init__(
        self,
        n_every: int = 16,
        n_max: int = 65_536,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Follows no block yet.

        Raises:
          BadConfig: a count is below 1.
        """
        if n_every < 1 or n_max < 1:
            raise BadConfig(f"n_every {n_every} and n_max {n_max}; both must be at least 1")
        self._n_every, self._n_max, self._clock = n_every, n_max, clock
        self._n_born = 0
        self._born: dict[Hashable, float] = {}
        self._used: dict[Hashable, float] = {}
        self._lifetime, self._idle, self._gap = Histogram(), Histogram(), Histogram()

    def follow(self, events: Iterable[Event]) -> None:
        """What happened to the blocks of a pool, in order."""
        for event in events:
            if isinstance(event, BlockStored):
                self.born((event.group, digest) for digest in event.hashes)
            elif isinstance(event, BlockRemoved):
                self.gone([(event.group, event.hash)])

    def hit(self, chain: Chain, hit: Hit, block_sizes: Sequence[int]) -> None:
        """A request begins with a hit of its tokens; block sizes are by group."""
        for g, (blocks, size) in enumerate(zip(hit.blocks, block_sizes, strict=True)):
            entries = chain.entries(size // chain.block_size)
            # A block that a hit ends within is one of its own for what was found before it.
            whole = zip(entries, blocks, strict=False)
            self.used((g, entry.digest) for entry, block in whole if block != NULL)

    def born(self, keys: Iterable[Hashable]) -> None:
        """Blocks can be found from now on."""
        for key in keys:
            self._n_born += 1
            chosen = (self._n_born - 1) % self._n_every == 0
            if chosen and key not in self._born and len(self._born) < self._n_max:
                self._born[key] = self._used[key] = self._clock()

    def used(self, keys: Iterable[Hashable]) -> None:
        """Blocks were found again."""
        for key in keys:
            if key in self._used:
                now = self._clock()
                self._gap.add(now - self._used[key])
                self._used[key] = now

    def gone(self, keys: Iterable[Hashable]) -> None:
        """Blocks cannot be found any longer."""
        for key in keys:
            if key in self._born:
                now = self._clock()
                self._lifetime.add(now - self._born.pop(key))
                self._idle.add(now - self._used.pop(key))

    def report(self) -> dict[str, Any]:
        """Histograms in seconds."""
        return {
            "lifetime": self._lifetime.report(),
            "idle": self._idle.report(),
            "reuse_gap": self._gap.report(),
        }
