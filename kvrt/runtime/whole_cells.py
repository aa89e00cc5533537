"""Whole cells evicted by scores: one set of tokens for all heads and layers, in ordinary cells.

It is the cheap form of policies by score, where each head keeps tokens of its own: no slots, no
state, and whatever works with cells works behind it. The newest tokens of a sequence are evaluated
once more, in a program of its own, to see which cells they attend to; nothing is written by it.
"""

import dataclasses

import numpy as np

from kvrt.arrays import Float, Int32
from kvrt.attention.scored.tapped import cell_sums
from kvrt.cache.cell_cache import CellCache
from kvrt.cellcache import history
from kvrt.cells.edits import Remove
from kvrt.cells.slots import StepTokens
from kvrt.errors import BadConfig, BadRange, UsageError
from kvrt.options.compose import check_together
from kvrt.program.batch import bucket, some_outputs, to_batch
from kvrt.program.layers.taps import look


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellEviction:
    """Which cells of a sequence stay: sinks, the newest, and those that these attend to most.

    Attributes:
      n_keep: tokens that stay.
      window: newest tokens, whose attention counts; they stay.
      n_sink: positions below it stay.
    """

    n_keep: int
    window: int = 32
    n_sink: int = 4

    def __post_init__(self) -> None:
        """Refuses sizes that leave nothing to choose."""
        least = self.n_sink + self.window + 1
        if self.n_sink < 0 or self.window < 1 or self.n_keep < least:
            raise UsageError(
                f"n_keep {self.n_keep} with n_sink {self.n_sink} and window {self.window} leaves "
                f"no cell to choose; keep {least} or more, or protect fewer (window is at least 1)"
            )


def evict_cells(cache: CellCache, seq_id: int, spec: CellEviction) -> Int32[np.ndarray, " n"]:
    """See `Runtime.evict_cells`."""
    check_cache(cache, cache.check_seq_id(seq_id))
    pos, ids, _ = history.entries(cache.host.history, seq_id)
    if len(pos) <= spec.n_keep:
        return pos[:0]
    if (np.diff(pos) < 1).any():
        raise BadRange(
            f"sequence {seq_id} has several tokens at one position, which go together or not at "
            "all; evict before positions are divided"
        )
    n = min(spec.window, cache.config.n_ubatch)
    parts = np.split(np.arange(len(pos) - spec.window, len(pos)), range(n, spec.window, n))
    worth = np.sum([_scores(cache, seq_id, (pos, ids), at) for at in parts], axis=0)
    worth[pos < spec.n_sink] = worth[-spec.window :] = np.inf
    stays = np.zeros(len(pos), bool)
    stays[np.argsort(-worth, kind="stable")[: spec.n_keep]] = True
    edges = np.flatnonzero(np.diff(np.concatenate([[True], stays, [True]])))
    for start, end in edges.reshape(-1, 2):
        cache.apply(Remove(seq_id=seq_id, p0=int(pos[start]), p1=int(pos[end - 1]) + 1))
    return pos[~stays]


def check_cache(cache: CellCache, seq_id: int) -> None:
    """Refuses what is not in ordinary cells, or is compared otherwise than by cached keys.

    Raises:
      CannotRewind: layers hold what came before in one order.
      BadConfig: keys of several cells, or positions, belong together; there is a mesh.
    """
    check_together({"whole cells": str(cache.config.type_k)}, cache.traits)
    if cache.in_blocks(seq_id):
        raise BadConfig(
            f"sequence {seq_id} lies in blocks, where a position is a place; use to_cells first"
        )


def _scores(
    cache: CellCache, seq_id: int, held: tuple[np.ndarray, np.ndarray], at: np.ndarray
) -> Float[np.ndarray, " n"]:
    """What the tokens `at` give each of a sequence's, summed over layers and heads."""
    cache.flush()
    (pos, ids), host = held, cache.host
    slots = [x.by_position(seq_id) for x in host.groups]
    mine, size = np.full(len(at), seq_id, np.int32), bucket(len(at), cache.config.n_ubatch)
    step = StepTokens(tokens=ids[at], pos=pos[at], seq_ids=mine, size=size)
    where = host.places(step, [of[at] for of in slots])
    batch, device = to_batch(step, where, some_outputs([], size)), cache.device
    found = look(device.programs, device.by_layer, device.cache, batch, cell_sums)
    given = np.zeros(len(pos))
    for group, of in zip(device.layout.groups, slots, strict=True):
        if sums := [found[i] for i in group.layers if i in found]:
            given += np.asarray(sum(sums), np.float64)[of]  # sync: the host chooses.
    return given
