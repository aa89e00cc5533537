"""Copies of cells as copies of blocks, where that is possible and faster than one by one."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvrt.arrays import Int32
from kvrt.cells.slots import pad
from kvrt.sizes import Extent
from kvrt.store import kv as kv_store
from kvrt.store import sharded
from kvrt.store.kv import KVStore
from kvrt.store.per_channel import PerChannel
from kvrt.store.runs.channel_runs import has_runs


class StoreOperation(NamedTuple):
    """An operation of `store.sharded` and its further arguments."""

    run: Callable
    args: tuple[Any, ...]


def block_copies(
    store: KVStore, size: Extent, src: Int32[np.ndarray, " n"], dst: Int32[np.ndarray, " n"]
) -> Iterator[StoreOperation] | None:
    """What copies cells src to cells dst block by block; None where single cells are copied.

    Keys by channel in runs are always copied so; then the cells are those of whole blocks.
    """
    if has_runs(store):
        return _whole_blocks(size, src, dst)
    if any(isinstance(k, PerChannel) for k in store.k):
        return None
    moves = kv_store.plan_block_moves(src, dst, size.block_size)
    # An entry takes as long as a chunk of single cells.
    if moves is None or (len(moves.src) - 1) * kv_store.MOVE_CHUNK >= len(src):
        return None
    parts = range(0, len(moves.src), size.n_blocks)
    found = (kv_store.part_of_moves(moves, first, size.n_blocks) for first in parts)
    return (StoreOperation(sharded.move_blocks, some) for some in found)


def _whole_blocks(size: Extent, src: np.ndarray, dst: np.ndarray) -> Iterator[StoreOperation]:
    ends = [x.reshape(-1, size.block_size)[:, 0] // size.block_size for x in (src, dst)]
    for first in range(0, len(ends[0]), size.n_blocks):
        some = [x[first : first + size.n_blocks] for x in ends]
        padded = (pad(x, size.n_blocks, 0) for x in some)
        args = *padded, np.asarray(len(some[0]), np.int32)
        yield StoreOperation(sharded.copy_blocks, args)
