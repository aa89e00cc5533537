"""Keys and values of cells, copied out of the stores of a device and written to them."""

from collections.abc import Sequence

import numpy as np

from kvrt.arrays import AnyArray, Int32
from kvrt.cells.slots import pad
from kvrt.program.device import Device
from kvrt.program.programs import Program
from kvrt.session.divided import DividedBlocks
from kvrt.session.snapshot import BLOCK_CELLS, KVBlock, map_kv
from kvrt.store import sharded


def take_cells(
    device: Device, store: int, slots: Int32[np.ndarray, " n"], size: int = BLOCK_CELLS
) -> KVBlock:
    """Copies of up to `size` cells of a store, padded to that, so that one program does for all."""
    k, v = device.take_kv(store, _padded_slots(device, store, slots, size))
    return KVBlock(k=k, v=v)


def put_cells(
    device: Device,
    store: int,
    slots: Int32[np.ndarray, " n"],
    block: KVBlock,
    size: int = BLOCK_CELLS,
) -> None:
    """Writes the cells of a block to slots; those of no cell are left out."""
    whole = padded_block(block, size)
    device.put_kv(store, _padded_slots(device, store, slots, size), whole.k, whole.v)


def put_kv_blocks(
    device: Device, store: int, slots: Int32[np.ndarray, " n"], blocks: Sequence[KVBlock]
) -> None:
    """Writes cells of blocks of up to 256, as `put_cells` does; those may be of other devices."""
    start = 0
    for block in blocks:
        put_cells(device, store, slots[start : start + block.n], map_kv(np.asarray, block))
        start += block.n


def copied_blocks(device: Device, store: int, slots: Int32[np.ndarray, " n"]) -> list[KVBlock]:
    """Copies of some cells of a store, on the device."""
    parts = (slots[i : i + BLOCK_CELLS] for i in range(0, len(slots), BLOCK_CELLS))
    return [take_cells(device, store, part).some(slice(len(part))) for part in parts]


def divided_blocks(device: Device, store: int, slots: Int32[np.ndarray, " n"]) -> DividedBlocks:
    """Copies of cells of a store that a mesh divides, each on the device that holds it.

    Args:
      device: whose cache a mesh divides.
      store: of a group of layers.
      slots: cells, ascending.
    """
    shards = device.spec.shards
    assert shards is not None, "one device has all cells"
    n_cells = device.layout.stores[store].extent.n_slots // shards.n_cells
    parts = np.split(slots, np.searchsorted(slots, n_cells * np.arange(1, shards.n_cells)))
    most, rounds = max(map(len, parts)), []
    for start in range(0, most, BLOCK_CELLS):
        own = np.full((len(parts), BLOCK_CELLS), n_cells, np.int32)
        for i, part in enumerate(parts):
            some = part[start : start + BLOCK_CELLS]
            own[i, : len(some)] = some - i * n_cells
        args = device.cache.stores[store], own
        taken = device.programs.run(Program(sharded.take_own, (shards,), args))
        rounds.append(KVBlock(k=taken.k, v=taken.v))
    return DividedBlocks(rounds, [len(part) for part in parts])


def padded_block(block: KVBlock, n: int) -> KVBlock:
    """A block of n cells, those behind its own zeros; on the host unless it has so many."""

    def padded(x: AnyArray) -> np.ndarray:
        return np.pad(np.asarray(x), [(0, n - x.shape[1] if a == 1 else 0) for a in range(x.ndim)])

    return block if block.n == n else map_kv(padded, block)


def _padded_slots(device: Device, store: int, slots: np.ndarray, size: int) -> np.ndarray:
    extent = device.layout.stores[store].extent
    # Cells that are left out go behind the last one, where nothing is written.
    where = np.where(slots < extent.n_cells, slots, extent.n_slots)
    return pad(where.astype(np.int32), size, extent.n_slots)
