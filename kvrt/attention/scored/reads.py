"""Queries that read some of the tokens that their kv head keeps: the newest, and a chosen few.

Source: ALISA, arXiv:2403.17312, sec. 4, with scores from a query now and then that reads all.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Bool, Float, Int32, state
from kvrt.attention.scored import head_slots
from kvrt.attention.scored.head_slots import HeadSlots, SlotMarks
from kvrt.attention.scored.policy import Reads, ranked
from kvrt.store.codec import decode


@state
class SlotKV:
    """Keys and values that a step compares with, and which of them its queries see.

    Attributes:
      keys: `[H, D, S]`
      values: `[H, S, Dv]`
      sees: `[H, T, S]`
    """

    keys: Float[Array, "H D S"]
    values: Float[Array, "H S Dv"]
    sees: Bool[Array, "H T S"]


def refreshes(reads: Reads, pos: Int32[Array, ""]) -> Bool[Array, ""]:
    """Whether a query reads all, and what is read after it is chosen anew."""
    return lax.rem(pos, jnp.int32(reads.every)) == 0


def n_of_one_kind(reads: Reads, pos: Int32[Array, ""]) -> Int32[Array, ""]:
    """Tokens from a position on that read all, or some, as its own does."""
    since = lax.rem(pos, jnp.int32(reads.every))
    return jnp.where(since == 0, 1, reads.every - since)


def choose_slots(reads: Reads, marks: SlotMarks, pos: Int32[Array, ""]) -> SlotMarks:
    """The slots of the greatest sums, to be read by all queries up to the next that reads all.

    Chosen among those that the last of these does not see among the newest.

    Args:
      reads: how many.
      marks: with the token at `pos`, whose query has read them all.
      pos: its position.
    """
    assert marks.chosen is not None, "of slots that are not all read"
    old = marks.taken & (marks.pos < pos + reads.every - reads.n_recent)
    n = min(marks.chosen.shape[1], old.shape[1])
    index = lax.top_k(jnp.where(old, ranked(marks.sums), -jnp.inf), n)[1]
    chosen = jnp.where(jnp.take_along_axis(old, index, axis=1), index + 1, 0)
    return dataclasses.replace(marks, chosen=marks.chosen.at[:, :n].set(chosen))


def chosen_slots(reads: Reads, slots: HeadSlots, pos: Int32[Array, " T"]) -> SlotKV:
    """Keys and values of the chosen slots and of the newest; no others are read.

    Args:
      reads: how many.
      slots: before the tokens at `pos` come in, of which none refreshes.
      pos: positions of the queries, ascending.
    """
    marks = slots.marks
    assert marks.chosen is not None, "of slots that are not all read"
    n_kv, n_slots = marks.pos.shape
    n_newest = min(reads.n_recent, n_slots)
    start = jnp.clip(marks.filled - n_newest, 0, n_slots - n_newest)
    newest = start + jnp.arange(n_newest, dtype=jnp.int32)
    some = jnp.maximum(marks.chosen - 1, 0)
    index = jnp.concatenate([some, jnp.broadcast_to(newest, (n_kv, n_newest))], axis=1)
    at = jnp.take_along_axis(marks.pos, index, axis=1)
    near = at[:, None] > pos[None, :, None] - reads.n_recent
    is_chosen = jnp.arange(index.shape[1]) < some.shape[1]
    held = jnp.concatenate(
        [marks.chosen > 0, jnp.take_along_axis(marks.taken, index[:, some.shape[1] :], axis=1)],
        axis=1,
    )
    k, v = head_slots.at_slots(slots, index)
    return SlotKV(
        keys=decode(k, -2),
        values=decode(v, -1),
        # A token is read once: as a chosen one only where it is not among the newest.
        sees=held[:, None] & (near ^ is_chosen[None, None]),
    )
