"""The disk tier: blocks in a file."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvrt.paged.tiers.block_file import BlockFile
from kvrt.paged.tiers.index import PolicyName, TierIndex
from kvrt.paged.tiers.policy import Key


def block_name(key: tuple[int, tuple[bytes, ...]]) -> bytes:
    """A group and the prefix hash of one of its blocks, as bytes that no other key has."""
    group, parts = key
    return group.to_bytes(4, "big") + b"".join(len(p).to_bytes(4, "big") + p for p in parts)


class FileSlot(NamedTuple):
    """The slot of a block in a file, and the name it must have there."""

    slot: int
    name: bytes


class DiskTier:
    """Blocks in a file, which are there again when it is opened the next time.

    Keys go by their names here: a block is what its name says, in every process.

    Args:
      file: opened; `close` closes it. Keys whose names are longer than its `n_name` are not stored.
      name: a key as bytes that no other key has; `block_name` where keys are groups and tuples.
      policy: which block is evicted first.
    """

    def __init__(
        self, file: BlockFile, *, name: Callable[[Any], bytes], policy: PolicyName = "lru"
    ) -> None:
        """Takes over the blocks of the file."""
        self.index = TierIndex(file.n_slots, policy=policy)
        self.block_bytes = file.block_bytes
        self._name, self._file = name, file
        found: dict[Key, int] = {}
        for slot, block in self._file.names():
            found.setdefault(block, slot)
        self.index.adopt(found)

    def has(self, key: Key) -> bool:
        """Whether a key can be read."""
        return bool(self.index.lookup(self._name(key)))

    def touch(self, keys: Sequence[Key]) -> None:
        """Notes that keys were of use."""
        self.index.touch(self._names(keys))

    def prepare_write(self, keys: Sequence[Key], n_max: int) -> tuple[dict[Key, FileSlot], int]:
        """Reserves slots for keys that are not here, n_max at most; and how many more need one."""
        named = {self._name(key): key for key in keys}
        wanted: list[bytes] = [n for n in named if self.index.lookup(n) is False]
        some = [name for name in wanted if 0 < len(name) <= self._file.n_name][: max(n_max, 0)]
        reserved = self.index.reserve(some, keep=named.keys())
        slots = () if reserved is None else reserved.ids
        given = {named[n]: FileSlot(i, n) for n, i in zip(some, slots, strict=False)}
        return given, len(wanted) - len(given)

    def write(self, places: Sequence[FileSlot], blocks: Sequence[np.ndarray]) -> list[bool]:
        """Which blocks could be written; for any thread, after prepare_write."""
        return [
            self._file.write(p.slot, p.name, block) for p, block in zip(places, blocks, strict=True)
        ]

    def complete_write(self, keys: Sequence[Key], oks: Sequence[bool]) -> None:
        """Blocks were written, or could not be."""
        for name, ok in zip(self._names(keys), oks, strict=True):
            self.index.complete_store([name], ok)

    def prepare_read(self, keys: Sequence[Key]) -> list[FileSlot]:
        """Where keys are, which stay there until `complete_read`."""
        names = self._names(keys)
        slots = self.index.prepare_load(names)
        self.index.touch(names)
        return [FileSlot(slot, name) for slot, name in zip(slots, names, strict=True)]

    def read(self, places: Sequence[FileSlot], blocks: Sequence[np.ndarray]) -> list[bool]:
        """Which blocks are sound and now in `blocks`; for any thread, after prepare_read."""
        return [
            self._file.read(p.slot, p.name, block) for p, block in zip(places, blocks, strict=True)
        ]

    def complete_read(self, keys: Sequence[Key], oks: Sequence[bool]) -> None:
        """Blocks were read; those that were not sound are forgotten."""
        names = self._names(keys)
        self.index.complete_load(names)
        self.index.drop(name for name, ok in zip(names, oks, strict=True) if not ok)

    def close(self) -> None:
        """Closes the file; no job may be using it."""
        self._file.close()

    def _names(self, keys: Sequence[Key]) -> list[bytes]:
        return [self._name(key) for key in keys]
