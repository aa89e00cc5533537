"""Copies of blocks that run before the next step, and what must not be touched until they ran.

A hit that ends within a block is read in a copy of it, since the request writes on there; a
state that others can find is a copy as well, since its owner overwrites it with the next token.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvrt.paged.pool import BlockPool


class BlockCopy(NamedTuple):
    """All cells of block src of a group's pool are copied to block dst."""

    group: int
    src: int
    dst: int


class _Pending(NamedTuple):
    pool: int
    copy: BlockCopy


class Copies:
    """What is to be copied, and which blocks were written in this step.

    Both ends of a copy are referenced until the step that it ran before is over.
    """

    def __init__(self, pools: Sequence[BlockPool]):
        """Nothing is to be copied."""
        self._pools = pools
        self._queued: list[_Pending] = []
        self._taken: list[_Pending] = []
        self._fresh: set[tuple[int, int]] = set()

    def add(self, pool: int, copy: BlockCopy) -> None:
        """Queues a copy; the caller has added a reference to both ends."""
        self._queued.append(_Pending(pool, copy))

    def source(self, pool: int, block_id: int) -> int:
        """Where the contents of a block are now: in another one if they are yet to be copied."""
        for p, copy in self._queued:
            if (p, copy.dst) == (pool, block_id):
                return copy.src
        return block_id

    def written(self, pool: int, block_id: int) -> None:
        """Notes that this step writes a block."""
        self._fresh.add((pool, block_id))

    def is_fresh(self, pool: int, block_id: int) -> bool:
        """Whether a block is not to be read before the next step."""
        return (pool, block_id) in self._fresh

    def take(self) -> list[BlockCopy]:
        """All that is to be copied before the next step; no block is written by two of them."""
        out = [copy for _, copy in self._queued]
        self._taken += self._queued
        self._queued = []
        return out

    def new_step(self) -> None:
        """Releases the ends of copies that have run; the others are not to be read yet."""
        for pool, copy in self._taken:
            self._pools[pool].free((copy.dst, copy.src))
        self._taken = []
        self._fresh = {(pool, copy.dst) for pool, copy in self._queued}

    def held(self, pool: int) -> list[int]:
        """Blocks of a pool that copies reference, once for each."""
        pending = self._queued + self._taken
        return [block for p, copy in pending if p == pool for block in (copy.src, copy.dst)]
