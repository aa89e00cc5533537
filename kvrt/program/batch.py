"""What one step runs: tokens, their positions, the slots they are written to, the blocks they read.

Everything is decided on the host, in NumPy, and padded to a bucket, so that few programs serve
every batch.
"""

import functools
from collections.abc import Sequence

import numpy as np

from kvrt.arrays import AnyArray, Int32, state
from kvrt.cells.slots import Places, pad
from kvrt.store.recurrent import StateIndex


@state
class Batch:
    """One step of T tokens, of which R give logits; `places` by group of attention layers.

    `states` are the indices of recurrent layers' states, None where there are none. Padding tokens
    have position and sequence -1.
    """

    tokens: Int32[AnyArray, " T"]
    pos: Int32[AnyArray, " T"]
    seq_ids: Int32[AnyArray, " T"]
    places: tuple[Places, ...]
    out_ids: Int32[AnyArray, " R"]
    states: StateIndex | None = None


def buckets(n_ubatch: int) -> tuple[int, ...]:
    """Sizes that steps are padded to: 1, 8, 32, 128, ... and n_ubatch."""
    sizes = [1]
    while sizes[-1] < n_ubatch:
        sizes.append(8 if sizes[-1] == 1 else sizes[-1] * 4)
    return (*(s for s in sizes if s < n_ubatch), n_ubatch)


@functools.cache
def bucket(n: int, n_ubatch: int) -> int:
    """The smallest bucket that holds n tokens."""
    return next(s for s in buckets(n_ubatch) if s >= n)


def padded(
    tokens: np.ndarray,
    pos: np.ndarray,
    seq_ids: np.ndarray,
    out_ids: Sequence[int],
    where: tuple[Sequence[Places], StateIndex | None],
    size: int,
) -> Batch:
    """A batch of `size` tokens; one output or all of them, so two programs a bucket at most."""
    places, states = where
    return Batch(
        tokens=pad(tokens, size, 0),
        pos=pad(pos, size, -1),
        seq_ids=pad(seq_ids, size, -1),
        places=tuple(places),
        states=states,
        out_ids=pad(out_ids, 1 if len(out_ids) <= 1 else size, 0),
    )
