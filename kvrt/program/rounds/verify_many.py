"""Rounds of several sequences in one step of an engine: each its newest token and its drafts.

The step's other tokens are as in any step. Every sequence gets a token sampled from its own last
logits, as without drafts; where that is its first draft, one from the next logits, and so on, by
the limits, penalties and random numbers that later steps would sample by. What stays is known
before anything is written.

Source: see `verify`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.attention.step_attention import StepAttention
from kvrt.program import sample
from kvrt.program import step as steps
from kvrt.program.batch import Batch
from kvrt.program.programs import ModelKind, Program, Programs
from kvrt.program.sample import Sampler
from kvrt.program.step import Cache, StepSpec

# In place of a draft where there is none: no token is sampled that equals it.
NO_DRAFT = -2


@state
class Rounds:
    """D rounds of up to K drafts in a step of T tokens, of S sequences that get tokens.

    The batch's first S outputs are of its sequences, round d's of number seq[d]; D * K more follow,
    of the drafts, one round after the other.

    Attributes:
      seq: which sequence of the sampler each round is of; S is padding.
      drafts: tokens, padded with `NO_DRAFT`.
      last_n: tokens that count as recent for the sequence's repeat penalty.
      at: where the newest token and the drafts stand in the step; T is padding.
    """

    seq: Int32[AnyArray, " D"]
    drafts: Int32[AnyArray, "D K"]
    last_n: Int32[AnyArray, " D"]
    at: Int32[AnyArray, "D K1"]


@state
class Accepted:
    """What was sampled.

    Attributes:
      first: a token of every sequence. `[S]`
      more: by round, the tokens sampled after each draft, -1 behind the last one.
      n: by round, tokens sampled: one, and one for each draft that stays.
    """

    first: Int32[Array, " S"]
    more: Int32[Array, "D K"]
    n: Int32[Array, " D"]


@state
class _Carry:
    i: Int32[Array, ""]
    going: Bool[Array, " D"]
    sampler: Sampler
    more: Int32[Array, "D K"]
    n: Int32[Array, " D"]


def verify_many(
    model: Any, cache: Cache, args: tuple[Batch, Rounds, Sampler], spec: StepSpec
) -> tuple[Accepted, Float[Array, "R V"], Cache]:
    """Runs a step with rounds on the device.

    Args:
      model: a `kvrt.attention.Decoder`.
      cache: donated by jitted callers.
      args: the step's tokens, its rounds, and how each sequence's next token is sampled.
      spec: as for `forward`.

    Returns:
      What was sampled; the logits of all outputs; and the cache with the step's tokens, but for
      drafts that do not stay.
    """
    batch, rounds, sampler = args

    def run(tokens: Array, attend: StepAttention) -> tuple[Array, Accepted]:
        attend.one_by_one()
        logits = model(tokens, attend, batch.out_ids).astype(jnp.float32)
        accepted = accept_rounds(logits, rounds, sampler)
        attend.keep(stays_of(rounds, accepted, tokens.shape[0]))
        return logits, accepted

    (logits, accepted), cache = steps.step(run, cache, batch, spec)
    return accepted, logits, cache


def accept_rounds(logits: Float[Array, "R V"], rounds: Rounds, sampler: Sampler) -> Accepted:
    """What is sampled: a token of each sequence, and more where drafts are those."""
    n_seqs, (n_rounds, n_drafts) = sampler.seed.shape[0], rounds.drafts.shape
    # Behind the last draft there is none, so that the round ends.
    drafts = jnp.pad(jnp.asarray(rounds.drafts), ((0, 0), (0, 1)), constant_values=NO_DRAFT)
    seq = jnp.asarray(rounds.seq)
    first, after = sample.sample_tokens(logits[:n_seqs], sampler)
    behind = logits[n_seqs:].reshape(n_rounds, n_drafts, -1)
    mine = jax.tree.map(lambda x: x[jnp.minimum(seq, n_seqs - 1)], after)
    none = jnp.full((n_rounds, n_drafts), -1, jnp.int32)

    def one(c: _Carry) -> _Carry:
        here = lax.dynamic_index_in_dim(behind, c.i, axis=1, keepdims=False)
        tokens, sampler = sample.sample_tokens(here, recent_alone(c.sampler, rounds.last_n))
        wanted = drafts[:, c.i + 1]
        return _Carry(
            i=c.i + 1,
            going=c.going & (tokens == wanted),
            sampler=sampler,
            more=c.more.at[:, c.i].set(jnp.where(c.going, tokens, -1)),
            n=c.n + c.going.astype(jnp.int32),
        )

    begun = _Carry(
        i=jnp.int32(0),
        going=(seq < n_seqs) & (first[jnp.minimum(seq, n_seqs - 1)] == drafts[:, 0]),
        sampler=mine,
        more=none,
        n=jnp.ones(n_rounds, jnp.int32),
    )
    last = lax.while_loop(lambda c: jnp.any(c.going) & (c.i < n_drafts), one, begun)
    return Accepted(first=first, more=last.more, n=last.n)


def stays_of(rounds: Rounds, accepted: Accepted, n_tokens: int) -> Bool[Array, " T"]:
    """Which tokens of a step stay: all but drafts that are not what was sampled."""
    kept = lax.broadcasted_iota(jnp.int32, rounds.at.shape, 1) < accepted.n[:, None]
    return jnp.ones(n_tokens, bool).at[jnp.asarray(rounds.at)].set(kept, mode="drop")


def recent_alone(sampler: Sampler, last_n: Int32[AnyArray, " D"]) -> Sampler:
    """The sampler without tokens that have become too old for a repeat penalty."""
    recent = jnp.asarray(sampler.recent)
    age = recent.shape[1] - lax.broadcasted_iota(jnp.int32, recent.shape, 1)
    recent = jnp.where(age <= jnp.asarray(last_n)[:, None], recent, sample.NO_TOKEN)
    return dataclasses.replace(sampler, recent=recent)


class Drafted(NamedTuple):
    """The drafts of a sequence.

    Attributes:
      number: of the sequence in the sampler.
      first: where its newest token stands in the step; the drafts stand behind it.
      last_n: tokens that count as recent for its repeat penalty.
      drafts: tokens.
    """

    number: int
    first: int
    last_n: int
    drafts: tuple[int, ...]


def plan_rounds(
    drafted: Sequence[Drafted], size: tuple[int, int], n_seqs: int, n_tokens: int
) -> tuple[Rounds, Int32[np.ndarray, " DK"]]:
    """Rounds, and the outputs of their drafts.

    Args:
      drafted: of each round.
      size: rounds and drafts that the program is compiled for.
      n_seqs: sequences of the sampler.
      n_tokens: tokens of the step.
    """
    n_rounds, n_drafts = size
    seq = np.full(n_rounds, n_seqs, np.int32)
    ids = np.full((n_rounds, n_drafts), NO_DRAFT, np.int32)
    at = np.full((n_rounds, n_drafts + 1), n_tokens, np.int32)
    last_n = np.zeros(n_rounds, np.int32)
    for i, x in enumerate(drafted):
        n = len(x.drafts)
        seq[i], last_n[i], ids[i, :n] = x.number, x.last_n, x.drafts
        at[i, : n + 1] = np.arange(x.first, x.first + n + 1)
    outputs = np.where(at[:, 1:] < n_tokens, at[:, 1:], 0).reshape(-1)
    return Rounds(seq=seq, drafts=ids, last_n=last_n, at=at), outputs


def rounds_program(
    programs: Programs, cache: Cache, args: tuple[Batch, Rounds, Sampler]
) -> Program:
    """The program of a step with rounds."""
    all_args = programs.params, cache, args
    return Program(verify_rounds, (programs.kind,), all_args, donate=(1,), n_known=2)


def verify_rounds(
    kind: ModelKind, params: tuple, cache: Cache, args: tuple[Batch, Rounds, Sampler]
) -> tuple[Accepted, Float[Array, "R V"], Cache]:
    """`verify_many` as a program."""
    return verify_many(kind.model(params), cache, args, kind.spec)
