"""How the devices of a mesh divided the keys and values of a group that a folder keeps.

A device has a part of the cells and a part of the kv heads. What it wrote are its pieces: up to 256
cells that follow each other in its part. A group of one device is one part of all cells and heads.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, overload

import numpy as np
from msgspec import Meta

from kvrt.errors import SaveError
from kvrt.session import kv_arrays
from kvrt.session.snapshot import BLOCK_CELLS, BlockCells, KVBlock, Snapshot, map_kv
from kvrt.whole_numbers import Count

if TYPE_CHECKING:
    import jax

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


Tensors = kv_arrays.Tensors


class DividedBlocks(Sequence[KVBlock]):
    """The used cells of one group on the devices of a mesh.

    Attributes:
      rounds: of each part of the cells the next 256, zeros behind its last one; arrays of JAX,
        [L, parts * 256, H, D], whose cells and heads are divided.
      division: the parts.
    """

    def __init__(self, rounds: Sequence[KVBlock], cells: Sequence[int]):
        """Takes rounds of so many used cells of each part, as `take_own` gives them."""
        self.rounds = tuple(rounds)
        n_heads, writers = 1, (0,) * len(cells)
        if self.rounds:
            n_heads, writers = _writers(next(iter(_arrays(self.rounds[0]).values())))
        self.division = Division(cells=tuple(cells), n_heads=n_heads, writers=writers)

    @property
    def is_here(self) -> bool:
        """Whether all of it is on devices of this process."""
        rounds = map(self.round_arrays, range(len(self.rounds)))
        return all(x.is_fully_addressable for of in rounds for x in of.values())

    def round_arrays(self, i: int) -> dict[str, Any]:
        """The arrays of a round, as they are named in a file."""
        return _arrays(self.rounds[i])

    def own(self) -> Iterator[tuple[int, Tensors]]:
        """The pieces that this process writes, one at a time on the host, with their numbers."""
        import jax

        for i, piece in enumerate(pieces(self.division)):
            if self.division.writer(piece.part, piece.head) == jax.process_index():
                found = self.round_arrays(piece.block)
                yield i, {name: _own(x, piece) for name, x in found.items()}

    @overload
    def __getitem__(self, i: int) -> KVBlock: ...

    @overload
    def __getitem__(self, i: slice) -> list[KVBlock]: ...

    def __getitem__(self, i: int | slice) -> KVBlock | list[KVBlock]:
        """Blocks of 256 used cells, on the host.

        Raises:
          SaveError: some are on devices of other processes.
        """
        return self._collected[i]

    def __len__(self) -> int:
        """Blocks of 256 used cells."""
        return -(-sum(self.division.cells) // BLOCK_CELLS)

    @functools.cached_property
    def _collected(self) -> list[KVBlock]:
        if not self.is_here:
            raise SaveError(
                "keys and values that several processes hold are taken by a folder alone; give a "
                "name in .orbax, or take a snapshot that is not divided"
            )
        found = []
        for piece in pieces(self.division):
            found.append(map_kv(lambda x, p=piece: _own(x, p), self.rounds[piece.block]))
        return joined_pieces(self.division, found)


def divided_groups(snapshot: Snapshot) -> tuple[DividedBlocks, ...]:
    """The groups of a snapshot that was taken as the devices hold it; none of any other."""
    found = tuple(g.blocks for g in snapshot.groups if isinstance(g.blocks, DividedBlocks))
    assert len(found) in (0, len(snapshot.groups)), "groups of one snapshot are taken alike"
    return found


def _arrays(block: KVBlock) -> dict[str, Any]:
    return {**kv_arrays.tensors("k", block.k), **kv_arrays.tensors("v", block.v)}


def _writers(x: "jax.Array") -> tuple[int, tuple[int, ...]]:
    """Parts of the heads of such an array, and the process of each part's first copy."""
    size = x.sharding.shard_shape(x.shape)[2]
    found = {_place(s, size): s.device.process_index for s in x.global_shards if not s.replica_id}
    return x.shape[2] // size, tuple(found[at] for at in sorted(found))


def _own(x: "jax.Array", piece: Piece) -> np.ndarray:
    """A piece of an array, from the device of this process that holds it."""
    size = x.sharding.shard_shape(x.shape)[2]
    at = piece.part, piece.head
    data = next(s.data for s in x.addressable_shards if _place(s, size) == at)
    return np.asarray(data)[:, : piece.n]


def _place(shard: Any, size: int) -> tuple[int, int]:
    """Which part of the cells and which of the heads, of `size` each, a shard is."""
    return (shard.index[1].start or 0) // BLOCK_CELLS, (shard.index[2].start or 0) // size
