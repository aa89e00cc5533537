"""The K-shift where devices divide the cells: each rotates its own blocks."""

import dataclasses

from jax.sharding import PartitionSpec as P

from kvrt.arrays import Array
from kvrt.config import GroupSpec
from kvrt.options.cache import CacheConfig
from kvrt.store.kv import KVStore, part, with_part
from kvrt.store.shards import CELLS, Shards
from kvrt.upkeep import shift
from kvrt.upkeep.shift import ShiftPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotatedBuffers:
    """Arrays of a store whose keys are rotated in one way.

    Attributes:
      spec: of their layers.
      buffers: which arrays.
      group: whose blocks alone they are, by its index; None is all blocks.
    """

    spec: GroupSpec
    buffers: tuple[int, ...]
    group: int | None = None


def shift_buffers(
    shards: Shards | None,
    store: KVStore,
    plan: ShiftPlan,
    some: RotatedBuffers,
    config: CacheConfig,
) -> KVStore:
    """As `apply_shift`, of some arrays of a store; `plan` has their cells alone."""
    n_ctx, hadamard = config.n_ctx, config.hadamard
    mine = part(store, some.buffers)
    shifted = apply_shift(shards, mine, plan, some.spec, n_ctx, hadamard)
    return with_part(store, some.buffers, shifted)


def apply_shift(
    shards: Shards | None,
    store: KVStore,
    plan: ShiftPlan,
    group: GroupSpec,
    n_ctx: int,
    hadamard: bool = False,
) -> KVStore:
    """See `shift.apply_shift`; nothing travels between devices.

    Args:
      shards: the devices, None for one.
      store: donated by the jitted caller.
      plan: from `plan_shift`, of all blocks.
      group: see `shift.apply_shift`, as for what follows.
      n_ctx: cells of the cache.
      hadamard: whether quantized keys are Hadamard-transformed.
    """
    if shards is None:
        return shift.apply_shift(store, plan, group, n_ctx, hadamard)

    def shift_own(store: KVStore, delta: Array, blocks: Array, n_blocks: Array) -> KVStore:
        blocks, n_blocks = shards.listed(blocks, n_blocks, delta.shape[0])
        mine = ShiftPlan(delta=delta, blocks=blocks, n_blocks=n_blocks)
        return shift.apply_shift(store, mine, group, n_ctx, hadamard)

    at = shards.layers(store)
    run = shards.run(shift_own, (at, P(CELLS), P(), P()), at)
    return run(store, plan.delta, plan.blocks, plan.n_blocks)
