"""Tiers of one pool: blocks offloaded from the device to the host, and from there to a disk.

The host is the only way to and from the device. A stored block is written to the disk as soon as
the host has it. A block that only the disk has gets a place on the host when it is looked up, is
read in the background, and can be loaded when it is there.

Bytes move in two phases, for a device array is dead as soon as the next step is dispatched: the
thread that owns the device gathers blocks into an array of their own, and another thread copies
that one. All decisions are made on the owner's thread, which polls the copies once a step, and
always before an eviction.

Source: vLLM's KV offloading with tiers; sglang-jax's two-phase copies.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvrt.paged.tiers.disk import DiskTier
from kvrt.paged.tiers.host import HostTier
from kvrt.paged.tiers.jobs import Jobs
from kvrt.paged.tiers.policy import Key
from kvrt.paged.tiers.spill import OffloadCounts, OffloadLimits, Spill

# Blocks by id as uint8[n, block_bytes], of the device or of the host; it may be padded.
Gather = Callable[[Sequence[int]], Any]
Scatter = Callable[[Sequence[int], np.ndarray], None]


class TierHits(NamedTuple):
    """Of keys in order, how many can be loaded now, and how many more after those soon."""

    n_ready: int
    n_coming: int


class Tiering:
    """The tiers of one pool.

    Args:
      host: the host tier.
      disk: the disk tier, or None.
      gather: copies blocks of the device into an array of their own.
      scatter: writes blocks to the device; nobody changes the array later.
      limits: how much may be in flight.
      clock: seconds.

    Attributes:
      counts: blocks so far.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None = None,
        *,
        gather: Gather,
        scatter: Scatter,
        limits: OffloadLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts threads, which `close` ends.

        Raises:
          BadConfig: blocks of the tiers differ in size.
        """
        limits = limits or OffloadLimits()
        self.counts = OffloadCounts()
        self._host, self._disk = host, disk
        self._gather, self._scatter = gather, scatter
        self._n_moving, self._n_copying = limits.n_moving, 0
        self._jobs = Jobs(limits.n_workers)
        self._spill = disk and Spill(host, disk, self._jobs, limits, self.counts, clock)
        self._polled = False

    @property
    def is_busy(self) -> bool:
        """Whether a copy is in flight."""
        return len(self._jobs) > 0

    def bytes_used(self) -> dict[str, int]:
        """Bytes that each tier holds."""
        tiers = {"host": self._host} | ({"disk": self._disk} if self._disk else {})
        return {name: tier.index.n_used * tier.block_bytes for name, tier in tiers.items()}

    def new_step(self) -> None:
        """A step begins: notes finished copies, releases fetched blocks that nobody loaded."""
        self._polled = False
        self._poll_once()
        if self._spill:
            self._spill.new_step()

    def has(self, key: Key) -> bool:
        """Whether some tier has a block, or is about to."""
        there = self._host.index.lookup(key)
        return there is not False or (self._disk is not None and self._disk.has(key))

    def find(self, keys: Sequence[Key]) -> TierHits:
        """How many of the first keys can be loaded; starts reading those that the disk has.

        Keys that are coming should be looked up again in a later step. What was read for them
        stays until it is loaded, or for some steps.
        """
        self._poll_once()
        n_ready = n_coming = 0
        wanted: dict[Key, int] = {}
        # Earlier keys are worth more than later ones, which may be evicted for them.
        keep: set[Key] = set()
        for key in keys:
            keep.add(key)
            there = self._lookup(key, keep, wanted)
            if there is False:
                break
            if there and not n_coming:
                n_ready += 1
            else:
                n_coming += 1
        if self._spill:
            self._spill.fetch(wanted)
        return TierHits(n_ready, n_coming)

    def touch(self, keys: Sequence[Key]) -> None:
        """Notes that keys were used, on the device or here."""
        self._host.index.touch(keys)
        if self._disk:
            self._disk.touch(keys)

    def load(self, keys: Sequence[Key], ids: Sequence[int]) -> None:
        """Copies blocks that `find` has just found ready to blocks of the device."""
        if not keys:
            return
        where = self._host.index.prepare_load(keys)
        try:
            self._scatter(ids, self._host.read(where))
        finally:
            self._host.index.complete_load(keys)
        if self._spill:
            self._spill.release(keys)
        self.counts.loaded += len(keys)

    def store(self, keys: Sequence[Key], ids: Sequence[int]) -> int:
        """Offloads blocks of the device that are not here yet, in the background; how many.

        Only the first ones if not all may be in flight at once; none where there is no room.
        """
        self._poll_once()
        index = self._host.index
        new = index.wanted(keys)
        some = new[: self._n_moving - self._n_copying]
        places = index.reserve(some, keep=set(keys))
        if not some or places is None:
            self.counts.refused += len(new)
            return 0
        self.counts.refused += len(new) - len(some)
        where = dict(zip(keys, ids, strict=True))
        try:
            blocks = self._gather([where[key] for key in some])
        except BaseException:
            index.complete_store(some, success=False)
            raise
        self._n_copying += len(some)
        self._jobs.start(
            lambda: self._host.write(places.ids, blocks), lambda ok: self._copied(some, ok)
        )
        return len(some)

    def wait(self, timeout_s: float) -> None:
        """Waits until a copy in flight ends, or for so long."""
        self._jobs.wait(timeout_s)

    def flush(self) -> None:
        """Waits until no copy is in flight."""
        while self.is_busy:
            self._jobs.wait(None, for_all=True)
            self._jobs.poll()

    def close(self) -> None:
        """Waits until no copy is in flight and ends the threads; the disk's blocks stay."""
        try:
            self.flush()
        finally:
            self._jobs.close()
            if self._disk:
                self._disk.close()

    def _lookup(self, key: Key, keep: set[Key], wanted: dict[Key, int]) -> bool | None:
        """Whether a key can be loaded; None if it should be looked up again."""
        there = self._host.index.lookup(key)
        if self._spill is None or there:
            return there
        if there is None:
            return False if self._spill.is_late(key) else None
        return self._spill.reserve(key, keep, wanted)

    def _copied(self, keys: Sequence[Key], ok: bool | None) -> None:
        self._n_copying -= len(keys)
        self._host.index.complete_store(keys, bool(ok))
        if not ok:
            self.counts.failed += len(keys)
            return
        self.counts.stored += len(keys)
        if self._spill:
            self._spill.cascade(keys)

    def _poll_once(self) -> None:
        if not self._polled:
            self._polled = True
            self._jobs.poll()
