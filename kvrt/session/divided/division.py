"""How the devices of a mesh divided the keys and values of a group that a folder keeps.

A device has a part of the cells and a part of the kv heads. What it wrote are its pieces: up to 256
cells that follow each other in its part. A group of one device is one part of all cells and heads.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta

from kvrt.session.snapshot import BLOCK_CELLS, BlockCells, KVBlock, map_kv
from kvrt.whole_numbers import Count

MAX_PARTS = 1 << 16  # of a group, and processes that wrote them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """The parts of a group.

    Attributes:
      cells: used cells of each part of the cells, in their order.
      n_heads: parts of the kv heads, all of one size.
      writers: the process that wrote each part, those of one part of the cells side by side.
    """

    cells: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_PARTS)]
    n_heads: Annotated[int, Meta(ge=1, le=MAX_PARTS)]
    writers: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=MAX_PARTS - 1)], ...], Meta(max_length=MAX_PARTS)
    ]

    @property
    def n_pieces(self) -> int:
        """How many pieces there are."""
        return sum(map(_n_blocks, self.cells)) * self.n_heads

    def writer(self, part: int, head: int) -> int:
        """The process that wrote one part of the heads of one part of the cells."""
        return self.writers[part * self.n_heads + head]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What one device wrote at once.

    Attributes:
      part: of the cells.
      block: which 256 cells of that part.
      head: part of the kv heads.
      start: the first of its cells, counted in all used cells of the group.
      n: its cells.
    """

    part: int
    block: int
    head: int
    start: int
    n: int


def undivided(n_used: int) -> Division:
    """All used cells and heads as one part."""
    return Division(cells=(n_used,), n_heads=1, writers=(0,))


@functools.lru_cache(maxsize=64)
def pieces(division: Division) -> tuple[Piece, ...]:
    """The pieces of a division in the order of their blobs: by cells, then by heads."""
    starts = [0, *itertools.accumulate(division.cells)]
    return tuple(
        Piece(part=i, block=j, head=t, start=starts[i] + at, n=min(BLOCK_CELLS, n - at))
        for i, n in enumerate(division.cells)
        for j, at in enumerate(range(0, n, BLOCK_CELLS))
        for t in range(division.n_heads)
    )


def joined_pieces(division: Division, found: Sequence[KVBlock]) -> list[KVBlock]:
    """Blocks of 256 cells with all heads, on the host, from the pieces of a division."""
    heads = (found[at : at + division.n_heads] for at in range(0, len(found), division.n_heads))
    whole = [map_kv(lambda *x: np.concatenate(x, axis=2), *some) for some in heads]
    return BlockCells(whole).in_blocks(np.arange(sum(division.cells)))


def _n_blocks(n: int) -> int:
    return -(-n // BLOCK_CELLS)
