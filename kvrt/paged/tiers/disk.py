"""Blocks on a disk."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvrt.paged.tiers.block_file import BlockFile
from kvrt.paged.tiers.index import PolicyName, TierIndex
from kvrt.paged.tiers.policy import Key


def block_name(key: tuple[int, tuple[bytes, ...]]) -> bytes:
    """A group and all that says what one of its blocks holds, as bytes that nothing else gives."""
    group, parts = key
    return group.to_bytes(4, "big") + b"".join(len(p).to_bytes(4, "big") + p for p in parts)


class Place(NamedTuple):
    """Where a block lies, and what the file has to say it is."""

    slot: int
    name: bytes


class DiskTier:
    """Blocks in a file, which are there again when it is opened the next time.

    Keys go by their names here: a block is what its name says, in every process.

    Args:
      path: the file.
      n_blocks: that it may hold.
      block_bytes: of each block.
      fingerprint: of what the blocks belong to.
      name: a key as bytes that no other key has; `block_name` where keys are groups and tuples.
      policy: which block goes first.
      n_name: bytes of a name; keys with longer ones are not stored. The tokens of a block take 4
        each.
    """

    def __init__(
        self,
        path: Path,
        n_blocks: int,
        block_bytes: int,
        *,
        fingerprint: bytes,
        name: Callable[[Any], bytes],
        policy: PolicyName = "lru",
        n_name: int = 1024,
    ) -> None:
        """Opens the file and takes over what it holds.

        Raises:
          BadConfig: the file is another one's, in use, or cannot be opened.
        """
        self.index = TierIndex(n_blocks, policy=policy)
        self.block_bytes = block_bytes
        self._name = name
        self._file = BlockFile(path, block_bytes, n_blocks, fingerprint, n_name=n_name)
        found: dict[Key, int] = {}
        for slot, held in self._file.names():
            found.setdefault(held, slot)
        self.index.adopt(found)

    def has(self, key: Key) -> bool:
        """Whether a key can be read."""
        return bool(self.index.lookup(self._name(key)))

    def touch(self, keys: Sequence[Key]) -> None:
        """Notes that keys were of use."""
        self.index.touch(self._names(keys))

    def prepare_write(self, keys: Sequence[Key], n_max: int) -> tuple[dict[Key, Place], int]:
        """Gives places to keys that are not here, n_max at most; and how many more want one."""
        named = {self._name(key): key for key in keys}
        wanted: list[bytes] = [n for n in named if self.index.lookup(n) is False]
        some = [name for name in wanted if 0 < len(name) <= self._file.n_name][: max(n_max, 0)]
        places = self.index.reserve(some, keep=named.keys())
        slots = () if places is None else places.ids
        given = {named[n]: Place(i, n) for n, i in zip(some, slots, strict=False)}
        return given, len(wanted) - len(given)

    def write(self, places: Sequence[Place], rows: Sequence[np.ndarray]) -> list[bool]:
        """Which blocks could be written; for any thread, after prepare_write."""
        return [self._file.write(p.slot, p.name, row) for p, row in zip(places, rows, strict=True)]

    def complete_write(self, keys: Sequence[Key], oks: Sequence[bool]) -> None:
        """Blocks were written, or could not be."""
        for name, ok in zip(self._names(keys), oks, strict=True):
            self.index.complete_store([name], ok)

    def prepare_read(self, keys: Sequence[Key]) -> list[Place]:
        """Where keys are, which stay there until `complete_read`."""
        names = self._names(keys)
        slots = self.index.prepare_load(names)
        self.index.touch(names)
        return [Place(slot, name) for slot, name in zip(slots, names, strict=True)]

    def read(self, places: Sequence[Place], rows: Sequence[np.ndarray]) -> list[bool]:
        """Which blocks are sound and now in `rows`; for any thread, after prepare_read."""
        return [self._file.read(p.slot, p.name, row) for p, row in zip(places, rows, strict=True)]

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
