"""What one step runs: tokens, their positions, the slots they are written to, the blocks they read.

Everything is decided on the host, in NumPy, and padded to a bucket, so that few programs serve
every batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from kvrt.arrays import AnyArray, Int32, state
from kvrt.cellcache.host_cells import Where
from kvrt.cells.slots import Places, StepTokens, one_sequence, pad
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


def without_fresh(batch: Batch) -> Batch:
    """A batch whose new blocks are empty already."""
    places = (dataclasses.replace(of_group, fresh=None) for of_group in batch.places)
    return dataclasses.replace(batch, places=tuple(places))


def to_batch(
    step: StepTokens, where: Where, out_ids: np.ndarray, tokens: AnyArray | None = None
) -> Batch:
    """The arrays of a step, whose tokens the device may have already."""
    return Batch(
        tokens=step.spread(step.tokens, 0) if tokens is None else tokens,
        pos=step.spread(step.pos, -1),
        seq_ids=step.spread(step.seq_ids, -1),
        places=where[0],
        states=where[1],
        out_ids=out_ids,
    )


def some_outputs(wanted: Sequence[int], size: int) -> Int32[np.ndarray, " R"]:
    """Tokens of a step whose logits are wanted: one or all, so two programs a bucket at most."""
    return pad(wanted, 1 if len(wanted) <= 1 else size, 0)


def prompt_batches(
    n_tokens: int, n_ubatch: int, place: Callable[[int], Where], *, skips: bool
) -> list[Batch]:
    """Empty batches of the shapes that a prompt has of which the last logits are wanted.

    Args:
      n_tokens: of the prompt.
      n_ubatch: of a step at most.
      place: where tokens are written of which there are so many.
      skips: steps before the last have no outputs, and leave out layers that only read.
    """
    if not n_tokens:
        return []
    n_last = (n_tokens - 1) % n_ubatch + 1
    before = [(n_ubatch, skips)] if n_tokens > n_ubatch else []
    wanted = [*before, (bucket(n_last, n_ubatch), False)]

    def batch(size: int, without: bool) -> Batch:
        out_ids = some_outputs([], size)[: 0 if without else None]
        return to_batch(one_sequence([], 0, 0, size), place(size), out_ids)

    return [batch(*x) for x in dict.fromkeys(wanted)]
