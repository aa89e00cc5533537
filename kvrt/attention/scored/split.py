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
from kvrt.attention.contract import Inputs, State
from kvrt.attention.scored import attend
from kvrt.attention.scored.spec import SlotSpec, slots_of, state_shapes
from kvrt.store import recurrent

_Array = TypeVar("_Array", Array, AnyArray)


def parts_of(spec: SlotSpec) -> tuple[tuple[tuple[int, ...], SlotSpec], ...]:
    """The kv heads of each part and its slots; one part where the heads are alike."""
    return spec.parts or ((tuple(range(spec.group.n_kv_heads)), spec),)


def layer_shapes(spec: SlotSpec) -> list[jax.ShapeDtypeStruct]:
    """Shapes of the arrays of a layer's state."""
    return [x for _, part in parts_of(spec) for x in state_shapes(part)]


def positions_kept(
    spec: SlotSpec, arrays: Sequence[AnyArray]
) -> tuple[Int32[np.ndarray, " _"], ...]:
    """Positions that each kv head keeps, ascending; waits for the arrays."""
    found: dict[int, Int32[np.ndarray, " _"]] = {}
    for (heads, part), mine in zip(parts_of(spec), _divided(spec, arrays), strict=True):
        marks = slots_of(part, tuple(x[None] for x in mine)).marks
        pos, taken = np.asarray(marks.pos), np.asarray(marks.taken)
        found |= {h: x[held] for h, x, held in zip(heads, pos, taken, strict=True)}
    return tuple(found[h] for h in sorted(found))


def divided_recurrence(
    spec: SlotSpec, sinks: Float[Array, " Q"] | None
) -> tuple[recurrent.InPlace, recurrent.InPlace]:
    """As `attend.recurrence`, of each part of the heads."""
    if not spec.parts:
        return attend.recurrence(spec, sinks)
    n_kv = spec.group.n_kv_heads

    def run(form: int, tables: State, index: Array, rows: Inputs, *n: Array) -> tuple:
        """`form` 0 is one token, 1 many: heads are on axis -2 of both."""
        group, after, out, order = rows[0].shape[-2] // n_kv, [], [], []
        n_nan = jnp.int32(0)
        for (heads, part), mine in zip(spec.parts, _divided(spec, tables), strict=True):
            at_k = np.array(heads, np.int32)
            at_q = (at_k[:, None] * group + np.arange(group, dtype=np.int32)).reshape(-1)
            at = at_q, at_k, at_k
            own = tuple(jnp.take(x, i, axis=-2) for x, i in zip(rows[:3], at, strict=True))
            how = attend.recurrence(part, None if sinks is None else sinks[at_q])[form]
            new, (y, n_nan_of_part) = how(mine, index, (*own, *rows[3:]), *n)
            after += new
            n_nan += n_nan_of_part
            out.append(y)
            order.append(at_q)
        back = np.argsort(np.concatenate(order))
        joined = jnp.take(jnp.concatenate(out, axis=-2), back, axis=-2)
        return tuple(after), (joined, n_nan)

    return functools.partial(run, 0), functools.partial(run, 1)


def _divided(spec: SlotSpec, arrays: Sequence[_Array]) -> list[tuple[_Array, ...]]:
    """The arrays of each part."""
    out, start = [], 0
    for _, part in parts_of(spec):
        end = start + len(state_shapes(part))
        out.append(tuple(arrays[start:end]))
        start = end
    return out
