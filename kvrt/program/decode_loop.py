"""Many decode steps in one compiled program: step, sample, feed back, stop early.

The host plans the slots of all steps beforehand; between them nothing returns to it.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.cells.slots import Places, pad
from kvrt.program import sample
from kvrt.program.batch import Batch
from kvrt.program.step import Cache
from kvrt.store.recurrent import StateIndex

# From a cache and a batch to logits and the cache after it.
Step = Callable[[Cache, Batch], tuple[Array, Cache]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSpec:
    """What the program of a run is compiled for.

    Attributes:
      stride: steps at most; the host sees their tokens together, at the end.
      n_best: log-probabilities a token.
      stop_ids: tokens that end the run; how many there are matters, in steps of 16.
    """

    stride: int = 1
    n_best: int = 0
    stop_ids: tuple[int, ...] = ()


@state
class LoopPlan:
    """A run of up to M steps of S sequences, one token each.

    `tokens` is fed first, at `pos`; step i writes to slots[i] of `places` and to index i of
    `states`, which are [M, S] here. A sequence ends when one of `stop_ids` (padded with -1) is
    sampled, or where its logits give no token; the run ends when all have ended or after n_steps.
    """

    tokens: Int32[AnyArray, " S"]
    pos: Int32[AnyArray, " S"]
    seq_ids: Int32[AnyArray, " S"]
    places: tuple[Places, ...]
    n_steps: Int32[AnyArray, ""]
    stop_ids: Int32[AnyArray, " E"]
    states: StateIndex | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Steps at most, and sequences."""
        slots = self.places[0].slots if self.states is None else self.states.src
        return slots.shape[0], slots.shape[1]


def plan_run(
    fed: tuple[int, int],
    seq_id: int,
    where: tuple[Sequence[Places], StateIndex | None],
    stop_ids: Sequence[int],
    n_steps: int,
) -> LoopPlan:
    """The run of one sequence: a token, fed at a position, then n_steps - 1 that are sampled."""
    (token, pos), (places, states) = fed, where
    return LoopPlan(
        tokens=np.array([token], np.int32),
        pos=np.array([pos], np.int32),
        seq_ids=np.array([seq_id], np.int32),
        places=tuple(dataclasses.replace(p, slots=p.slots[:, None]) for p in places),
        states=jax.tree.map(lambda x: x[:, None], states),
        n_steps=np.asarray(n_steps, np.int32),
        stop_ids=padded_stops(stop_ids),
    )


def padded_stops(stop_ids: Collection[int], most: int = 0) -> Int32[np.ndarray, " E"]:
    """Tokens that end a text, padded with -1; `most` is how many another text of the step has.

    In steps of 16, so that another stop token is rarely another program.
    """
    n = max(len(stop_ids), most)
    return pad(list(stop_ids), -(-n // 16) * 16, -1)


@state
class Sampled:
    """What a run sampled; entries from n_steps on are unused.

    tokens[i] was sampled after step i, `sample.NO_TOKEN` where its logits gave none. best_ids and
    best are the K most probable tokens and their log-probabilities.
    """

    n_steps: Int32[Array, ""]
    tokens: Int32[Array, "M S"]
    best_ids: Int32[Array, "M S K"]
    best: Float[Array, "M S K"]


@state
class _Carry:
    step: Int32[Array, ""]
    token: Int32[Array, " S"]
    ended: Bool[Array, " S"]
    cache: Cache
    sampler: sample.Sampler
    sampled: Sampled


def decode_many(
    run: Step,
    cache: Cache,
    plan: LoopPlan,
    sampler: sample.Sampler,
    n_best: int,
) -> tuple[Sampled, Cache, sample.Sampler]:
    """Runs the plan on the device.

    Args:
      run: one step, as `forward` of a model and a spec.
      cache: donated by jitted callers.
      plan: tokens, slots and blocks of all steps.
      sampler: its state before the first token.
      n_best: K, static; 0 keeps no log-probabilities.

    Returns:
      What was sampled, the cache after Sampled.n_steps steps, and the sampler.
    """
    plan = jax.tree.map(jnp.asarray, plan)
    m, s = plan.shape
    sampled = Sampled(
        n_steps=jnp.int32(0),
        tokens=jnp.full((m, s), -1, jnp.int32),
        best_ids=jnp.zeros((m, s, n_best), jnp.int32),
        best=jnp.zeros((m, s, n_best), jnp.float32),
    )
    first = _Carry(
        step=jnp.int32(0),
        token=jnp.asarray(plan.tokens),
        ended=jnp.zeros(s, bool),
        cache=cache,
        sampler=sampler,
        sampled=sampled,
    )

    def more(c: _Carry) -> Array:
        return (c.step < plan.n_steps) & ~jnp.all(c.ended)

    def body(c: _Carry) -> _Carry:
        return _one(run, c, plan, n_best)

    # A run of one step is the usual decode: the loop around it would only cost compile time.
    last = body(first) if m == 1 else lax.while_loop(more, body, first)
    return last.sampled, last.cache, last.sampler


def batch_of(plan: LoopPlan, step: Any, tokens: AnyArray) -> Batch:
    """What step `step` of a run takes, which is fed `tokens`; on host or device."""
    return Batch(
        tokens=tokens,
        pos=plan.pos + step,
        seq_ids=plan.seq_ids,
        places=tuple(dataclasses.replace(p, slots=p.slots[step]) for p in plan.places),
        states=jax.tree.map(lambda x: x[step], plan.states),
        out_ids=np.arange(plan.shape[1], dtype=np.int32),
    )


def sampled_once(
    n_best: int, logits: Float[Array, "S V"], sampler: sample.Sampler
) -> tuple[Sampled, sample.Sampler]:
    """Samples a token of each sequence; they come as a run of one step, with the sampler after."""
    tokens, sampler = sample.sample_tokens(logits, sampler)
    ids, best = sample.log_probs(logits, n_best)
    found = Sampled(n_steps=jnp.int32(1), tokens=tokens[None], best_ids=ids[None], best=best[None])
    return found, sampler


def _one(run: Step, c: _Carry, plan: LoopPlan, n_best: int) -> _Carry:
    logits, cache = run(c.cache, batch_of(plan, c.step, c.token))
    new, sampler = sampled_once(n_best, logits, c.sampler)
    sampled = dataclasses.replace(
        c.sampled,
        n_steps=c.step + 1,
        tokens=c.sampled.tokens.at[c.step].set(new.tokens[0], mode="drop"),
        best_ids=c.sampled.best_ids.at[c.step].set(new.best_ids[0], mode="drop"),
        best=c.sampled.best.at[c.step].set(new.best[0], mode="drop"),
    )
    token = new.tokens[0]
    stops = jnp.any(token[:, None] == plan.stop_ids[None], axis=1)
    return _Carry(
        step=c.step + 1,
        token=token,
        ended=c.ended | stops | (token == sample.NO_TOKEN),
        cache=cache,
        sampler=sampler,
        sampled=sampled,
    )
