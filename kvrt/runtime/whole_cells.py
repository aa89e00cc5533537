"""Whole cells evicted by scores: one set of tokens for all heads and layers, in ordinary cells.

It is the cheap form of policies by score, where each head keeps tokens of its own: no slots, no
state, and whatever works with cells works behind it. The newest tokens of a sequence are evaluated
once more, in a program of its own, to see which cells they attend to; nothing is written by it.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvrt.arrays import Array, Float, Int32
from kvrt.attention.scored.tapped import TappedAttend, cell_sums
from kvrt.attention.step_attention import StepAttention
from kvrt.attention.types import AttendArgs
from kvrt.cache.cell_cache import CellCache
from kvrt.cellcache import history
from kvrt.cells.edits import Remove
from kvrt.cells.slots import StepTokens
from kvrt.errors import BadConfig, BadRange, CannotRewind, UsageError
from kvrt.kv_types import CHANNEL_CODECS
from kvrt.program.batch import Batch, bucket, some_outputs, to_batch
from kvrt.program.layer_range import in_place
from kvrt.program.programs import ModelKind, Program
from kvrt.program.step import Cache


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
    host, config = cache.host, cache.config
    if host.rolls or host.states is not None:
        raise CannotRewind(
            "windowed layers that reuse cells, recurrent ones and policies by score hold what came "
            "before in one order, so no cell can be taken out of the middle; set swa_full, or take "
            "a policy by score alone"
        )
    if config.rope == "read" or config.self_extend is not None:
        raise BadConfig(
            "cells are chosen by keys as they are stored, and with rope='read' or SelfExtend they "
            "are compared otherwise; use rope='write' without SelfExtend"
        )
    if config.type_k in CHANNEL_CODECS or any(g.latent_rank for g in cache.device.layout.groups):
        raise BadConfig(
            f"type_k {config.type_k}: keys by channel share scales, and latents are compared in "
            "two parts; whole cells are chosen by plain keys or keys quantized by cell"
        )
    if cache.device.spec.shards is not None:
        raise BadConfig("whole cells are chosen on one device; leave mesh out")
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
    batch = to_batch(step, where, some_outputs([], size))
    programs = cache.device.programs
    # sync: the host chooses.
    args = programs.params, cache.device.cache, batch
    found = programs.run(Program(whole_cells, (programs.kind,), args, n_known=2))
    given = [np.asarray(x, np.float64)[of] for of, x in zip(slots, found, strict=True) if x.ndim]
    return np.sum(given, axis=0)


def whole_cells(kind: ModelKind, params: tuple, cache: Cache, batch: Batch) -> tuple[Array, ...]:
    """By group what a batch gives each cell, summed over layers and heads."""
    model, sums = kind.model(params), dict[int, Array]()

    def tapped(tokens: Array, attend: StepAttention) -> Array:
        def see(layer: int, args: AttendArgs) -> None:
            sums[layer] = cell_sums(args)

        return model(tokens, TappedAttend(attend, see), batch.out_ids)

    in_place(tapped, cache, batch, kind.spec)
    none, groups = jnp.zeros(()), kind.spec.layout.groups
    return tuple(sum((sums[i] for i in g.layers if i in sums), none) for g in groups)
