"""Shared prefixes of block lists: a tree of runs of blocks, found from the lists alone.

Source: ChunkAttention (arXiv:2402.15220), sec. 3.1, whose tree is of chunks of tokens.
"""

import dataclasses

import numpy as np

from kvrt.arrays import Int32


@dataclasses.dataclass(frozen=True, eq=False)
class SharedRun:
    """Blocks [start, end) of several lists, in all of which they are the same.

    Attributes:
      members: the lists, by number.
      start: where the run of fewer blocks and more members ends that they share before it, or 0.
      end: where the first of the members differs or ends.
    """

    members: Int32[np.ndarray, " m"]
    start: int
    end: int

    @property
    def n_blocks(self) -> int:
        """Blocks that are read once."""
        return self.end - self.start


def find_runs(
    tables: Int32[np.ndarray, "S M"], n_blocks: Int32[np.ndarray, " S"]
) -> list[SharedRun]:
    """All runs of the first n_blocks[i] entries of tables[i], each before those that go on from it.

    Lists that differ in their first block, as those of strangers do, cost a sort of S numbers.
    """
    found: list[SharedRun] = []
    waiting = [(np.arange(len(tables), dtype=np.int32), 0)]
    while waiting:
        rows, start = waiting.pop()
        rows = rows[n_blocks[rows] > start]
        if len(rows) < 2:
            continue
        _, which, counts = np.unique(tables[rows, start], return_inverse=True, return_counts=True)
        for i in np.flatnonzero(counts > 1).tolist():
            members = rows[which == i]
            least = int(n_blocks[members].min())
            alike = (tables[members, start:least] == tables[members[0], start:least]).all(axis=0)
            end = least if alike.all() else start + int(alike.argmin())
            found.append(SharedRun(members, start, end))
            waiting.append((members, end))
    return found
