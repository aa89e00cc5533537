"""Keys and values of a snapshot that stay on the devices of a mesh until a folder is written.

Each process writes what its own devices hold; no array is ever whole on one of them. Whatever else
takes a snapshot sees blocks like all others: they are collected on the host when one is asked for.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from kvrt.errors import SaveError
from kvrt.session import kv_arrays
from kvrt.session.divided import division
from kvrt.session.divided.division import Division, Piece
from kvrt.session.snapshot import BLOCK_CELLS, KVBlock, Snapshot, map_kv

if TYPE_CHECKING:
    import jax

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

        for i, piece in enumerate(division.pieces(self.division)):
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
        for piece in division.pieces(self.division):
            found.append(map_kv(lambda x, p=piece: _own(x, p), self.rounds[piece.block]))
        return division.joined_pieces(self.division, found)


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
