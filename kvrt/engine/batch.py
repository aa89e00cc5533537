"""What one step runs: tokens, where they stand, where they are written and which blocks they read.

Everything is decided here on the host, in NumPy, and padded to a bucket, so that few programs
serve every batch.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from kvrt.arrays import AnyArray, Int32, state
from kvrt.cells import Cells, blocks_of


@state
class Batch:
    """One step of T tokens over N blocks, of which R rows give logits.

    Padding tokens have position and sequence -1 and a slot beyond the last row.
    """

    tokens: Int32[AnyArray, " T"]
    pos: Int32[AnyArray, " T"]
    seq_ids: Int32[AnyArray, " T"]
    slots: Int32[AnyArray, " T"]
    blocks: Int32[AnyArray, " N"]
    n_blocks: Int32[AnyArray, ""]
    out_ids: Int32[AnyArray, " R"]


def buckets(n_ubatch: int) -> tuple[int, ...]:
    """Sizes that steps are padded to: 1, 8, 32, 128, ... and n_ubatch."""
    sizes = [1]
    while sizes[-1] < n_ubatch:
        sizes.append(8 if sizes[-1] == 1 else sizes[-1] * 4)
    return (*(s for s in sizes if s < n_ubatch), n_ubatch)


def bucket(n: int, n_ubatch: int) -> int:
    """The smallest bucket that holds n tokens."""
    return next(s for s in buckets(n_ubatch) if s >= n)


def pad(values: Sequence[int] | np.ndarray, size: int, fill: int) -> np.ndarray:
    """int32[size] that begins with `values`."""
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


def padded(
    tokens: np.ndarray,
    pos: np.ndarray,
    seq_ids: np.ndarray,
    slots: np.ndarray,
    blocks: tuple[np.ndarray, np.ndarray],
    wanted: Sequence[int],
    *,
    size: int,
    n_rows: int,
) -> Batch:
    """A batch of `size` tokens; one output or all of them, so two programs a bucket at most."""
    return Batch(
        tokens=pad(tokens, size, 0),
        pos=pad(pos, size, -1),
        seq_ids=pad(seq_ids, size, -1),
        slots=pad(slots, size, n_rows),
        blocks=blocks[0],
        n_blocks=blocks[1],
        out_ids=pad(wanted, 1 if len(wanted) <= 1 else size, 0),
    )


class BlockIndex:
    """Which blocks hold a cell of which sequence, kept up to date by appends.

    A scan of all cells costs as much as the rest of a step's plan; between other changes of the
    cells, which reset it, a sequence only gains blocks.
    """

    def __init__(self, n_blocks: int, block_size: int):
        """An index that knows nothing yet of n_blocks blocks."""
        self._n_blocks, self._block_size = n_blocks, block_size
        self._of: dict[int, set[int]] = {}
        self._padded: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def reset(self) -> None:
        """Forgets everything: the cells changed otherwise than by an append."""
        self._of.clear()
        self._padded.clear()

    def add(self, seq_id: int, slots: np.ndarray) -> None:
        """Takes note of cells that seq_id was given."""
        known = self._of.get(seq_id)
        new = set(np.unique(slots // self._block_size).tolist())
        if known is not None and not new <= known:
            known |= new
            self._padded.clear()

    def of(self, cells: Cells, seq_ids: Iterable[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ascending blocks of the sequences, padded to int32[N], and how many they are."""
        key = tuple(sorted(set(seq_ids)))
        if key not in self._padded:
            for s in key:
                if s not in self._of:
                    self._of[s] = set(blocks_of(cells, [s], self._block_size).tolist())
            found = sorted(set().union(*(self._of[s] for s in key)))
            self._padded[key] = (pad(found, self._n_blocks, 0), np.asarray(len(found), np.int32))
        return self._padded[key]
