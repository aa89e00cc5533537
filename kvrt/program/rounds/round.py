"""A round of speculative decoding: a step in which some sequences bring drafts, of which some stay.

Each of S sequences gets a token sampled from its own last logits; where that is its first draft,
one from the logits behind the draft, and so on, by the limits, penalties and random numbers of
single steps: so no text depends on drafts. A draft is taken with its probability p, and else the
next token comes from the others in proportion: that is min(1, p / q) and the residual for drafts
that are certain, q = 1.

What stays is known before anything is written, so refused drafts leave no trace.

Source: arXiv:2211.17192, sec. 2.3; arXiv:2304.04487 (drafts from the prompt).
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
from kvrt.cellcache.host_cells import Where
from kvrt.cells.slots import StepTokens, pad
from kvrt.program import sample
from kvrt.program import step as steps
from kvrt.program.batch import Batch, to_batch
from kvrt.program.decode_loop import padded_stops
from kvrt.program.sample import Sampler
from kvrt.program.step import Cache, StepSpec

# In place of a draft where there is none: no token is sampled that equals it.
NO_DRAFT = -2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSpec:
    """What the program of a step with rounds is compiled for.

    Attributes:
      n_best: log-probabilities an output; 0 keeps none.
      exit_layer: layers that make the drafts, see `layer_skip`; None where they are given.
    """

    n_best: int = 0
    exit_layer: int | None = None


@state
class Rounds:
    """D rounds of up to K drafts in a step of T tokens, the last D * (K + 1) of its places.

    The step's first S outputs are of its sequences, round d's of number seq[d]; D * K more follow,
    of the drafts, one round after the other. A round ends where its draft is not the token that is
    sampled, at a draft that is one of `stop_ids`, and where logits give no token.

    Attributes:
      seq: which sequence of the sampler each round is of; S is padding.
      drafts: tokens, padded with `NO_DRAFT`; where the device makes them any others say that one is
        wanted.
      last_n: tokens that count as recent for the sequence's repeat penalty.
      at: where the newest token and the drafts stand in the step; T is padding.
      stop_ids: tokens that end the text, padded with -1.
    """

    seq: Int32[AnyArray, " D"]
    drafts: Int32[AnyArray, "D K"]
    last_n: Int32[AnyArray, " D"]
    at: Int32[AnyArray, "D K1"]
    stop_ids: Int32[AnyArray, "D E"]


@state
class RoundStep:
    """A step with rounds, and the sampler before the first token of each of its S sequences."""

    batch: Batch
    rounds: Rounds
    sampler: Sampler


@state
class Verified:
    """What a step with rounds sampled.

    Attributes:
      first: a token of every sequence, `sample.NO_TOKEN` where its logits gave none.
      more: by round, the tokens sampled after each draft, -1 behind the last one.
      n: by round, tokens sampled: one, and one for each draft that stays.
      n_drafted: by round, drafts that were verified.
      logits: of the outputs.
      best_ids: the B most probable tokens of each output.
      best: their log-probabilities.
      sampler: of each round's sequence, after its last token.
    """

    first: Int32[Array, " S"]
    more: Int32[Array, "D K"]
    n: Int32[Array, " D"]
    n_drafted: Int32[Array, " D"]
    logits: Float[Array, "R V"]
    best_ids: Int32[Array, "R B"]
    best: Float[Array, "R B"]
    sampler: Sampler

    def read(self) -> tuple[list[int], list[list[int]], list[int]]:
        """Fetches `first`, by round the tokens sampled after drafts that stay, and `n_drafted`."""
        # sync: which drafts stay decides what the next step computes, and which texts end
        arrays = self.first, self.more, self.n, self.n_drafted
        first, more, n, n_drafted = (np.asarray(x).tolist() for x in arrays)
        return first, [row[: k - 1] for row, k in zip(more, n, strict=True)], n_drafted


@state
class _Carry:
    i: Int32[Array, ""]
    going: Bool[Array, " D"]
    sampler: Sampler
    more: Int32[Array, "D K"]
    n: Int32[Array, " D"]


def verify(
    model: Any, cache: Cache, step: RoundStep, spec: StepSpec, n_best: int
) -> tuple[Verified, Cache]:
    """Runs a step whose drafts are given.

    Args:
      model: a `kvrt.attention.Decoder`.
      cache: donated by jitted callers.
      step: tokens, slots and blocks, the rounds, and how each sequence's next token is sampled.
      spec: as for `forward`.
      n_best: log-probabilities an output, static.

    Returns:
      What was sampled, and the cache with the step's tokens, but for drafts that do not stay.
    """

    def run(tokens: Array, attend: StepAttention) -> tuple[Array, Verified]:
        attend.one_by_one()
        logits = model(tokens, attend, step.batch.out_ids).astype(jnp.float32)
        verified, stays = accept(logits, step, n_best)
        attend.keep(stays)
        return logits, verified

    (_, verified), cache = steps.step(run, cache, step.batch, spec)
    return verified, cache


def accept(
    logits: Float[Array, "R V"], step: RoundStep, n_best: int
) -> tuple[Verified, Bool[Array, " T"]]:
    """Samples a token of each sequence, and more where drafts are those; which tokens stay."""
    rounds, n_seqs = step.rounds, step.sampler.seed.shape[0]
    n_rounds, n_drafts = rounds.drafts.shape
    drafts, seq = _acceptable(rounds), jnp.asarray(rounds.seq)
    first, after = sample.sample_tokens(logits[:n_seqs], step.sampler)
    behind = logits[n_seqs:].reshape(n_rounds, n_drafts, -1)

    def one(c: _Carry) -> _Carry:
        here = lax.dynamic_index_in_dim(behind, c.i, axis=1, keepdims=False)
        tokens, sampler = sample.sample_tokens(here, recent_alone(c.sampler, rounds.last_n))
        return _Carry(
            i=c.i + 1,
            going=c.going & (tokens == drafts[:, c.i + 1]),
            sampler=_where(c.going, sampler, c.sampler),
            more=c.more.at[:, c.i].set(jnp.where(c.going, tokens, -1)),
            n=c.n + c.going.astype(jnp.int32),
        )

    begun = _Carry(
        i=jnp.int32(0),
        going=(seq < n_seqs) & (first[jnp.minimum(seq, n_seqs - 1)] == drafts[:, 0]),
        sampler=of_rounds(rounds, after),
        more=jnp.full((n_rounds, n_drafts), -1, jnp.int32),
        n=jnp.ones(n_rounds, jnp.int32),
    )
    last = lax.while_loop(lambda c: jnp.any(c.going) & (c.i < n_drafts), one, begun)
    best_ids, best = _log_probs(logits, n_best)
    verified = Verified(
        first=first,
        more=last.more,
        n=last.n,
        n_drafted=jnp.sum(rounds.drafts != NO_DRAFT, axis=1, dtype=jnp.int32),
        logits=logits,
        best_ids=best_ids,
        best=best,
        sampler=last.sampler,
    )
    return verified, stays_of(rounds, last.n, step.batch.tokens.shape[0])


def stays_of(rounds: Rounds, n: Int32[AnyArray, " D"], n_tokens: int) -> Bool[Array, " T"]:
    """Which tokens of a step stay: of each round the first n, and all that are of none."""
    kept = lax.broadcasted_iota(jnp.int32, rounds.at.shape, 1) < n[:, None]
    return jnp.ones(n_tokens, bool).at[jnp.asarray(rounds.at)].set(kept, mode="drop")


def _acceptable(rounds: Rounds) -> Int32[Array, "D K1"]:
    """Drafts that a round goes on behind, and none behind the last."""
    drafts = jnp.asarray(rounds.drafts)
    ends = jnp.any(drafts[:, :, None] == jnp.asarray(rounds.stop_ids)[:, None], axis=2)
    drafts = jnp.where(ends, jnp.int32(NO_DRAFT), drafts)
    return jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=NO_DRAFT)


def _log_probs(
    logits: Float[Array, "R V"], n_best: int
) -> tuple[Int32[Array, "R B"], Float[Array, "R B"]]:
    """`sample.log_probs` of one output at a time, whose sums are those of single steps."""
    ids, values = lax.map(lambda x: sample.log_probs(x[None], n_best), logits)
    return ids[:, 0], values[:, 0]


def of_rounds(rounds: Rounds, sampler: Sampler) -> Sampler:
    """The sampler of each round's sequence."""
    seq = jnp.minimum(jnp.asarray(rounds.seq), sampler.seed.shape[0] - 1)
    return jax.tree.map(lambda x: jnp.asarray(x)[seq], sampler)


def recent_alone(sampler: Sampler, last_n: Int32[AnyArray, " D"]) -> Sampler:
    """The sampler without tokens that have become too old for a repeat penalty."""
    recent = jnp.asarray(sampler.recent)
    age = recent.shape[1] - lax.broadcasted_iota(jnp.int32, recent.shape, 1)
    recent = jnp.where(age <= jnp.asarray(last_n)[:, None], recent, sample.NO_TOKEN)
    return dataclasses.replace(sampler, recent=recent)


def _where(going: Bool[Array, " D"], new: Sampler, old: Sampler) -> Sampler:
    """The new samplers of rounds that go on, the old ones of the others."""

    def chosen(x: Array, y: Array) -> Array:
        return jnp.where(going.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(chosen, new, old)


# --- on the host -------------------------------------------------------------------------------


class Drafted(NamedTuple):
    """The drafts of a sequence.

    Attributes:
      number: of the sequence in the sampler.
      first: where its newest token stands in the step; the drafts stand behind it.
      last_n: tokens that count as recent for its repeat penalty.
      drafts: tokens.
      stop_ids: tokens that end its text.
    """

    number: int
    first: int
    last_n: int
    drafts: Sequence[int]
    stop_ids: Sequence[int] = ()


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
    last_n, most = np.zeros(n_rounds, np.int32), max(len(x.stop_ids) for x in drafted)
    stop_ids = np.stack([padded_stops((), most)] * n_rounds)
    for i, x in enumerate(drafted):
        n = len(x.drafts)
        seq[i], last_n[i], ids[i, :n] = x.number, x.last_n, x.drafts
        at[i, : n + 1] = np.arange(x.first, x.first + n + 1)
        stop_ids[i] = padded_stops(x.stop_ids, most)
    outputs = np.where(at[:, 1:] < n_tokens, at[:, 1:], 0).reshape(-1)
    rounds = Rounds(seq=seq, drafts=ids, last_n=last_n, at=at, stop_ids=stop_ids)
    return rounds, outputs


def round_step(
    step: StepTokens,
    where: Where,
    drafted: Sequence[Drafted],
    size: tuple[int, int],
    sampler: Sampler,
) -> RoundStep:
    """The arrays of a step with drafts.

    Args:
      step: tokens with a block list of their own, then those of the rounds.
      where: its slots, blocks and state indices.
      drafted: of each round.
      size: rounds and drafts that the program is compiled for.
      sampler: of the step's sequences, before each one's first token.
    """
    n_seqs = len(sampler.seed)
    rounds, outputs = plan_rounds(drafted, size, n_seqs, step.size)
    firsts = pad([*range(step.n_single), *(x.first for x in drafted)], n_seqs, 0)
    batch = to_batch(step, where, np.concatenate([firsts, outputs]))
    return RoundStep(batch=batch, rounds=rounds, sampler=sampler)
