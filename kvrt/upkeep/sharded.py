"""The K-shift where devices divide the rows: each turns its own blocks."""

from jax.sharding import PartitionSpec as P

from kvrt.arrays import Array
from kvrt.config import GroupSpec
from kvrt.store.shards import CELLS, Shards
from kvrt.store.store import KVStore
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
    """See `shift.apply_shift`; nothing travels between devices."""
    if shards is None:
        return shift.apply_shift(store, plan, group, n_ctx, hadamard)

    def own(store: KVStore, delta: Array, blocks: Array, n_blocks: Array) -> KVStore:
        blocks, n_blocks = shards.listed(blocks, n_blocks, delta.shape[0])
        mine = ShiftPlan(delta=delta, blocks=blocks, n_blocks=n_blocks)
        return shift.apply_shift(store, mine, group, n_ctx, hadamard)

    at = shards.layers(store)
    told = plan.delta, plan.blocks, plan.n_blocks
    return shards.run(own, (at, P(CELLS), P(), P()), at)(store, *told)
