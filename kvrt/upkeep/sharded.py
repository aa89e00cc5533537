"""The K-shift where devices divide the cells: each rotates its own blocks."""

from jax.sharding import PartitionSpec as P

from kvrt.arrays import Array
from kvrt.config import GroupSpec
from kvrt.store.kv import KVStore
from kvrt.store.shards import CELLS, Shards
from kvrt.upkeep import shift
from kvrt.upkeep.shift import ShiftPlan


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
