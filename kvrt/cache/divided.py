"""The used cells of a group as the devices of a mesh hold them."""

import numpy as np

from kvrt.arrays import Int32
from kvrt.cache.cell_cache import CellCache
from kvrt.program.device import Device
from kvrt.program.programs import Program
from kvrt.session.divided import DividedBlocks
from kvrt.session.snapshot import BLOCK_CELLS, KVBlock
from kvrt.store import sharded
from kvrt.store.sharded import DividedKV


def divided_blocks(cache: CellCache, group: int, index: Int32[np.ndarray, " n"]) -> DividedBlocks:
    """Copies of keys and values of some cells of a group, each on the device that holds it.

    Args:
      cache: that a mesh divides.
      group: of layers.
      index: cells, ascending.
    """
    shards = cache.device.spec.shards
    assert shards is not None, "one device has all cells"
    n_cells = cache.host.groups[group].extent.n_slots // shards.n_cells
    parts = np.split(index, np.searchsorted(index, n_cells * np.arange(1, shards.n_cells)))
    most, rounds = max(map(len, parts)), []
    for start in range(0, most, BLOCK_CELLS):
        slots = np.full((len(parts), BLOCK_CELLS), n_cells, np.int32)
        for i, part in enumerate(parts):
            some = part[start : start + BLOCK_CELLS]
            slots[i, : len(some)] = some - i * n_cells
        taken = _take_own(cache.device, group, slots)
        rounds.append(KVBlock(k=taken.k, v=taken.v))
    return DividedBlocks(rounds, [len(part) for part in parts])


def _take_own(device: Device, group: int, slots: Int32[np.ndarray, "S m"]) -> DividedKV:
    """Copies of keys and values of a group, each on the device that holds the cells.

    Args:
      device: whose cache a mesh divides.
      group: of layers.
      slots: cells of each part of the cells, counted in it; see `sharded.take_own`.
    """
    store, shards = device.cache.stores[group], device.spec.shards
    assert shards is not None, "one device has all cells"
    return device.programs.run(Program(sharded.take_own, (shards,), (store, slots)))
