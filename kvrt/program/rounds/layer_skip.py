"""Rounds whose drafts the first layers of the model make, and the others verify.

    layers [0, E)   the newest token of every sequence, then its drafts, one of each at a time
    layers [E, L)   all tokens of the step at once, from the residual stream that was kept of each

So every layer runs once a token. The cells of refused drafts are empty afterwards: the slots of a
round were empty before it, or those of tokens that no later one sees.

Source: arXiv:2404.16710 (LayerSkip), sec. 4.3.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.attention.contract import LayeredDecoder
from kvrt.attention.step_attention import StepAttention
from kvrt.cells import vacate
from kvrt.config import GroupSpec
from kvrt.errors import BadConfig
from kvrt.program import sample
from kvrt.program import step as steps
from kvrt.program.batch import Batch
from kvrt.program.layer_range import in_parts, in_place
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


@state
class _Drafting:
    """Token i of each round that goes on is next; the stream that was kept of the step's tokens."""

    i: Int32[Array, ""]
    going: Bool[Array, " D"]
    tokens: Int32[Array, " T"]
    drafts: Int32[Array, "D K"]
    stream: Float[Array, "T E"]
    cache: Cache
    sampler: Sampler


def check_exit(programs: Programs, exit_layer: int) -> None:
    """Refuses a model whose first layers cannot draft for the others.

    Raises:
      BadConfig: there are too few layers, it cannot be run in parts, it keeps recurrent states, or
        a layer behind the exit reads keys and values of one before it.
    """
    layout = programs.spec.layout
    n_layers = layout.n_layers
    if not 0 < exit_layer < n_layers:
        raise BadConfig(
            f"exit_layer is {exit_layer}, and the model has {n_layers} layers; some of them must "
            "draft and some verify: choose more than 0 and fewer than all"
        )
    if layout.recurrent:
        raise BadConfig(
            "LayerSkip drafts by attention layers; this model has recurrent ones, whose states of "
            "refused drafts cannot be taken back: use PromptLookup or DraftModel"
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
    jax.eval_shape(lambda p, t: in_parts(programs.kind.model(p)).embed(t), programs.params, token)


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
    step, cache = _with_fresh_blocks(step, cache, where[0])
    drafted = _draft(model, cache, step, where)
    return _verify(model, drafted, step, where, n_best)


def _with_fresh_blocks(step: RoundStep, cache: Cache, spec: StepSpec) -> tuple[RoundStep, Cache]:
    """Blocks that the step begins are emptied once, before its first layers write there."""
    layout, cells, places = spec.layout, list(cache.cells), []
    for i, of_group in zip(layout.store_of, step.batch.places, strict=True):
        if of_group.fresh is not None:
            cells[i] = vacate(cells[i], of_group.fresh, layout.stores[i].extent.block_size)
        places.append(dataclasses.replace(of_group, fresh=None))
    batch = dataclasses.replace(step.batch, places=tuple(places))
    after = dataclasses.replace(cache, cells=tuple(cells))
    return dataclasses.replace(step, batch=batch), after


def _draft(
    model: LayeredDecoder, cache: Cache, step: RoundStep, where: tuple[StepSpec, int]
) -> _Drafting:
    """Single tokens go through the first layers, then rounds, a token of each at a time."""
    batch, rounds = step.batch, step.rounds
    (n_rounds, n_drafts), n_tokens = rounds.drafts.shape, batch.tokens.shape[0]
    at, tokens = jnp.asarray(rounds.at), jnp.asarray(batch.tokens)
    x = jax.eval_shape(model.embed, tokens)
    stream = jnp.zeros(x.shape, x.dtype)
    if n_single := n_tokens - at.size:
        x, cache = _first_layers(model, cache, _single_tokens(batch, n_single), where)
        stream = stream.at[:n_single].set(x)
    first = _Drafting(
        i=jnp.int32(0),
        going=jnp.asarray(rounds.seq) < step.sampler.seed.shape[0],
        tokens=tokens,
        drafts=jnp.full((n_rounds, n_drafts), NO_DRAFT, jnp.int32),
        stream=stream,
        cache=cache,
        sampler=of_rounds(rounds, step.sampler),
    )
    wanted = jnp.pad(jnp.asarray(rounds.drafts) != NO_DRAFT, ((0, 0), (0, 1)))

    def one(c: _Drafting) -> _Drafting:
        here = jnp.where(c.going, at[:, c.i], n_tokens)
        x, cache = _first_layers(model, c.cache, _at(batch, c.tokens, here), where)
        going = c.going & wanted[:, c.i]
        alone = recent_alone(c.sampler, rounds.last_n)
        token, sampler = _sampled(model, x, alone, jnp.any(going))
        ends = jnp.any(token[:, None] == jnp.asarray(rounds.stop_ids), axis=1)
        going &= ~ends & (token != sample.NO_TOKEN)
        there = jnp.where(going, at[:, jnp.minimum(c.i + 1, n_drafts)], n_tokens)
        return _Drafting(
            i=c.i + 1,
            going=going,
            tokens=c.tokens.at[there].set(token, mode="drop"),
            drafts=c.drafts.at[:, c.i].set(jnp.where(going, token, NO_DRAFT), mode="drop"),
            stream=c.stream.at[here].set(x, mode="drop"),
            cache=cache,
            sampler=sampler,
        )

    return lax.while_loop(lambda c: jnp.any(c.going), one, first)


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


def _first_layers(
    model: LayeredDecoder, cache: Cache, batch: Batch, where: tuple[StepSpec, int]
) -> tuple[Float[Array, "T E"], Cache]:
    """The residual stream of tokens behind the first layers, where they are cached."""
    spec, exit_layer = where

    def run(tokens: Array, attend: StepAttention) -> tuple[Array, Array]:
        x = model.layers(model.embed(tokens), attend, 0, exit_layer)
        attend.keep(jnp.asarray(batch.pos) >= 0)
        return x.astype(jnp.float32), x

    (_, x), cache = steps.step(run, cache, batch, spec)
    return x, cache


def _verify(
    model: LayeredDecoder,
    drafted: _Drafting,
    step: RoundStep,
    where: tuple[StepSpec, int],
    n_best: int,
) -> tuple[Verified, Cache]:
    """The other layers over all tokens of the step; those that stay are cached."""
    (spec, exit_layer), n_layers = where, where[0].layout.n_layers
    # Of drafts that were wanted and not made there is nothing.
    real = jnp.ones(drafted.tokens.shape, bool)
    at = jnp.asarray(step.rounds.at)[:, 1:]
    real = real.at[at].set(drafted.drafts != NO_DRAFT, mode="drop")
    batch = dataclasses.replace(
        step.batch,
        tokens=drafted.tokens,
        pos=jnp.where(real, jnp.asarray(step.batch.pos), -1),
        seq_ids=jnp.where(real, jnp.asarray(step.batch.seq_ids), -1),
    )
    rounds = dataclasses.replace(step.rounds, drafts=drafted.drafts)
    made = dataclasses.replace(step, batch=batch, rounds=rounds)

    def run(_: Array, attend: StepAttention) -> tuple[Array, Verified]:
        attend.one_by_one()
        x = model.layers(drafted.stream, attend, exit_layer, n_layers)
        logits = model.head(x[jnp.asarray(batch.out_ids)]).astype(jnp.float32)
        return logits, accept(logits, made, attend, n_best)

    # Layers behind the exit have cached nothing of these tokens.
    (_, verified), cache = in_place(run, drafted.cache, batch, spec)
    return verified, cache


def _single_tokens(batch: Batch, n: int) -> Batch:
    """The n tokens that a batch begins with, each the only one of its sequence."""
    places = (dataclasses.replace(p, slots=jnp.asarray(p.slots)[:n]) for p in batch.places)
    return Batch(
        tokens=jnp.asarray(batch.tokens)[:n],
        pos=jnp.asarray(batch.pos)[:n],
        seq_ids=jnp.asarray(batch.seq_ids)[:n],
        places=tuple(places),
        out_ids=batch.out_ids,
    )


def _at(batch: Batch, tokens: Array, at: Int32[Array, " D"]) -> Batch:
    """Some tokens of rounds; padding where there is none."""

    def of(x: AnyArray, fill: int) -> Array:
        return jnp.asarray(x).at[at].get(mode="fill", fill_value=fill)

    places = (dataclasses.replace(p, slots=of(p.slots, 0), seq_blocks=None) for p in batch.places)
    return Batch(
        tokens=of(tokens, 0),
        pos=of(batch.pos, -1),
        seq_ids=of(batch.seq_ids, -1),
        places=tuple(places),
        out_ids=batch.out_ids,
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
    return draft_and_verify(in_parts(kind.model(params)), cache, step, where, how.n_best)
