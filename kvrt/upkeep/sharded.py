"""The K-shift where devices divide the cells: each rotates its own blocks."""

import dataclasses

from jax.sharding import PartitionSpec as P

from kvrt.arrays import Array
from kvrt.config import GroupSpec
from kvrt.options.cache import CacheConfig
from kvrt.store.kv import KVStore
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
    if len(some.buffers) == len(store.k):
        return apply_shift(shards, store, plan, some.spec, n_ctx, hadamard)
    k, v = tuple(store.k[b] for b in some.buffers), tuple(store.v[b] for b in some.buffers)
    part = apply_shift(shards, KVStore(k=k, v=v), plan, some.spec, n_ctx, hadamard)
    keys = dict(enumerate(store.k)) | dict(zip(some.buffers, part.k, strict=True))
    return dataclasses.replace(store, k=tuple(keys.values()))


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
