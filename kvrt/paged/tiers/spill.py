"""Between host and disk: blocks are spilled when the host has them, fetched when they are wanted.

A fetched block stays on the host until it is loaded, or for a few steps: else two requests that
fetch alternately could evict each other's blocks for ever.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

from kvrt.errors import BadConfig
from kvrt.paged.tiers.disk import DiskTier
from kvrt.paged.tiers.host import HostTier
from kvrt.paged.tiers.jobs import Jobs
from kvrt.paged.tiers.policy import Key


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadLimits:
    """How much may be in flight.

    Attributes:
      n_workers: threads that copy.
      n_moving: blocks that are copied from the device, and as many written to the disk, at once.
      n_loading: blocks that are read from the disk at once.
      n_batch: blocks a job of the disk.
      n_held: steps that a fetched block stays for the request that asked for it.
      wait_s: seconds after which a block that is still being read counts as absent.
    """

    n_workers: int = 2
    n_moving: int = 256
    n_loading: int = 256
    n_batch: int = 16
    n_held: int = 16
    wait_s: float = 10.0

    def __post_init__(self) -> None:
        """Refuses limits below 1."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (value >= 1 or (field.name == "wait_s" and value > 0)):
                raise BadConfig(f"{field.name} is {value}; it must be at least 1")


@dataclasses.dataclass
class OffloadCounts:
    """Counts of blocks by what became of them.

    Attributes:
      stored: copied from the device to the host.
      loaded: copied from the host to the device.
      refused: not stored, for there was no room or too much was in flight.
      failed: not stored, for the copy from the device failed.
      written: to the disk.
      unwritten: not written, for there was no room, too much was in flight, or the system refused.
      fetched: from the disk to the host.
      damaged: found not to be as they were written, and dropped.
    """

    stored: int = 0
    loaded: int = 0
    refused: int = 0
    failed: int = 0
    written: int = 0
    unwritten: int = 0
    fetched: int = 0
    damaged: int = 0


class Spill:
    """Moves blocks between one host tier and one disk tier.

    Args:
      host: above.
      disk: below.
      jobs: other threads.
      limits: how much may be in flight.
      counts: what to count in.
      clock: seconds.
    """

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier,
        jobs: Jobs,
        limits: OffloadLimits,
        counts: OffloadCounts,
        clock: Callable[[], float],
    ) -> None:
        """Starts with nothing in flight.

        Raises:
          BadConfig: blocks of the tiers differ in size.
        """
        if disk.block_bytes != host.block_bytes:
            raise BadConfig(
                f"blocks of {host.block_bytes} bytes on the host and of {disk.block_bytes} on the "
                "disk; they must be equal"
            )
        self._host, self._disk, self._jobs = host, disk, jobs
        self._limits, self._counts, self._clock = limits, counts, clock
        self._n_writing = 0
        self._reading: dict[Key, float] = {}  # since when
        self._held: dict[Key, int] = {}  # until which step
        self._step = 0

    def new_step(self) -> None:
        """A step begins: fetched blocks that nobody loaded in time are released."""
        self._step += 1
        self.release(key for key, last in self._held.items() if last < self._step)

    def is_late(self, key: Key) -> bool:
        """Whether a key has been read for longer than anybody should wait."""
        since = self._reading.get(key)
        return since is not None and self._clock() - since > self._limits.wait_s

    def reserve(self, key: Key, keep: Collection[Key], wanted: dict[Key, int]) -> bool | None:
        """Looks up a key that the host lacks: False or, if the disk has it, None.

        It gets a place on the host, which is added to `wanted`, unless enough is being fetched.
        """
        if not self._disk.has(key):
            return False
        if len(self._reading) + len(wanted) >= self._limits.n_loading:
            return None
        places = self._host.index.reserve([key], keep)
        if places is None:
            return False
        wanted[key] = places.ids[0]
        return None

    def fetch(self, wanted: dict[Key, int]) -> None:
        """Fetches keys to their places on the host, in the background."""
        now = self._clock()
        for keys in _batches(list(wanted), self._limits.n_batch):
            self._reading.update((key, now) for key in keys)
            places = self._disk.prepare_read(keys)
            blocks = self._host.views([wanted[key] for key in keys])
            self._jobs.start(
                lambda places=places, blocks=blocks: self._disk.read(places, blocks),
                lambda oks, keys=keys: self._fetched(keys, oks),
            )

    def cascade(self, keys: Sequence[Key]) -> None:
        """Spills blocks that the host has to the disk, in the background."""
        n_max = self._limits.n_moving - self._n_writing
        places, n_left = self._disk.prepare_write(keys, n_max)
        self._counts.unwritten += n_left
        for part in _batches(list(places), self._limits.n_batch):
            blocks = self._host.views(self._host.index.prepare_load(part))
            self._n_writing += len(part)
            self._jobs.start(
                lambda to=[places[k] for k in part], blocks=blocks: self._disk.write(to, blocks),
                lambda oks, part=part: self._written(part, oks),
            )

    def release(self, keys: Iterable[Key]) -> None:
        """Keys that were kept for a request may be evicted."""
        for key in list(keys):
            if self._held.pop(key, None) is not None:
                self._host.index.complete_load([key])

    def _fetched(self, keys: Sequence[Key], oks: Sequence[bool] | None) -> None:
        oks = oks or [False] * len(keys)
        self._disk.complete_read(keys, oks)
        for key, ok in zip(keys, oks, strict=True):
            del self._reading[key]
            self._host.index.complete_store([key], ok)
            if ok:
                self._host.index.prepare_load([key])
                self._held[key] = self._step + self._limits.n_held
        self._counts.fetched += sum(oks)
        self._counts.damaged += len(oks) - sum(oks)

    def _written(self, keys: Sequence[Key], oks: Sequence[bool] | None) -> None:
        oks = oks or [False] * len(keys)
        self._n_writing -= len(keys)
        self._host.index.complete_load(keys)
        self._disk.complete_write(keys, oks)
        self._counts.written += sum(oks)
        self._counts.unwritten += len(oks) - sum(oks)


def _batches(keys: list[Key], n: int) -> list[list[Key]]:
    return [keys[i : i + n] for i in range(0, len(keys), n)]
