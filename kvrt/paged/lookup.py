"""Cached blocks of a prompt, in groups that need the same blocks of it."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvrt.paged.hashing import Chain, PrefixHash
from kvrt.paged.layout.spec import NULL

BlockIds = tuple[int, ...]  # one block a group


@runtime_checkable
class Findable(Protocol):
    """Where blocks can be found by their prefix hash."""

    @property
    def n_evicted(self) -> int:
        """Prefix hashes that were removed so far."""
        ...

    def find(self, group: int, entry: PrefixHash) -> int | None:
        """A block with this prefix hash, or None."""
        ...

    def may_have(self, group: int, digest: bytes) -> bool:
        """False if no block has a prefix hash of this digest."""
        ...


class Lookup:
    """Cached blocks of one chain in groups that need the same blocks of it.

    Attributes:
      nothing: null blocks, one a group.
      n_max: tokens that can be found at most.
    """

    def __init__(self, chain: Chain, n: int, members: Sequence[tuple[int, Findable]], n_max: int):
        """For groups whose blocks are n blocks of the chain."""
        self.nothing: BlockIds = (NULL,) * len(members)
        self.n_max = n_max
        self._chain, self._n, self._members = chain, n, members
        self._entries = chain.entries(n)

    def block(self, index: int) -> BlockIds | None:
        """Cached blocks for block `index` of the chain, one a group; None if one lacks it."""
        if index >= len(self._entries):
            return None
        entry, out = self._entries[index], []
        for group, pool in self._members:
            found = pool.find(group, entry)
            if found is None:
                return None
            out.append(found)
        return tuple(out)

    def part(self, n_tokens: int) -> BlockIds | None:
        """Cached blocks for the tokens from the last block boundary to n_tokens; None as above."""
        end = n_tokens // self._chain.block_size
        digest = self._chain.hashes[end - 1].digest
        if not all(pool.may_have(group, digest) for group, pool in self._members):
            return None
        entry = self._chain.part(end - end % self._n, end % self._n)
        found = [pool.find(group, entry) for group, pool in self._members]
        return None if None in found else tuple(b for b in found if b is not None)
