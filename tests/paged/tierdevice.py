"""A device whose blocks are overwritten as soon as they were gathered, and tiers under it."""

import threading

import numpy as np

from kvrt.paged.tiers.block_file import BlockFile
from kvrt.paged.tiers.disk import DiskTier
from kvrt.paged.tiers.host import HostTier
from kvrt.paged.tiers.index import TierIndex
from kvrt.paged.tiers.spill import OffloadLimits
from kvrt.paged.tiers.tiering import TierHits, Tiering

N_BYTES = 3000


def content(key: int) -> np.ndarray:
    return np.random.default_rng(key).integers(0, 256, N_BYTES).astype(np.uint8)


class Device:
    """Blocks of a pool, and the tiers under it; block i may hold anything."""

    def __init__(self, tmp_path, n_host=8, n_disk=0, *, policy="lru", **limits):
        self.blocks = np.zeros((64, N_BYTES), np.uint8)
        self.gate = threading.Event()  # closed: copies wait, as if the device were slow
        self.gate.set()
        self.now = 0.0
        self.disk = n_disk and DiskTier(
            BlockFile(tmp_path / "t.kvt", N_BYTES, n_disk, b"m"),
            name=lambda key: b"key %d" % key,
        )
        self.host = HostTier(TierIndex(n_host, policy=policy), N_BYTES)
        self.tiers = Tiering(
            self.host,
            self.disk or None,
            gather=self.gather,
            scatter=self.scatter,
            limits=OffloadLimits(**limits),
            clock=lambda: self.now,
        )

    def gather(self, ids):
        return Slow(self.gate, self.blocks[ids].copy())

    def scatter(self, ids, array):
        assert array.dtype == np.uint8
        self.blocks[ids] = array

    def store(self, *keys) -> int:
        """Stores keys from blocks that are overwritten at once, as those of a device are."""
        ids = list(range(len(keys)))
        self.blocks[ids] = [content(k) for k in keys]
        n = self.tiers.store(keys, ids)
        self.blocks[ids] = 0
        return n

    def empty_host(self) -> None:
        """Drops all that the host has; the disk keeps it."""
        self.host.index.drop(range(100))
        assert not self.host.index.n_used

    def settle(self) -> None:
        self.tiers.flush()
        self.tiers.new_step()

    def load(self, *keys) -> None:
        """Loads keys and compares them."""
        ids = list(range(30, 30 + len(keys)))
        self.tiers.load(keys, ids)
        for i, key in zip(ids, keys, strict=True):
            assert np.array_equal(self.blocks[i], content(key)), key

    def find(self, *keys) -> TierHits:
        self.tiers.new_step()
        return self.tiers.find(keys)


class Slow:
    """An array of the device that is ready when a gate opens; one row more than was asked for."""

    def __init__(self, gate, array):
        self._gate, self._array = gate, array

    def __array__(self, dtype=None, copy=None):
        self._gate.wait(10)
        return np.concatenate([self._array, np.full((1, N_BYTES), 77, np.uint8)])
