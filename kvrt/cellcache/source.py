"""Cells and states as another runtime, or a file, held them; no JAX is needed for these."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvrt.arrays import Int32, UInt32
from kvrt.cellcache import window

Held = tuple[tuple[int, int], ...]  # (pos, row) of a sequence's states


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Used cells of one group elsewhere, ascending.

    Attributes:
      n_cells: cells there were.
      head: where the next search for cells would have started.
      index: numbers of the used cells.
      pos: their positions; no change of them is pending.
      seqs: their owners, bit s of word s // 32 for sequence s.
      lost: positions that a windowed group has dropped, by sequence.
    """

    n_cells: int
    head: int
    index: Int32[np.ndarray, " n"]
    pos: Int32[np.ndarray, " n"]
    seqs: UInt32[np.ndarray, "n W"]
    lost: Mapping[int, window.Intervals]
