"""The slots of a layer whose kv heads keep tokens by score: how many, and who chooses."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from kvrt.arrays import AnyArray, Array, Float, Int32
from kvrt.attention.scored import head_slots
from kvrt.attention.scored.head_slots import HeadSlots, SlotShape
from kvrt.attention.scored.policy import ScoredPolicy
from kvrt.config import GroupSpec, RopeSpec
from kvrt.kv_types import KeyDtype, KVDtype
from kvrt.store import rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSpec:
    """Slots of one layer, and who chooses what is in them; hashable, static in jit.

    Attributes:
      group: of the layer.
      policy: scores tokens.
      budget: tokens of a head that stay in an eviction; the mean where heads share it.
      type_k: KV dtype of keys.
      type_v: KV dtype of values.
      n_ctx: cells of the cache, where RoPE's rule depends on them; else 0.
      n_q_heads: query heads whose sums are kept; 0 keeps none.
      parts: kv heads and their slots, where heads have other numbers of them; see `split`.
    """

    group: GroupSpec
    policy: ScoredPolicy
    budget: int
    type_k: KeyDtype
    type_v: KVDtype
    n_ctx: int
    n_q_heads: int = 0
    parts: "tuple[tuple[tuple[int, ...], SlotSpec], ...]" = ()

    @property
    def by_place(self) -> RopeSpec | None:
        """How keys are rotated to their places, which are stored unrotated; None where none are."""
        return self.group.rope if self.policy.close_up else None

    def tables(self, places: Int32[Array, " T"]) -> tuple[Float[Array, "T R"], Float[Array, "T R"]]:
        """Cosines and sines of places, times the magnitude of RoPE's rule."""
        assert self.by_place is not None, "of layers that compare by place"
        by = jnp.float32(rope.magnitude(self.by_place, self.n_ctx))
        freqs = jnp.asarray(rope.frequencies(self.by_place, self.n_ctx))
        cos, sin = rope.angles(freqs, places)
        return by * cos, by * sin

    @property
    def n_kept(self) -> int:
        """Tokens that a head has at most behind an eviction."""
        others = self.group.n_kv_heads - 1
        return self.budget + others * (self.budget - self.policy.n_least(self.budget))

    @property
    def n_slots(self) -> int:
        """Slots of a head."""
        return self.n_kept + self.policy.interval


def empty_slots(spec: SlotSpec) -> HeadSlots:
    """Slots of which none is taken: all arrays are zero."""
    reads = spec.policy.reads
    shape = SlotShape(
        n_kv_heads=spec.group.n_kv_heads,
        n_slots=spec.n_slots,
        dim_k=spec.group.dim_k,
        dim_v=spec.group.dim_v,
        type_k=spec.type_k,
        type_v=spec.type_v,
        n_q_heads=spec.n_q_heads,
        n_chosen=reads.n_read - reads.n_recent if reads else 0,
    )
    return head_slots.create(shape)


def slots_of(
    spec: SlotSpec, tables: tuple[AnyArray, ...], index: Int32[Array, ""] | int = 0
) -> HeadSlots:
    """Slots of one of the states that tables have."""
    k, v, marks = jax.tree.unflatten(_structure(spec), tables)
    marks = jax.tree.map(lambda x: x[index], marks)
    return HeadSlots(k=k, v=v, marks=marks, index=jnp.asarray(index))


def tables_of(slots: HeadSlots, tables: tuple[AnyArray, ...] = ()) -> tuple[Any, ...]:
    """The tables that have these slots of one state; without others, of it alone."""
    kv, marks = jax.tree.leaves((slots.k, slots.v)), jax.tree.leaves(slots.marks)
    if not tables:
        return (*kv, *(x[None] for x in marks))
    pairs = zip(tables[len(kv) :], marks, strict=True)
    return (*kv, *(jnp.asarray(t).at[slots.index].set(x, mode="drop") for t, x in pairs))


def compared_keys(
    spec: SlotSpec, slots: HeadSlots, start: Int32[AnyArray, ""] | int = 0, size: int | None = None
) -> Float[Array, "H D B"]:
    """Keys of `size` slots with RoPE applied, in float32; those of free ones are anything finite.

    Args:
      spec: of the layer.
      slots: of a state.
      start: first slot.
      size: slots; None is all.
    """
    size = slots.marks.pos.shape[1] if size is None else size
    keys = head_slots.some_keys(slots, jnp.asarray(start), size)
    if spec.by_place is None:
        return keys
    cos, sin = spec.tables(jnp.asarray(start) + jnp.arange(size, dtype=jnp.int32))
    return rope.rotate_block(keys, cos.T, sin.T, spec.by_place.layout)


@functools.cache
def state_shapes(spec: SlotSpec) -> list[jax.ShapeDtypeStruct]:
    """Shapes of the arrays of a state."""
    found = jax.eval_shape(lambda: tables_of(empty_slots(spec)))
    return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in found]


@functools.cache
def _structure(spec: SlotSpec) -> Any:
    slots = jax.eval_shape(lambda: empty_slots(spec))
    return jax.tree.structure((slots.k, slots.v, slots.marks))
