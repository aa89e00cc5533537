"""What a tier knows of a block, and the protocol of eviction policies."""

from collections.abc import Collection, Hashable, Sequence
from typing import Protocol, runtime_checkable

Key = Hashable

_COMING = -1


class TierBlock:
    """A block of a tier.

    Attributes:
      id: where its bytes lie.
      n_readers: loads that are reading it; -1 while its bytes are still coming.
    """

    __slots__ = ("id", "n_readers")

    def __init__(self, block_id: int) -> None:
        """A block whose bytes are on their way."""
        self.id = block_id
        self.n_readers = _COMING

    @property
    def is_ready(self) -> bool:
        """Whether its bytes are there."""
        return self.n_readers != _COMING

    @property
    def is_idle(self) -> bool:
        """Whether it may be evicted."""
        return self.n_readers == 0


Victims = list[tuple[Key, TierBlock]]


@runtime_checkable
class EvictionPolicy(Protocol):
    """Blocks by key, and the order in which idle ones are evicted."""

    def __len__(self) -> int:
        """Blocks that are there or coming."""
        ...

    def get(self, key: Key) -> TierBlock | None:
        """The block of a key."""
        ...

    def insert(self, key: Key, block: TierBlock) -> None:
        """Adds a block; its key must not be there."""
        ...

    def remove(self, key: Key) -> TierBlock:
        """Takes a block out, as if it had never been there."""
        ...

    def touch(self, keys: Sequence[Key]) -> None:
        """Notes that keys were used, the first of them last; keys need not be there."""
        ...

    def evict(self, n: int, keep: Collection[Key]) -> Victims | None:
        """Takes n idle blocks out, none of `keep`; None, and no change, if there are fewer."""
        ...
