"""The K-shift of a cache, and of the labels beside its keys."""

import dataclasses

from kvrt.arrays import AnyArray
from kvrt.program.labels.arrays import label_plan
from kvrt.program.labels.upkeep import relabelled
from kvrt.program.layout import rotated_buffers
from kvrt.program.programs import ModelKind
from kvrt.program.step import Cache
from kvrt.upkeep.sharded import shift_buffers
from kvrt.upkeep.shift import in_blocks_of, plan_shift, settle


def shift(kind: ModelKind, cache: Cache, by_block: tuple[AnyArray, ...]) -> Cache:
    """Rotates keys whose cells have a delta, and clears it.

    Args:
      kind: of the cache.
      cache: donated.
      by_block: by group which blocks hold its keys, where groups rotate differently, else empty.
    """
    layout, shards, config = kind.spec.layout, kind.spec.shards, kind.spec.config
    stores, moved = [], []
    for i, (store, cells) in enumerate(zip(cache.stores, cache.cells, strict=True)):
        size = layout.stores[i].extent
        plan = plan_shift(cells, size.n_blocks, size.block_size)
        for some in rotated_buffers(layout, i):
            mine = plan if some.group is None else in_blocks_of(plan, by_block[some.group])
            store = shift_buffers(shards, store, mine, some, config)
        stores.append(store)
        moved.append((plan.blocks, plan.n_blocks))
    settled = tuple(settle(cells) for cells in cache.cells)
    cache = dataclasses.replace(cache, stores=tuple(stores), cells=settled)
    labelled = label_plan(layout, config)
    if labelled is None:
        return cache
    args = cache.labels or (), cache.stores, tuple(x.pos for x in settled), tuple(moved)
    return dataclasses.replace(cache, labels=relabelled(labelled, *args))
