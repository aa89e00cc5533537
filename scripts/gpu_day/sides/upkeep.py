"""K-shift and defrag of a shape's layers as a runtime does them, ready to be timed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from kvrt import Attend, CacheConfig, cells
from kvrt.program import estimate
from kvrt.program.device import Device
from kvrt.program.layout import cell_layout
from kvrt.upkeep.defrag import plan_defrag
from scripts._lib import cases, grid, shapes
from scripts.gpu_day.plan import Cell
from scripts.gpu_day.sides.attention import Asked
from scripts.gpu_day.sides.ready import Ready


class _NoModel(nnx.Module):
    """What a device wants to know of a model whose steps nobody runs."""

    groups, recurrent, n_vocab = (), None, 1

    def __call__(self, tokens: Array, attend: Attend, out_ids: Array) -> Array:
        raise NotImplementedError("no step is run")


def ready(of: Asked) -> Ready:
    """Upkeep of a cache of as many cells as the cell's context.

    Raises:
      MemoryError: the cache does not fit.
    """
    group, config = cases.all_layers(shapes.SHAPES[of.cell.shape]), _config(of.cell)
    lacking = grid.no_room(estimate.of_cells([group], None, config).n_bytes)
    if lacking:
        raise MemoryError(f"the cache {lacking}")
    device = Device(_NoModel(), config, cell_layout((group,), None, config))
    return {"k_shift": _k_shift, "defrag": _defrag}[of.cell.what](device, config.n_ctx)


def _config(cell: Cell) -> CacheConfig:
    types: dict[str, Any] = {"type_k": cell.type_kv, "type_v": cell.type_kv}
    return CacheConfig(n_ctx=cell.context, block_size=cell.block_size, **types)


def _k_shift(device: Device, n_ctx: int) -> Ready:
    """Rotates every cell's key, in every layer."""
    device.upload(0, cells.seq_add(cases.filled(n_ctx), 0, 0, n_ctx, 7))
    # A shift clears what is to be shifted, and takes the cells with it.
    pending = jax.tree.map(jnp.copy, device.cache.cells)

    def again() -> None:
        held = jax.tree.map(jnp.copy, pending)
        device.cache = dataclasses.replace(device.cache, cells=jax.block_until_ready(held))

    def run() -> Any:
        device.shift()
        return device.cache

    n_bytes = 2 * sum(x.nbytes for x in jax.tree.leaves(device.cache.stores[0].k))
    return _ready(device, run, again, n_bytes=n_bytes)


def _defrag(device: Device, n_ctx: int) -> Ready:
    """Packs a cache in which every second cell was freed."""
    (moves,) = plan_defrag(cases.every_second_freed(n_ctx))[1].rounds
    src, dst = (np.ascontiguousarray(x) for x in moves.T)
    device.upload(0, cases.filled(n_ctx, n_seqs=2))

    def run() -> Any:
        device.copy_kv(0, src, dst)
        return device.cache

    size = device.layout.stores[0].extent
    blocks = (x // size.block_size for x in (src, dst))
    n_bytes = cases.bytes_touched(device.cache.stores[0], size.n_blocks, *blocks)
    return _ready(device, run, lambda: None, n_bytes=n_bytes, n_moves=len(src))


def _ready(device: Device, run: Any, again: Any, **figures: Any) -> Ready:
    """What is compiled at its first run, run once."""
    again()
    jax.block_until_ready(run())
    compile_s = round(device.programs.compile_s, 2)
    return Ready(run=run, again=again, figures={**figures, "compile_s": compile_s})
