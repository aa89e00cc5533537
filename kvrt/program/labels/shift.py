"""The K-shift of a cache, and of the labels beside its keys."""

import dataclasses

from kvrt.arrays import AnyArray
from kvrt.program.labels.arrays import label_plan
from kvrt.program.labels.upkeep import relabelled
from kvrt.program.layout import rotated_buffers
from kvrt.program.programs import Program
from kvrt.program.step import Cache, StepSpec
from kvrt.upkeep import shift
from kvrt.upkeep.sharded import shift_buffers


def shift_program(cache: Cache, spec: StepSpec, by_block: tuple[AnyArray, ...]) -> Program:
    """Rotates keys whose cells have a delta, and clears it.

    Args:
      cache: donated.
      spec: of the cache.
      by_block: by group which blocks hold its keys, where groups rotate differently, else empty.
    """
    layout, shards, config = spec.layout, spec.shards, spec.config
    labelled = label_plan(layout, config)

    def run(cache: Cache, by_block: tuple) -> Cache:
        stores, moved = [], []
        for i, (store, cells) in enumerate(zip(cache.stores, cache.cells, strict=True)):
            size = layout.stores[i].extent
            plan = shift.plan_shift(cells, size.n_blocks, size.block_size)
            for some in rotated_buffers(layout, i):
                mine = (
                    plan if some.group is None else shift.in_blocks_of(plan, by_block[some.group])
                )
                store = shift_buffers(shards, store, mine, some, config)
            stores.append(store)
            moved.append((plan.blocks, plan.n_blocks))
        settled = tuple(shift.settle(cells) for cells in cache.cells)
        cache = dataclasses.replace(cache, stores=tuple(stores), cells=settled)
        if labelled is None:
            return cache
        args = cache.labels or (), cache.stores, tuple(x.pos for x in settled), tuple(moved)
        return dataclasses.replace(cache, labels=relabelled(labelled, *args))

    key = ("shift", "mixed") if by_block else ("shift",)
    return Program(key, run, (0,), (cache, by_block))
