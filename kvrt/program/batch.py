"""What one step runs: tokens, where they stand, where they are written and which blocks they read.

Everything is decided here on the host, in NumPy, and padded to a bucket, so that few programs
serve every batch.
"""

from collections.abc import Sequence

import numpy as np

from kvrt.arrays import AnyArray, Int32, state
from kvrt.store.recurrent import StateRows


@state
class Rows:
    """Blocks that each of S sequences reads: the first n_blocks[i] of row i of `tables`."""

    tables: Int32[AnyArray, "S M"]
    n_blocks: Int32[AnyArray, " S"]


@state
class Places:
    """Where tokens go in one group, and the first n_blocks of `blocks` that they read.

    Padding tokens have a slot beyond the last row. Where there are `rows`, the first S tokens of
    the step are of one sequence each and read the blocks of theirs; the others read `blocks`.
    `fresh` are blocks whose cells are empty from this step on, whoever had them before.
    """

    slots: Int32[AnyArray, " T"]
    blocks: Int32[AnyArray, " N"]
    n_blocks: Int32[AnyArray, ""]
    rows: Rows | None = None
    fresh: Int32[AnyArray, " F"] | None = None


@state
class Batch:
    """One step of T tokens, of which R rows give logits; `places` by group of attention layers.

    `states` are the rows of recurrent layers, None where there are none. Padding tokens have
    position and sequence -1.
    """

    tokens: Int32[AnyArray, " T"]
    pos: Int32[AnyArray, " T"]
    seq_ids: Int32[AnyArray, " T"]
    places: tuple[Places, ...]
    out_ids: Int32[AnyArray, " R"]
    states: StateRows | None = None


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
    places: Sequence[Places],
    states: StateRows | None,
    wanted: Sequence[int],
    size: int,
) -> Batch:
    """A batch of `size` tokens; one output or all of them, so two programs a bucket at most."""
    return Batch(
        tokens=pad(tokens, size, 0),
        pos=pad(pos, size, -1),
        seq_ids=pad(seq_ids, size, -1),
        places=tuple(places),
        states=states,
        out_ids=pad(wanted, 1 if len(wanted) <= 1 else size, 0),
    )
