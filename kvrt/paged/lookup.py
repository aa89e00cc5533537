"""Blocks of a text that are cached, in one or more groups that need just the same of it."""

from collections.abc import Sequence

from kvrt.paged.pool import BlockPool
from kvrt.paged.prefix import Chain
from kvrt.paged.spec import NULL

Ids = tuple[int, ...]  # one block a group


class Lookup:
    """What is cached of one chain in groups that need just the same of it.

    Attributes:
      nothing: null blocks, one a group.
      n_max: tokens that can be found at most; never all.
    """

    def __init__(self, chain: Chain, n: int, members: Sequence[tuple[int, BlockPool]]):
        """For groups whose blocks are n blocks of the chain."""
        self.nothing: Ids = (NULL,) * len(members)
        self.n_max = len(chain.tokens) - 1
        self._chain, self._n, self._members = chain, n, members
        self._entries = chain.entries(n)

    def block(self, index: int) -> Ids | None:
        """The blocks that hold block `index`, one a group; None if one lacks it."""
        if index >= len(self._entries):
            return None
        entry, out = self._entries[index], []
        for group, pool in self._members:
            found = pool.find(group, entry)
            if found is None:
                return None
            out.append(found)
        return tuple(out)

    def part(self, n_tokens: int) -> Ids | None:
        """The blocks that hold the text from the last boundary up to n_tokens; None as above."""
        end = n_tokens // self._chain.block_size
        entry = self._chain.part(end - end % self._n, end % self._n)
        found = [pool.find(group, entry) for group, pool in self._members]
        return None if None in found else tuple(b for b in found if b is not None)
