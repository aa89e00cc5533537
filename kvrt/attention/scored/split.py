"""Layers of which some kv heads have other numbers of slots: each part of the heads by itself.

The state of such a layer are the arrays of its parts, one after the other.
"""

import functools
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.arrays import AnyArray, Array, Float, Int32
from kvrt.attention.contract import ChunkedStep, Inputs, State, Step
from kvrt.attention.scored import attend
from kvrt.attention.scored.attend import Scored
from kvrt.attention.scored.spec import SlotSpec, empty_slots, slots_of

_Array = TypeVar("_Array", Array, AnyArray)


def parts_of(spec: SlotSpec) -> tuple[tuple[tuple[int, ...], SlotSpec], ...]:
    """The kv heads of each part and its slots; one part where the heads are alike."""
    return spec.parts or ((tuple(range(spec.group.n_kv_heads)), spec),)


def state_shapes(spec: SlotSpec) -> list[jax.ShapeDtypeStruct]:
    """Shapes of the arrays of a layer's state."""
    return [x for _, part in parts_of(spec) for x in _leaves(part)]


def positions_kept(
    spec: SlotSpec, arrays: Sequence[AnyArray]
) -> tuple[Int32[np.ndarray, " _"], ...]:
    """Positions that each kv head keeps, ascending; waits for the arrays."""
    found: dict[int, Int32[np.ndarray, " _"]] = {}
    for (heads, part), mine in zip(parts_of(spec), _divided(spec, arrays), strict=True):
        slots = slots_of(part, mine)
        pos, taken = np.asarray(slots.pos), np.asarray(slots.taken)
        found |= {h: x[held] for h, x, held in zip(heads, pos, taken, strict=True)}
    return tuple(found[h] for h in sorted(found))


def divided_recurrence(
    spec: SlotSpec, sinks: Float[Array, " Q"] | None
) -> tuple[Step[Scored], ChunkedStep[Scored]]:
    """As `attend.recurrence`, of each part of the heads."""
    if not spec.parts:
        return attend.recurrence(spec, sinks)
    n_kv = spec.group.n_kv_heads

    def run(state: State, rows: Inputs, form: int, *n: Array) -> tuple[State, Scored]:
        """`form` 0 is one token, 1 many: heads are on axis -2 of both."""
        group, after, out, order = rows[0].shape[-2] // n_kv, [], [], []
        n_nan = jnp.int32(0)
        for (heads, part), mine in zip(spec.parts, _divided(spec, state), strict=True):
            at_k = np.array(heads, np.int32)
            at_q = (at_k[:, None] * group + np.arange(group, dtype=np.int32)).reshape(-1)
            at = at_q, at_k, at_k
            own = tuple(jnp.take(x, i, axis=-2) for x, i in zip(rows[:3], at, strict=True))
            step, chunk = attend.recurrence(part, None if sinks is None else sinks[at_q])
            how = chunk.run if form else step
            new, (y, n_nan_of_part) = how(tuple(mine), (*own, *rows[3:]), *n)
            after += new
            n_nan += n_nan_of_part
            out.append(y)
            order.append(at_q)
        back = np.argsort(np.concatenate(order))
        joined = jnp.take(jnp.concatenate(out, axis=-2), back, axis=-2)
        return tuple(after), (joined, n_nan)

    def one(state: State, token: Inputs) -> tuple[State, Scored]:
        return run(state, token, 0)

    def many(state: State, rows: Inputs, n: Array) -> tuple[State, Scored]:
        return run(state, rows, 1, n)

    return one, ChunkedStep(run=many, size=attend.CHUNK)


def _divided(spec: SlotSpec, arrays: Sequence[_Array]) -> list[tuple[_Array, ...]]:
    """The arrays of each part."""
    out, start = [], 0
    for _, part in parts_of(spec):
        end = start + len(_leaves(part))
        out.append(tuple(arrays[start:end]))
        start = end
    return out


@functools.cache
def _leaves(spec: SlotSpec) -> list[jax.ShapeDtypeStruct]:
    return jax.tree.leaves(jax.eval_shape(lambda: empty_slots(spec)))
