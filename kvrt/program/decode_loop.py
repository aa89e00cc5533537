"""Many decode steps in one compiled program: step, sample, feed back, stop early.

The host plans the cells of all steps beforehand; between them nothing returns to it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.config import CacheConfig
from kvrt.program import sample
from kvrt.program.batch import Batch, Places, pad
from kvrt.program.layout import Layout
from kvrt.program.step import Cache, forward
from kvrt.runtime.generate import Request
from kvrt.store.recurrent import StateIndex
from kvrt.store.shards import Shards


@state
class LoopPlan:
    """A run of up to M steps of S sequences, one token each.

    `tokens` is fed first, at `pos`; step i writes row i of the slots of `places` and of `states`,
    which are [M, S] here. A sequence ends when it draws one of
    `stop_ids` (padded with -1), or where its logits give no token; the run ends when all have ended
    or after n_steps.
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
        rows = self.places[0].slots if self.states is None else self.states.src
        return rows.shape[0], rows.shape[1]


def plan(
    token: int,
    first: int,
    request: Request,
    places: Sequence[Places],
    states: StateIndex | None,
    n_steps: int,
) -> LoopPlan:
    """The run of one sequence: `token` at position `first`, then n_steps - 1 that are drawn."""
    return LoopPlan(
        tokens=np.array([token], np.int32),
        pos=np.array([first], np.int32),
        seq_ids=np.array([request.seq_id], np.int32),
        places=tuple(dataclasses.replace(p, slots=p.slots[:, None]) for p in places),
        states=jax.tree.map(lambda x: x[:, None], states),
        n_steps=np.asarray(n_steps, np.int32),
        # In steps of 16, so that another stop token is rarely another program.
        stop_ids=pad(request.stop_ids, -(-len(request.stop_ids) // 16) * 16, -1),
    )


@state
class Sampled:
    """What a run drew; rows from n_steps on are unused.

    tokens[i] was drawn after step i, `sample.NO_TOKEN` where its logits gave none. best_ids and
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
    drawn: Sampled


def decode_many(
    model: Any,
    cache: Cache,
    plan: LoopPlan,
    sampler: sample.Sampler,
    config: CacheConfig,
    layout: Layout,
    n_best: int,
    shards: Shards | None = None,
) -> tuple[Sampled, Cache, sample.Sampler]:
    """Runs the plan on the device.

    Args:
      model: a `kvrt.attention.Decoder`.
      cache: donated by jitted callers.
      plan: tokens, cells and blocks of all steps.
      sampler: state of the draws.
      config: as for `forward`.
      layout: likewise.
      n_best: K, static; 0 keeps no log-probabilities.
      shards: as for `forward`.

    Returns:
      What was drawn, the cache after Sampled.n_steps steps, and the sampler.
    """
    m, s = plan.shape
    drawn = Sampled(
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
        drawn=drawn,
    )

    def more(c: _Carry) -> Array:
        return (c.step < plan.n_steps) & ~jnp.all(c.ended)

    def body(c: _Carry) -> _Carry:
        return _one(model, c, plan, config, layout, n_best, shards)

    # A run of one step is the usual decode: the loop around it would only cost compile time.
    last = body(first) if m == 1 else lax.while_loop(more, body, first)
    return last.drawn, last.cache, last.sampler


def _one(
    model: Any,
    c: _Carry,
    plan: LoopPlan,
    config: CacheConfig,
    layout: Layout,
    n_best: int,
    shards: Shards | None,
) -> _Carry:
    s = c.token.shape[0]
    batch = Batch(
        tokens=c.token,
        pos=jnp.asarray(plan.pos) + c.step,
        seq_ids=plan.seq_ids,
        places=tuple(
            dataclasses.replace(p, slots=jnp.asarray(p.slots)[c.step]) for p in plan.places
        ),
        states=jax.tree.map(lambda x: jnp.asarray(x)[c.step], plan.states),
        out_ids=jnp.arange(s, dtype=jnp.int32),
    )
    logits, cache = forward(model, c.cache, batch, config, layout, shards)
    token, sampler = sample.sample_tokens(logits, c.sampler)
    ids, best = sample.log_probs(logits, n_best)
    drawn = dataclasses.replace(
        c.drawn,
        n_steps=c.step + 1,
        tokens=c.drawn.tokens.at[c.step].set(token, mode="drop"),
        best_ids=c.drawn.best_ids.at[c.step].set(ids, mode="drop"),
        best=c.drawn.best.at[c.step].set(best, mode="drop"),
    )
    stops = jnp.any(token[:, None] == jnp.asarray(plan.stop_ids)[None], axis=1)
    return _Carry(
        step=c.step + 1,
        token=token,
        ended=c.ended | stops | (token == sample.NO_TOKEN),
        cache=cache,
        sampler=sampler,
        drawn=drawn,
    )
