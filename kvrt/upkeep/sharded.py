"""The K-shift where devices divide the rows: each turns its own blocks."""

from typing import Any

from jax.sharding import PartitionSpec as P

from kvrt.arrays import Array
from kvrt.store.kv import KVStore
from kvrt.store.shards import CELLS, Shards
from kvrt.upkeep import shift
from kvrt.upkeep.shift import ShiftPlan


def apply_shift(shards: Shards | None, store: KVStore, plan: ShiftPlan, *how: Any) -> KVStore:
    """See `shift.apply_shift`; nothing travels between devices.

    Args:
      shards: the devices, None for one.
      store: donated by the jitted caller.
      plan: from `plan_shift`, of all blocks.
      how: what `shift.apply_shift` wants beside them.
    """
    if shards is None:
        return shift.apply_shift(store, plan, *how)

    def own(store: KVStore, delta: Array, blocks: Array, n_blocks: Array) -> KVStore:
        blocks, n_blocks = shards.listed(blocks, n_blocks, delta.shape[0])
        mine = ShiftPlan(delta=delta, blocks=blocks, n_blocks=n_blocks)
        return shift.apply_shift(store, mine, *how)

    at = shards.layers(store)
    told = plan.delta, plan.blocks, plan.n_blocks
    return shards.run(own, (at, P(CELLS), P(), P()), at)(store, *told)
