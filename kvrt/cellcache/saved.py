"""Cells and states of a session, as the cache that it was saved from had them.

No JAX is needed for these.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvrt.arrays import Bool, Int32, UInt32
from kvrt.cellcache import window

KeptStates = tuple[tuple[int, int], ...]  # (pos, state index), ascending


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedCells:
    """Used cells of one saved group, ascending.

    Attributes:
      n_cells: cells of the group, empty ones included.
      head: where the next search for cells would have started.
      index: numbers of the used cells.
      pos: their positions; no change of them is pending.
      seqs: their owners, bit s of word s // 32 for sequence s.
      lost: positions whose cells a windowed group used again, by sequence.
    """

    n_cells: int
    head: int
    index: Int32[np.ndarray, " n"]
    pos: Int32[np.ndarray, " n"]
    seqs: UInt32[np.ndarray, "n W"]
    lost: Mapping[int, window.Intervals]


def one_owner(n: int, seq_id: int) -> UInt32[np.ndarray, "n W"]:
    """Bits of n cells that belong to one sequence."""
    seqs = np.zeros((n, seq_id // 32 + 1), np.uint32)
    seqs[:, -1] = np.uint32(1) << np.uint32(seq_id % 32)
    return seqs


def of_sequence(seqs: UInt32[np.ndarray, "n W"], seq_id: int) -> Bool[np.ndarray, " n"]:
    """Which cells belong to a sequence, by their owners."""
    word = seq_id // 32
    if word >= seqs.shape[1]:
        return np.zeros(len(seqs), bool)
    return (seqs[:, word] >> np.uint32(seq_id % 32)) & 1 > 0
