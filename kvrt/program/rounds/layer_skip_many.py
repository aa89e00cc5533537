"""Rounds of several sequences in one step of an engine, whose drafts the first layers make.

    layers [0, E)   the newest token of every sequence, then its drafts, one of each at a time
    layers [E, L)   all tokens of the step at once, from the residual stream that was kept of each

See `layer_skip` for one sequence, `verify_many` for what stays.

Source: arXiv:2404.16710 (LayerSkip), sec. 4.3.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.attention.contract import LayeredDecoder
from kvrt.attention.step_attention import StepAttention
from kvrt.cells import vacate
from kvrt.program import sample
from kvrt.program import step as steps
from kvrt.program.batch import Batch
from kvrt.program.device import Device
from kvrt.program.layer_range import in_parts, in_place
from kvrt.program.programs import ModelKind, Program, Programs
from kvrt.program.rounds.layer_skip import sampled_behind
from kvrt.program.rounds.verify_many import (
    NO_DRAFT,
    Accepted,
    Rounds,
    accept_rounds,
    recent_alone,
    stays_of,
)
from kvrt.program.sample import Sampler
from kvrt.program.step import Cache, StepSpec


@state
class ExitRounds:
    """A step whose rounds are drafted on the device.

    Attributes:
      batch: tokens; what stands in the places of drafts is of no account.
      rounds: likewise; `NO_DRAFT` says that none is wanted.
      sampler: before the first token of each sequence is sampled.
      stop_ids: by round the tokens that end it, padded with -1: none is drafted.
    """

    batch: Batch
    rounds: Rounds
    sampler: Sampler
    stop_ids: Int32[AnyArray, "D E"]


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


def draft_and_verify_many(
    model: LayeredDecoder, cache: Cache, asked: ExitRounds, spec: StepSpec, exit_layer: int
) -> tuple[tuple[Accepted, Int32[Array, " D"], Float[Array, "R V"]], Cache]:
    """Runs a step on the device.

    Args:
      model: it can be run in parts.
      cache: donated by jitted callers.
      asked: tokens; the blocks that rounds read have the slots of their drafts.
      spec: as for `forward`.
      exit_layer: layers that draft.

    Returns:
      What was sampled, how many tokens were drafted in each round, and the logits of all outputs;
      and the cache with the step's tokens, but for drafts that do not stay.
    """
    asked, cache = _with_fresh_blocks(asked, cache, spec)
    drafted = _draft(model, cache, asked, (spec, exit_layer))
    rounds = dataclasses.replace(asked.rounds, drafts=drafted.drafts)
    accepted, logits, cache = _verify(model, drafted, asked, rounds, (spec, exit_layer))
    n_drafted = jnp.sum(drafted.drafts != NO_DRAFT, axis=1, dtype=jnp.int32)
    return (accepted, n_drafted, logits), cache


def _with_fresh_blocks(asked: ExitRounds, cache: Cache, spec: StepSpec) -> tuple[ExitRounds, Cache]:
    """Blocks that the step begins are emptied once, before its first layers write there."""
    layout, cells, places = spec.layout, list(cache.cells), []
    for i, of_group in zip(layout.store_of, asked.batch.places, strict=True):
        if of_group.fresh is not None:
            cells[i] = vacate(cells[i], of_group.fresh, layout.stores[i].extent.block_size)
        places.append(dataclasses.replace(of_group, fresh=None))
    batch = dataclasses.replace(asked.batch, places=tuple(places))
    after = dataclasses.replace(cache, cells=tuple(cells))
    return dataclasses.replace(asked, batch=batch), after


def _draft(
    model: LayeredDecoder, cache: Cache, asked: ExitRounds, where: tuple[StepSpec, int]
) -> _Drafting:
    """Single tokens go through the first layers, then rounds, a token of each at a time."""
    batch, rounds, n_seqs = asked.batch, asked.rounds, asked.sampler.seed.shape[0]
    (n_rounds, n_drafts), n_tokens = rounds.drafts.shape, batch.tokens.shape[0]
    seq, at, tokens = jnp.asarray(rounds.seq), jnp.asarray(rounds.at), jnp.asarray(batch.tokens)
    alone, cache = _first_layers(model, cache, _single_tokens(batch, n_seqs), where)
    sampler = jax.tree.map(jnp.asarray, asked.sampler)
    first = _Drafting(
        i=jnp.int32(0),
        going=seq < n_seqs,
        tokens=tokens,
        drafts=jnp.full((n_rounds, n_drafts), NO_DRAFT, jnp.int32),
        stream=jnp.zeros((n_tokens, alone.shape[1]), alone.dtype).at[:n_seqs].set(alone),
        cache=cache,
        sampler=jax.tree.map(lambda x: x[jnp.minimum(seq, n_seqs - 1)], sampler),
    )
    wanted = jnp.pad(jnp.asarray(rounds.drafts) != NO_DRAFT, ((0, 0), (0, 1)))

    def one(c: _Drafting) -> _Drafting:
        here = jnp.where(c.going, at[:, c.i], n_tokens)
        x, cache = _first_layers(model, c.cache, _at(batch, c.tokens, here), where)
        going = c.going & wanted[:, c.i]
        alone = recent_alone(c.sampler, rounds.last_n)
        token, sampler = sampled_behind(model, x, alone, jnp.any(going))
        ends = jnp.any(token[:, None] == jnp.asarray(asked.stop_ids), axis=1)
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
    asked: ExitRounds,
    rounds: Rounds,
    where: tuple[StepSpec, int],
) -> tuple[Accepted, Float[Array, "R V"], Cache]:
    """The other layers over all tokens of the step; those that stay are cached."""
    (spec, exit_layer), n_tokens = where, drafted.tokens.shape[0]
    n_layers = spec.layout.n_layers
    # Of drafts that were wanted and not made there is nothing.
    at = jnp.asarray(rounds.at)[:, 1:]
    real = jnp.ones(n_tokens, bool).at[at].set(rounds.drafts != NO_DRAFT, mode="drop")
    batch = dataclasses.replace(
        asked.batch,
        tokens=drafted.tokens,
        pos=jnp.where(real, jnp.asarray(asked.batch.pos), -1),
        seq_ids=jnp.where(real, jnp.asarray(asked.batch.seq_ids), -1),
    )

    def run(_: Array, attend: StepAttention) -> tuple[Array, Accepted]:
        attend.one_by_one()
        x = model.layers(drafted.stream, attend, exit_layer, n_layers)
        logits = model.head(x[jnp.asarray(batch.out_ids)]).astype(jnp.float32)
        accepted = accept_rounds(logits, rounds, asked.sampler)
        attend.keep(stays_of(rounds, accepted, n_tokens))
        return logits, accepted

    # Layers behind the exit have cached nothing of these tokens.
    (logits, accepted), cache = in_place(run, drafted.cache, batch, spec)
    return accepted, logits, cache


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


def run_rounds_on(
    device: Device, asked: ExitRounds, exit_layer: int
) -> tuple[Accepted, Array, Int32[Array, " D"]]:
    """Runs a step on a device's cache; what was sampled, the logits, tokens drafted by round."""
    program = exit_rounds_program(device.programs, device.cache, asked, exit_layer)
    (accepted, n_drafted, logits), device.cache = device.programs.run(program)
    return accepted, logits, n_drafted


def exit_rounds_program(
    programs: Programs, cache: Cache, asked: ExitRounds, exit_layer: int
) -> Program:
    """The program of a step with rounds that the first layers draft."""
    args = programs.params, cache, asked
    return Program(layer_skip_many, (programs.kind, exit_layer), args, donate=(1,), n_known=2)


def layer_skip_many(
    kind: ModelKind, exit_layer: int, params: tuple, cache: Cache, asked: ExitRounds
) -> Any:
    """`draft_and_verify_many` as a program."""
    model = in_parts(kind.model(params))
    return draft_and_verify_many(model, cache, asked, kind.spec, exit_layer)
