"""A round as several programs: what is sampled is known between the layers and their writes.

    embed, layers      the stream of the step's tokens, and what each run of layers keeps of them
    accept             tokens are sampled, cells get those that stay
    write              a run's keys, values and states of tokens that stay

Where the first layers draft they run as in any step, a token of each round at a time: so often as
drafts are wanted, whichever end before.
"""

import copy
import dataclasses
from typing import Any

import jax.numpy as jnp

from kvrt.arrays import Array, Bool, Float
from kvrt.attention.step_attention import only
from kvrt.cells import Cells
from kvrt.program import step as steps
from kvrt.program.batch import Batch, without_fresh
from kvrt.program.layers.by_layer import Arrays, StepByLayer, unwritten_layers
from kvrt.program.programs import ModelKind, Program
from kvrt.program.rounds.layer_skip import (
    FirstStates,
    LayerDrafts,
    begun,
    drafted,
    first_states,
    kept_states,
    n_drafting,
    next_tokens,
    states_apart,
    to_verify,
    with_singles,
)
from kvrt.program.rounds.round import RoundSpec, RoundStep, Verified, accept


def round_by_layer(
    layers: StepByLayer, how: RoundSpec, arrays: Arrays, step: RoundStep
) -> Verified:
    """Runs a step with rounds, see `verify` and `draft_and_verify`.

    Args:
      layers: of the model.
      how: log-probabilities, and which layers draft.
      arrays: of the cache, which get the step's tokens, but for drafts that do not stay; or shapes.
      step: on the host.

    Returns:
      What was sampled, or its shapes.
    """
    if how.exit_layer is None:
        runs, apart, (x, batch) = layers.runs, None, layers.embed(arrays, step.batch)
        step = dataclasses.replace(step, batch=batch)
    else:
        runs = layers.split(how.exit_layer)[1]
        step, x, apart = _drafted(layers, how, arrays, step)
    passed = layers.run(arrays, step.batch, x, runs, unwritten_layers)
    static = layers.kind, (how.n_best, passed.is_narrow)
    args = arrays.cells, layers.rest, step, passed.stream.x
    wanted = Program(accept_round, static, args, donate=(0,), n_known=2)
    verified, stays, arrays.cells = arrays.call(wanted)
    layers.write(arrays, step.batch, runs, passed.kept, stays)
    if apart is not None and apart.tables:
        first = first_states(arrays.cache(), len(apart.tables))
        keeps = Program(kept_states, (), (first, apart, step.batch, stays), donate=(0,))
        _put_first(arrays, arrays.call(keeps))
    return verified


def _put_first(arrays: Arrays, first: FirstStates) -> None:
    """Takes other states of the layers that draft."""
    arrays.states = [*first.tables, *arrays.states[len(first.tables) :]]
    arrays.nan_scores = first.nan_scores


def _drafted(
    layers: StepByLayer, how: RoundSpec, arrays: Arrays, step: RoundStep
) -> tuple[RoundStep, Any, FirstStates]:
    """The step with drafts, the stream behind the layers that made them, and their states."""
    assert how.exit_layer is not None, "some layers draft"
    n, (runs, _), static = n_drafting(step, how), layers.split(how.exit_layer), (layers.kind,)
    n_recurrent = layers.kind.spec.layout.n_recurrent(how.exit_layer)

    # Cells and states of drafts are not the cache's, so that an error between programs leaves none
    # there.
    drafting = copy.copy(arrays)

    def first_layers(batch: Batch) -> tuple[Any, Batch]:
        """The residual stream behind the first layers, which write; and the batch again."""
        x, batch = layers.embed(drafting, batch)
        return layers.run(drafting, batch, x, runs).stream.x, batch

    args = arrays.cells, layers.rest, first_states(arrays.cache(), n_recurrent), step
    begins = Program(begin_drafts, static, args, n_known=2)
    step, drafts, single, batch, drafting.cells, apart = arrays.call(begins)
    _put_first(drafting, apart)
    drafting.by_token = bool(apart.tables)
    if single is not None:
        x, single = first_layers(single)
        args = drafting.cells, drafts, x, single
        notes = Program(note_singles, static, args, donate=(0,), n_known=1)
        drafts, drafting.cells = arrays.call(notes)
    for _ in range(n):
        x, _ = first_layers(batch)
        args = drafting.cells, layers.rest, drafts, x, step
        makes = Program(draft_tokens, static, args, donate=(0,), n_known=2)
        drafts, batch, drafting.cells = arrays.call(makes)
    args = arrays.cells, drafts, step
    ends = Program(end_drafts, static, args, donate=(0,), n_known=1)
    step, arrays.cells = arrays.call(ends)
    return step, drafts.stream, first_states(drafting.cache(), n_recurrent)


# --- programs ----------------------------------------------------------------------------------

ManyCells = tuple[Cells, ...]


def accept_round(
    kind: ModelKind,
    how: tuple[int, bool],
    cells: ManyCells,
    rest: tuple,
    step: RoundStep,
    x: Float[Array, "N E"],
) -> tuple[Verified, Bool[Array, " T"], ManyCells]:
    """What a step samples, which of its tokens stay, and cells with those.

    `how` is the number of log-probabilities, and whether the stream has wanted tokens alone.
    """
    n_best, is_narrow = how
    rows = x if is_narrow else x[jnp.asarray(step.batch.out_ids)]
    logits = kind.outer(rest).head(rows).astype(jnp.float32)
    verified, stays = accept(logits, step, n_best)
    return verified, stays, steps.place_step(cells, step.batch, kind.spec, only(stays))


def begin_drafts(
    kind: ModelKind, cells: ManyCells, rest: tuple, first: FirstStates, step: RoundStep
) -> tuple[RoundStep, LayerDrafts, Batch | None, Batch, ManyCells, FirstStates]:
    """The step again, its tokens of no round, the first ones of rounds; cells, states of drafts."""
    cells = steps.vacated(cells, step.batch, kind.spec)
    drafts, single = begun(kind.outer(rest), step)
    batch, apart = next_tokens(drafts, step), states_apart(first, step.batch)
    return step, drafts, single, batch, cells, apart


def note_singles(
    kind: ModelKind, cells: ManyCells, drafts: LayerDrafts, x: Float[Array, "N E"], batch: Batch
) -> tuple[LayerDrafts, ManyCells]:
    """Rounds and cells after the first layers have run over tokens of no round."""
    return with_singles(drafts, x), steps.place_step(cells, batch, kind.spec)


def draft_tokens(
    kind: ModelKind,
    cells: ManyCells,
    rest: tuple,
    drafts: LayerDrafts,
    x: Float[Array, "D E"],
    step: RoundStep,
) -> tuple[LayerDrafts, Batch, ManyCells]:
    """Rounds, their next tokens and cells after the first layers have run over a token of each."""
    cells = steps.place_step(cells, next_tokens(drafts, step), kind.spec)
    drafts = drafted(kind.outer(rest), drafts, x, step)
    return drafts, next_tokens(drafts, step), cells


def end_drafts(
    kind: ModelKind, cells: ManyCells, drafts: LayerDrafts, step: RoundStep
) -> tuple[RoundStep, ManyCells]:
    """The step that the other layers verify, and cells without its tokens."""
    cells = steps.vacated(cells, step.batch, kind.spec)
    batch = without_fresh(step.batch)
    step = to_verify(drafts, dataclasses.replace(step, batch=batch))
    return step, steps.emptied(cells, batch, kind.spec)
