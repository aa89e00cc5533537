"""K-shift, defrag and the host's bookkeeping, on the shapes of the default model.

Run it with `python scripts/bench_upkeep.py`. The K-shift is set against the bandwidth of a copy
of the same keys in the same run; a byte rotated counts as one read and one written, as in a copy.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
from absl import app, flags

from kvrt import CacheConfig, GroupSpec, MaskSpec, RopeSpec, cells
from kvrt.config import extent, store_spec
from kvrt.engine.host import Host
from kvrt.engine.step import on_device
from kvrt.store import store
from kvrt.upkeep import shift
from kvrt.upkeep.defrag import plan_defrag

_N_RUNS = flags.DEFINE_integer("runs", 31, "Samples of each figure.", lower_bound=1)

_N_CELLS, _N_LAYERS = 4096, 30
_GROUP = GroupSpec(
    layers=tuple(range(_N_LAYERS)), n_kv_heads=3, head_dim=64, rope=RopeSpec(n_rot=64, base=1e5)
)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    for n_ctx, n_moved in ((_N_CELLS, _N_CELLS), (4 * _N_CELLS, _N_CELLS), (4 * _N_CELLS, 256)):
        k_shift(n_ctx, n_moved)
    defrag()
    host(n_ctx=32768)
    decode_plans(n_ctx=32768)


def k_shift(n_ctx: int, n_moved: int) -> None:
    """Rotates n_moved cells of n_ctx, in every layer."""
    config = CacheConfig(n_ctx=n_ctx)
    held = filled(n_ctx)
    rows = store.create(store_spec(_GROUP, config))
    copy_gb_s = _copy_bandwidth(jax.tree.leaves(rows.k))

    @functools.partial(jax.jit, donate_argnums=0)
    def run(rows: store.KVStore, held: cells.Cells) -> store.KVStore:
        size = extent(_GROUP, config)
        plan = shift.plan_shift(held, size.n_blocks, size.block_size)
        return shift.apply_shift(rows, plan, _GROUP, n_ctx)

    held = on_device(cells.seq_add(held, 0, 0, n_moved, 7))
    program = run.lower(rows, held).compile()
    samples = []
    for _ in range(_N_RUNS.value + 1):
        start = time.perf_counter()
        rows = jax.block_until_ready(program(rows, held))
        samples.append(time.perf_counter() - start)
    n_bytes = 2 * 4 * n_moved * _N_LAYERS * _GROUP.n_kv_heads * _GROUP.head_dim
    gb_s = n_bytes / float(np.median(samples[1:])) / 1e9
    analysis = program.memory_analysis()
    measure.emit(
        "k_shift",
        n_ctx=n_ctx,
        n_moved=n_moved,
        n_layers=_N_LAYERS,
        ms=measure.quartiles(samples[1:]),
        gb_s=round(gb_s, 2),
        copy_gb_s=round(copy_gb_s, 2),
        share_of_copy=round(gb_s / copy_gb_s, 3),
        temp_bytes=None if analysis is None else analysis.temp_size_in_bytes,
    )


def defrag() -> None:
    """Packs a cache in which every second cell was freed."""
    config = CacheConfig(n_ctx=_N_CELLS)
    held = filled(_N_CELLS)
    held = cells.place(held, *_tokens(_N_CELLS, every=2, seq_id=1))
    held = cells.seq_rm(held, 1)
    planning = measure.clock(lambda: plan_defrag(held)[1].n_moves, _N_RUNS.value)
    moves = plan_defrag(held)[1].rounds[0]
    size = -(-_N_CELLS // store.MOVE_CHUNK) * store.MOVE_CHUNK
    src, dst = (np.full(size, _N_CELLS, np.int32) for _ in range(2))
    src[: len(moves)], dst[: len(moves)] = moves[:, 0], moves[:, 1]
    n = np.asarray(len(moves), np.int32)
    move = jax.jit(store.move_rows, donate_argnums=0)
    rows = store.create(store_spec(_GROUP, config))
    samples = []
    for _ in range(_N_RUNS.value + 1):
        start = time.perf_counter()
        rows = jax.block_until_ready(move(rows, src, dst, n))
        samples.append(time.perf_counter() - start)
    measure.emit(
        "defrag",
        n_ctx=_N_CELLS,
        n_moves=len(moves),
        n_layers=_N_LAYERS,
        plan_ms=measure.quartiles(planning),
        apply_ms=measure.quartiles(samples[1:]),
    )


def host(n_ctx: int) -> None:
    """Sequence operations on the host, in microseconds."""
    held = filled(n_ctx, n_used=n_ctx // 2)
    operations: dict[str, Callable[[], Any]] = {
        "seq_rm": lambda: cells.seq_rm(held, 0, 100, 5000),
        "seq_cp": lambda: cells.seq_cp(held, 0, 1),
        "seq_keep": lambda: cells.seq_keep(held, 0),
        "seq_add": lambda: cells.seq_add(held, 0, 100, None, -50),
        "seq_div": lambda: cells.seq_div(held, 0, 100, None, 2),
        "seq_pos_max": lambda: cells.seq_pos_max(held, 0),
        "n_kv": lambda: cells.n_kv(held),
    }
    for name, operation in operations.items():
        for _ in range(20):
            operation()
        samples = measure.clock(operation, 20 * _N_RUNS.value)
        figures = measure.quartiles(samples, scale=1e6, digits=1)
        measure.emit("host", operation=name, n_ctx=n_ctx, us=figures)


def filled(n_ctx: int, n_used: int | None = None) -> cells.Cells:
    """Sequence 0 in the first cells."""
    return cells.place(cells.create(n_ctx, 32), *_tokens(n_ctx if n_used is None else n_used))


def _tokens(n: int, *, every: int = 1, seq_id: int = 0) -> tuple[np.ndarray, ...]:
    slots = np.arange(0, n, every, dtype=np.int32)
    return slots, slots.copy(), np.full(len(slots), seq_id, np.int32)


def decode_plans(n_ctx: int) -> None:
    """What the host does for each decode step: cells, blocks, rows, and the note of the token."""
    shape = {"n_kv_heads": 3, "head_dim": 64, "rope": None}
    full = GroupSpec(layers=(0,), **shape)
    window = GroupSpec(layers=(1,), mask=MaskSpec(kind="window", size=512), **shape)
    for name, groups in {"full": (full,), "window": (window,), "both": (full, window)}.items():
        host = Host(groups, None, CacheConfig(n_ctx=n_ctx))
        for first in range(0, n_ctx // 2, 512):
            _step(host, first, 512)
        steps = iter(range(n_ctx // 2, n_ctx))
        for _ in range(20):
            _step(host, next(steps), 1)
        samples = measure.clock(lambda h=host, s=steps: _step(h, next(s), 1), 20 * _N_RUNS.value)
        figures = measure.quartiles(samples, scale=1e6, digits=1)
        measure.emit("host", operation=f"plan of a step, {name}", n_ctx=n_ctx, us=figures)


def _step(host: Host, first: int, n: int) -> None:
    pos, zeros = np.arange(first, first + n, dtype=np.int32), np.zeros(n, np.int32)
    planned = host.find(zeros, {0: first})
    host.places(planned, n)
    host.append(planned, pos, zeros)


def _copy_bandwidth(arrays: Sequence[jax.Array]) -> float:
    """GB/s of a copy of the arrays by one compiled program, reads and writes counted."""
    copy = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)
    held = [jnp.zeros_like(x) for x in arrays]
    samples = []
    for _ in range(_N_RUNS.value + 1):
        start = time.perf_counter()
        held = jax.block_until_ready(copy(held))
        samples.append(time.perf_counter() - start)
    return 2 * sum(x.nbytes for x in held) / float(np.median(samples[1:])) / 1e9


if __name__ == "__main__":
    app.run(main)
