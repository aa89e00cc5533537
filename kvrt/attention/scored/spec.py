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


def slots_of(spec: SlotSpec, arrays: tuple[AnyArray, ...]) -> HeadSlots:
    """Slots of the arrays of a state."""
    return jax.tree.unflatten(_structure(spec), arrays)


def compared_keys(spec: SlotSpec, slots: HeadSlots) -> Float[Array, "H D S"]:
    """Keys of all slots with RoPE applied, in float32; those of free ones are anything finite."""
    keys = head_slots.slot_keys(slots)
    if spec.by_place is None:
        return keys
    cos, sin = spec.tables(jnp.arange(keys.shape[2], dtype=jnp.int32))
    return rope.rotate_block(keys, cos.T, sin.T, spec.by_place.layout)


@functools.cache
def _structure(spec: SlotSpec) -> Any:
    return jax.tree.structure(jax.eval_shape(lambda: empty_slots(spec)))
