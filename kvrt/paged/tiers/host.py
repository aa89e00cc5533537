"""The host tier: blocks in the memory of the host."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvrt.paged.tiers.index import TierIndex


class HostTier:
    """Blocks as bytes, all layers of a block one after the other.

    Args:
      index: which blocks are there.
      block_bytes: of each block.

    Attributes:
      data: uint8[n_blocks, block_bytes], taken from the system once; pages count when they are
        first written.
    """

    def __init__(self, index: TierIndex, block_bytes: int) -> None:
        """Starts with room for the blocks of an index."""
        self.index, self.block_bytes = index, block_bytes
        self.data = np.zeros((index.n_blocks, block_bytes), np.uint8)

    def write(self, ids: Sequence[int], blocks: Any) -> bool:
        """Copies blocks to their places; for any thread, while their keys are coming.

        Args:
          ids: the places.
          blocks: uint8[n, block_bytes] of the device or the host, n at least as many.
        """
        host = np.asarray(blocks)  # sync: waits for the device, where they come from one
        assert host.dtype == np.uint8 and host.shape[1:] == self.data.shape[1:], host.shape
        self.data[list(ids)] = host[: len(ids)]
        return True

    def views(self, ids: Sequence[int]) -> list[np.ndarray]:
        """Blocks where they are, uint8[block_bytes] each."""
        return [self.data[i] for i in ids]

    def read(self, ids: Sequence[int]) -> np.ndarray:
        """A copy of blocks, uint8[n, block_bytes]."""
        return self.data[list(ids)]
