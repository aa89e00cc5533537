"""Which tokens stay in the slots of a layer, when some have to go."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Bool, Float, Int32
from kvrt.attention.scored import head_slots
from kvrt.attention.scored.head_slots import HeadSlots, SlotMarks
from kvrt.attention.scored.policy import Seen, ranked, real_numbers
from kvrt.attention.scored.spec import SlotSpec, compared_keys


def evicts_at(spec: SlotSpec, marks: SlotMarks) -> Int32[Array, ""]:
    """How many slots are filled when tokens go next.

    Heads that share a budget have more slots than the first eviction leaves time for; behind it
    some of them are without a token.
    """
    n_first = spec.budget + spec.policy.interval
    if n_first == spec.n_slots:
        return jnp.int32(n_first)
    behind = jnp.any(marks.pos < 0)
    return jnp.where(behind, jnp.int32(spec.n_slots), jnp.int32(n_first))


# Slots that are read or moved at once; a step holds no more keys and values outside the tables.
TILE = 1024


def evict(spec: SlotSpec, slots: HeadSlots) -> tuple[HeadSlots, Int32[Array, ""]]:
    """Keeps `budget` tokens a head: sinks, the newest, and those that score highest.

    Returns:
      The slots, and the number of scores that were NaN.

    Raises:
      BadConfig: the policy gives no score for each token.
    """
    policy, marks, taken = spec.policy, slots.marks, slots.marks.taken
    pos = jnp.where(taken, marks.pos, -1)
    n_past = jnp.max(pos) + 1
    seen = Seen(
        keys=jnp.transpose(compared_keys(spec, slots), (0, 2, 1)),
        values=head_slots.some_values(slots, jnp.int32(0), pos.shape[1]),
        pos=pos,
        sums=jnp.where(taken, marks.sums, 0.0),
        n_past=n_past,
        next_place=n_past if spec.by_place is None else marks.filled,
        queries=marks.queries,
        group=spec.group,
        n_ctx=spec.n_ctx,
    )
    stays = (pos < policy.n_sink) | (pos >= n_past - policy.recent)
    scores = real_numbers(policy.score, seen, pos.shape)
    worth = jnp.where(taken, jnp.where(stays, jnp.inf, ranked(scores)), -jnp.inf)
    if spec.n_kept == spec.budget:
        index = jnp.sort(lax.top_k(worth, spec.budget)[1], axis=1)
        after = head_slots.keep_only(slots, index, TILE)
    else:
        after = _keep(spec, slots, _shared(spec, worth))
    if policy.observed_by.horizon is not None:
        marks = dataclasses.replace(after.marks, sums=jnp.zeros_like(after.marks.sums))
        after = dataclasses.replace(after, marks=marks)
    return after, jnp.sum((taken & jnp.isnan(scores)).astype(jnp.int32))


def _shared(spec: SlotSpec, worth: Float[Array, "H S"]) -> Bool[Array, "H S"]:
    """Which tokens stay where heads share a budget: the best of each, then the best of all."""
    n_heads, n_slots = worth.shape
    heads = jnp.arange(n_heads, dtype=jnp.int32)[:, None]
    own = lax.top_k(worth, spec.policy.n_least(spec.budget))[1]
    stays = jnp.zeros(worth.shape, bool).at[heads, own].set(True)
    # Not among the best again, but before whatever was never a token.
    others = jnp.where(stays, -jnp.inf, worth).reshape(-1)
    n = n_heads * (spec.budget - own.shape[1])
    return stays.reshape(-1).at[lax.top_k(others, n)[1]].set(True).reshape(n_heads, n_slots)


def _keep(spec: SlotSpec, slots: HeadSlots, stays: Bool[Array, "H S"]) -> HeadSlots:
    """The slots with tokens that stay; before them each head has some without one.

    So the newest tokens of all heads lie in the same slots.
    """
    n_slots = stays.shape[1]
    order = jnp.where(stays, n_slots, 0) + jnp.arange(n_slots, dtype=jnp.int32)[None]
    index = jnp.argsort(order, axis=1)[:, -spec.n_kept :].astype(jnp.int32)
    after = head_slots.keep_only(slots, index, n_slots)
    n = jnp.sum(stays.astype(jnp.int32), axis=1, keepdims=True)
    gone = jnp.arange(n_slots, dtype=jnp.int32)[None] < spec.n_kept - n
    marks = dataclasses.replace(
        after.marks,
        pos=jnp.where(gone, -1, after.marks.pos),
        sums=jnp.where(gone, 0.0, after.marks.sums),
    )
    return dataclasses.replace(after, marks=marks)
