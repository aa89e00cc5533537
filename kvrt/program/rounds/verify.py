"""One round of speculative decoding: a step over a token and its drafts, of which some stay.

The tokens after the first are drafts. Token i + 1 stays if it is the one that is sampled after
token i, by the same limits, penalties and random numbers as without drafts: so the text does not
depend on them. A draft is taken with its probability p, and else the next token comes from the
others in proportion: that is min(1, p / q) and the residual for drafts that are certain, q = 1.

What stays is known before anything is written, so tokens that do not stay leave no trace.

Source: arXiv:2211.17192, sec. 2.3; arXiv:2304.04487 (drafts from the prompt).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.attention.step_attention import StepAttention
from kvrt.cells.slots import Places
from kvrt.program import sample
from kvrt.program import step as steps
from kvrt.program.batch import Batch, padded
from kvrt.program.decode_loop import Sampled, padded_stops
from kvrt.program.programs import ModelKind, Program, Programs
from kvrt.program.step import Cache, StepSpec
from kvrt.store.recurrent import StateIndex


@state
class Round:
    """A token of one sequence and its drafts, the first n_steps of a batch; the rest is padding.

    It ends behind n_steps tokens sampled, at one of `stop_ids` (padded with -1), where a draft is
    not the token that is sampled, or where logits give no token.
    """

    batch: Batch
    n_steps: Int32[AnyArray, ""]
    stop_ids: Int32[AnyArray, " E"]


@state
class _Carry:
    ended: Bool[Array, ""]
    sampler: sample.Sampler
    sampled: Sampled


def plan_round(
    tokens: Sequence[int] | np.ndarray,
    first: tuple[int, int],
    where: tuple[Sequence[Places], StateIndex | None],
    size: int,
    stop_ids: Sequence[int],
) -> Round:
    """The round of a token and its drafts.

    Args:
      tokens: at least the one that is fed.
      first: the sequence, and the position of the first token.
      where: slots and state indices of `size` tokens.
      size: tokens that the program is compiled for.
      stop_ids: tokens that end it.
    """
    (seq_id, pos), n = first, len(tokens)
    at = np.arange(pos, pos + n, dtype=np.int32)
    ids, mine = np.asarray(tokens, np.int32), np.full(n, seq_id, np.int32)
    batch = padded(ids, at, mine, range(size), where, size)
    n_steps = np.asarray(n, np.int32)
    return Round(batch=batch, n_steps=n_steps, stop_ids=padded_stops(stop_ids))


def verify(
    model: Any, cache: Cache, plan: Round, sampler: sample.Sampler, spec: StepSpec, n_best: int
) -> tuple[Sampled, Cache, sample.Sampler]:
    """Runs a round on the device.

    Args:
      model: a `kvrt.attention.Decoder`.
      cache: donated by jitted callers.
      plan: tokens, slots and blocks.
      sampler: its state before the first token is sampled.
      spec: as for `forward`.
      n_best: K, static; 0 keeps no log-probabilities.

    Returns:
      What was sampled, [T, 1]; the cache with the first Sampled.n_steps tokens of the batch, which
      are the first and the drafts that stay; and the sampler.
    """

    def run(tokens: Array, attend: StepAttention) -> tuple[Array, Sampled, sample.Sampler]:
        attend.one_by_one()
        logits = model(tokens, attend, plan.batch.out_ids).astype(jnp.float32)
        sampled, after = accept(logits, plan, sampler, n_best)
        attend.keep(jnp.arange(tokens.shape[0], dtype=jnp.int32) < sampled.n_steps)
        return logits, sampled, after

    (_, sampled, last), cache = steps.step(run, cache, plan.batch, spec)
    return sampled, cache, last


def accept(
    logits: Float[Array, "T V"], plan: Round, sampler: sample.Sampler, n_best: int
) -> tuple[Sampled, sample.Sampler]:
    """What is sampled after each token, up to the first that is not the next draft."""
    m = logits.shape[0]
    tokens = jnp.asarray(plan.batch.tokens)
    # Behind the last token there is no draft.
    drafts = jnp.concatenate([tokens[1:], jnp.full(1, sample.NO_TOKEN, jnp.int32)])
    sampled = Sampled(
        n_steps=jnp.int32(0),
        tokens=jnp.full((m, 1), -1, jnp.int32),
        best_ids=jnp.zeros((m, 1, n_best), jnp.int32),
        best=jnp.zeros((m, 1, n_best), jnp.float32),
    )

    def more(c: _Carry) -> Array:
        return (c.sampled.n_steps < plan.n_steps) & ~c.ended

    def one(c: _Carry) -> _Carry:
        i = c.sampled.n_steps
        here = lax.dynamic_slice_in_dim(logits, i, 1)
        token, sampler = sample.sample_tokens(here, c.sampler)
        ids, best = sample.log_probs(here, n_best)
        sampled = dataclasses.replace(
            c.sampled,
            n_steps=i + 1,
            tokens=c.sampled.tokens.at[i].set(token, mode="drop"),
            best_ids=c.sampled.best_ids.at[i].set(ids, mode="drop"),
            best=c.sampled.best.at[i].set(best, mode="drop"),
        )
        stops = jnp.any(token == jnp.asarray(plan.stop_ids)) | (token[0] == sample.NO_TOKEN)
        return _Carry(ended=stops | (token[0] != drafts[i]), sampler=sampler, sampled=sampled)

    first = jax.tree.map(jnp.asarray, sampler)
    last = lax.while_loop(
        more, one, _Carry(ended=jnp.asarray(False), sampler=first, sampled=sampled)
    )
    return last.sampled, last.sampler


def program(
    programs: Programs, cache: Cache, plan: Round, sampler: sample.Sampler, n_best: int
) -> Program:
    """The program of a round."""
    args = programs.params, cache, plan, sampler
    return Program(verify_round, (programs.kind, n_best), args, donate=(1,), n_known=2)


def verify_round(
    kind: ModelKind, n_best: int, params: tuple, cache: Cache, plan: Round, sampler: sample.Sampler
) -> tuple[Sampled, Cache, sample.Sampler]:
    """`verify` as a program."""
    return verify(kind.model(params), cache, plan, sampler, kind.spec, n_best)
