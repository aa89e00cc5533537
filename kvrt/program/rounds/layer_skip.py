"""Rounds whose drafts the first layers of the model make, and the others verify.

    layers [0, E)   the newest token of every sequence, then its drafts, one of each at a time
    layers [E, L)   all tokens of the step at once, from the residual stream that was kept of each

So every layer runs once a token. The cells of refused drafts are empty afterwards: the slots of a
round were empty before it, or those of tokens that no later one sees. Recurrent states stay as they
were: layers that draft keep one for each token of the step, of which those of tokens that stay are
written at the end.

Source: arXiv:2404.16710 (LayerSkip), sec. 4.3.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.attention.contract import LayeredDecoder
from kvrt.attention.step_attention import NOWHERE, StepAttention
from kvrt.cells.slots import Places
from kvrt.config import GroupSpec
from kvrt.errors import BadConfig
from kvrt.program import sample
from kvrt.program import step as steps
from kvrt.program.batch import Batch, without_fresh
from kvrt.program.programs import ModelKind, Program, Programs
from kvrt.program.rounds.round import (
    NO_DRAFT,
    RoundSpec,
    RoundStep,
    Verified,
    accept,
    of_rounds,
    recent_alone,
    verify,
)
from kvrt.program.sample import Sampler
from kvrt.program.step import Cache, StepSpec
from kvrt.store import recurrent
from kvrt.store.recurrent import StateIndex, StateStore, StateTables


@state
class FirstStates:
    """Recurrent states of the layers that draft, and how many scores were NaN there.

    They are the cache's, or apart from it: then token t of the step has state t, which is the one
    before it until the token has run, and the one after it from then on.
    """

    tables: tuple[StateTables, ...]
    nan_scores: Int32[AnyArray, "..."] | None


@state
class LayerDrafts:
    """Token i of each round that goes on is next; the stream that was kept of the step's tokens."""

    i: Int32[Array, ""]
    going: Bool[Array, " D"]
    tokens: Int32[Array, " T"]
    drafts: Int32[Array, "D K"]
    stream: Float[Array, "T E"]
    sampler: Sampler


def check_exit(programs: Programs, exit_layer: int) -> None:
    """Refuses a model whose first layers cannot draft for the others.

    Raises:
      BadConfig: there are too few layers, it cannot be run in parts, or a layer behind the exit
        reads keys and values of one before it.
    """
    layout = programs.spec.layout
    n_layers = layout.n_layers
    if not 0 < exit_layer < n_layers:
        raise BadConfig(
            f"exit_layer is {exit_layer}, and the model has {n_layers} layers; some of them must "
            "draft and some verify: choose more than 0 and fewer than all"
        )
    reads = [x for group in layout.groups for x in _across(group, exit_layer)]
    if reads:
        layer, read = reads[0]
        raise BadConfig(
            f"layer {layer} reads the keys and values of layer {read}, which lies before "
            f"exit_layer {exit_layer}: the verifying step does not run it again; choose an exit "
            "that separates no layer from the one that it reads"
        )
    token = jax.ShapeDtypeStruct((1,), np.int32)
    jax.eval_shape(lambda p, t: programs.kind.in_parts(p).embed(t), programs.params, token)


def _across(group: GroupSpec, exit_layer: int) -> list[tuple[int, int]]:
    return [(x, read) for x, read in group.kv_of if read < exit_layer <= x]


def draft_and_verify(
    model: LayeredDecoder,
    cache: Cache,
    step: RoundStep,
    where: tuple[StepSpec, int],
    n_best: int,
) -> tuple[Verified, Cache]:
    """Runs a step whose drafts the first layers make.

    Args:
      model: it can be run in parts.
      cache: donated by jitted callers.
      step: as for `verify`, with slots for all drafts that are wanted; the blocks that rounds read
        have those slots.
      where: the spec as for `forward`, and how many layers draft.
      n_best: log-probabilities an output, static.

    Returns:
      What was sampled, and the cache with the step's tokens, but for drafts that do not stay.
    """
    spec, exit_layer = where
    # Blocks that the step begins are emptied once, before its first layers write there.
    cache = dataclasses.replace(cache, cells=steps.vacated(cache.cells, step.batch, spec))
    step = dataclasses.replace(step, batch=without_fresh(step.batch))
    n_recurrent = spec.layout.n_recurrent(exit_layer)
    first = first_states(cache, n_recurrent)
    drafts, cache = _draft(model, _with_first(cache, states_apart(first, step.batch)), step, where)
    apart = first_states(cache, n_recurrent)
    made, n_layers = to_verify(drafts, step), spec.layout.n_layers

    def run(_: Array, attend: StepAttention) -> tuple[Array, tuple[Verified, Bool[Array, " T"]]]:
        attend.one_by_one()
        x = model.layers(drafts.stream, attend, exit_layer, n_layers)
        logits = model.head(x[jnp.asarray(made.batch.out_ids)]).astype(jnp.float32)
        verified, stays = accept(logits, made, n_best)
        attend.keep(stays)
        return logits, (verified, stays)

    # Layers behind the exit have cached nothing of these tokens.
    cache = _with_first(cache, first)
    (_, (verified, stays)), cache = steps.in_place(run, cache, made.batch, spec)
    first = dataclasses.replace(first, nan_scores=cache.nan_scores)
    return verified, _with_first(cache, kept_states(first, apart, step.batch, stays))


def first_states(cache: Cache, n: int) -> FirstStates:
    """States of the first n recurrent layers, of a cache."""
    tables = cache.states.tables if cache.states else ()
    return FirstStates(tables=tables[:n], nan_scores=cache.nan_scores)


def states_apart(first: FirstStates, batch: Batch) -> FirstStates:
    """The states before the tokens of a step, apart from the cache."""
    n_nan = None if first.nan_scores is None else jnp.zeros(batch.tokens.shape, jnp.int32)
    before = tuple(recurrent.states_at(x, _index(batch).src) for x in first.tables)
    return FirstStates(tables=before, nan_scores=n_nan)


def kept_states(
    first: FirstStates, apart: FirstStates, batch: Batch, stays: Bool[Array, " T"]
) -> FirstStates:
    """The cache's states, with those after tokens that stay."""
    pairs = zip(first.tables, apart.tables, strict=True)
    tables = tuple(recurrent.put_kept(x, _index(batch), new, stays) for x, new in pairs)
    n_nan = first.nan_scores
    if n_nan is not None and apart.nan_scores is not None:
        n_nan = jnp.asarray(n_nan) + jnp.sum(jnp.where(stays, apart.nan_scores, 0))
    return FirstStates(tables=tables, nan_scores=n_nan)


def _with_first(cache: Cache, first: FirstStates) -> Cache:
    """A cache with other states of the layers that draft."""
    states = cache.states
    if states is not None:
        states = StateStore(tables=(*first.tables, *states.tables[len(first.tables) :]))
    return dataclasses.replace(cache, states=states, nan_scores=first.nan_scores)


def _index(batch: Batch) -> StateIndex:
    assert batch.states is not None, "a step of recurrent layers has state indices"
    return batch.states


def _draft(
    model: LayeredDecoder, cache: Cache, step: RoundStep, where: tuple[StepSpec, int]
) -> tuple[LayerDrafts, Cache]:
    """Single tokens go through the first layers, then rounds, a token of each at a time."""
    spec, exit_layer = where

    def first_layers(batch: Batch, cache: Cache) -> tuple[Float[Array, "T E"], Cache]:
        """The residual stream of tokens behind the first layers, where they are cached."""

        def run(tokens: Array, attend: StepAttention) -> tuple[Array, Array]:
            x = model.layers(model.embed(tokens), attend, 0, exit_layer)
            return x.astype(jnp.float32), x

        (_, x), cache = steps.step(run, cache, batch, spec)
        return x, cache

    def one(carry: tuple[LayerDrafts, Cache]) -> tuple[LayerDrafts, Cache]:
        drafts, cache = carry
        x, cache = first_layers(next_tokens(drafts, step), cache)
        return drafted(model, drafts, x, step), cache

    drafts, single = begun(model, step)
    if single is not None:
        x, cache = first_layers(single, cache)
        drafts = with_singles(drafts, x)
    return lax.while_loop(lambda carry: jnp.any(carry[0].going), one, (drafts, cache))


def n_drafting(step: RoundStep, how: RoundSpec) -> int:
    """How often the first layers run over a token of each round, at most; of a step on the host."""
    if how.exit_layer is None:
        return 0
    return 1 + int(np.max(np.sum(np.asarray(step.rounds.drafts) != NO_DRAFT, axis=1)))


def begun(model: LayeredDecoder, step: RoundStep) -> tuple[LayerDrafts, Batch | None]:
    """Rounds before their newest token, and the tokens of a step that are of none, if any."""
    batch, rounds = step.batch, step.rounds
    tokens = jnp.asarray(batch.tokens)
    x = jax.eval_shape(model.embed, tokens)
    n_single = tokens.shape[0] - rounds.at.size
    drafts = LayerDrafts(
        i=jnp.int32(0),
        going=jnp.asarray(rounds.seq) < step.sampler.seed.shape[0],
        tokens=tokens,
        drafts=jnp.full(rounds.drafts.shape, NO_DRAFT, jnp.int32),
        stream=jnp.zeros(x.shape, x.dtype),
        sampler=of_rounds(rounds, step.sampler),
    )
    return drafts, _single_tokens(batch, n_single) if n_single else None


def with_singles(drafts: LayerDrafts, x: Float[Array, "N E"]) -> LayerDrafts:
    """Keeps the stream of tokens that are of no round; a step begins with them."""
    return dataclasses.replace(drafts, stream=drafts.stream.at[: x.shape[0]].set(x))


def next_tokens(drafts: LayerDrafts, step: RoundStep) -> Batch:
    """Token i of each round; padding where a round is over."""
    batch, here, states = step.batch, _here(drafts, step), None
    if batch.states is not None:
        before = dataclasses.replace(drafts, i=jnp.maximum(drafts.i - 1, 0))
        states = StateIndex(src=_here(before, step), dst=here)

    def of(x: AnyArray, fill: int) -> Array:
        return jnp.asarray(x).at[here].get(mode="fill", fill_value=fill)

    def place(p: Places) -> Places:
        return dataclasses.replace(p, slots=of(p.slots, NOWHERE), seq_blocks=None, fresh=None)

    return Batch(
        tokens=of(drafts.tokens, 0),
        pos=of(batch.pos, -1),
        seq_ids=of(batch.seq_ids, -1),
        places=tuple(map(place, batch.places)),
        out_ids=jnp.arange(here.shape[0], dtype=jnp.int32),
        states=states,
    )


def _here(drafts: LayerDrafts, step: RoundStep) -> Int32[Array, " D"]:
    """Where token i of each round stands in the step."""
    at = jnp.asarray(step.rounds.at)
    return jnp.where(drafts.going, at[:, drafts.i], step.batch.tokens.shape[0])


def drafted(
    model: LayeredDecoder, drafts: LayerDrafts, x: Float[Array, "D E"], step: RoundStep
) -> LayerDrafts:
    """Rounds after their token i, of which x is the stream behind the first layers."""
    rounds, i, n_tokens = step.rounds, drafts.i, step.batch.tokens.shape[0]
    here, at, n_drafts = _here(drafts, step), jnp.asarray(rounds.at), rounds.drafts.shape[1]
    wanted = jnp.pad(jnp.asarray(rounds.drafts) != NO_DRAFT, ((0, 0), (0, 1)))
    going = drafts.going & wanted[:, i]
    alone = recent_alone(drafts.sampler, rounds.last_n)
    token, sampler = _sampled(model, x, alone, jnp.any(going))
    ends = jnp.any(token[:, None] == jnp.asarray(rounds.stop_ids), axis=1)
    going &= ~ends & (token != sample.NO_TOKEN)
    there = jnp.where(going, at[:, jnp.minimum(i + 1, n_drafts)], n_tokens)
    draft = jnp.where(going, token, NO_DRAFT)
    return LayerDrafts(
        i=i + 1,
        going=going,
        tokens=drafts.tokens.at[there].set(token, mode="drop"),
        drafts=drafts.drafts.at[:, i].set(draft, mode="drop"),
        stream=drafts.stream.at[here].set(x, mode="drop"),
        sampler=sampler,
    )


def _sampled(
    model: LayeredDecoder, x: Float[Array, "D E"], sampler: Sampler, wanted: Array
) -> tuple[Int32[Array, " D"], Sampler]:
    """The tokens that are sampled behind the exit; none where none is wanted."""
    nothing = jnp.full(x.shape[0], sample.NO_TOKEN, jnp.int32), sampler
    return lax.cond(
        wanted,
        lambda: sample.sample_tokens(model.head(x).astype(jnp.float32), sampler),
        lambda: nothing,
    )


def to_verify(drafts: LayerDrafts, step: RoundStep) -> RoundStep:
    """The step with the drafts that were made; of others that were wanted there is nothing."""
    real = jnp.ones(drafts.tokens.shape, bool)
    at = jnp.asarray(step.rounds.at)[:, 1:]
    real = real.at[at].set(drafts.drafts != NO_DRAFT, mode="drop")
    batch = dataclasses.replace(
        step.batch,
        tokens=drafts.tokens,
        pos=jnp.where(real, jnp.asarray(step.batch.pos), -1),
        seq_ids=jnp.where(real, jnp.asarray(step.batch.seq_ids), -1),
    )
    rounds = dataclasses.replace(step.rounds, drafts=drafts.drafts)
    return dataclasses.replace(step, batch=batch, rounds=rounds)


def _single_tokens(batch: Batch, n: int) -> Batch:
    """The n tokens that a batch begins with, each the only one of its sequence."""
    places = (
        dataclasses.replace(p, slots=jnp.asarray(p.slots)[:n], fresh=None) for p in batch.places
    )
    ids = jnp.arange(n, dtype=jnp.int32)
    return Batch(
        tokens=jnp.asarray(batch.tokens)[:n],
        pos=jnp.asarray(batch.pos)[:n],
        seq_ids=jnp.asarray(batch.seq_ids)[:n],
        places=tuple(places),
        out_ids=ids,
        states=StateIndex(src=ids, dst=ids) if batch.states else None,
    )


# --- programs ----------------------------------------------------------------------------------


def round_program(programs: Programs, cache: Cache, step: RoundStep, how: RoundSpec) -> Program:
    """The program of a step with rounds, whose drafts are given or made by the first layers."""
    run = verify_round if how.exit_layer is None else layer_skip
    args = programs.params, cache, step
    return Program(run, (programs.kind, how), args, donate=(1,), n_known=2)


def verify_round(
    kind: ModelKind, how: RoundSpec, params: tuple, cache: Cache, step: RoundStep
) -> tuple[Verified, Cache]:
    """`verify` as a program."""
    return verify(kind.model(params), cache, step, kind.spec, how.n_best)


def layer_skip(
    kind: ModelKind, how: RoundSpec, params: tuple, cache: Cache, step: RoundStep
) -> tuple[Verified, Cache]:
    """`draft_and_verify` as a program."""
    assert how.exit_layer is not None, "some layers draft"
    where = kind.spec, how.exit_layer
    return draft_and_verify(kind.in_parts(params), cache, step, where, how.n_best)
