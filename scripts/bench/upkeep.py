"""K-shift, defrag and the host's bookkeeping, on the shapes of known models.

    python -m scripts.bench.upkeep
    python -m scripts.bench.upkeep --what k_shift,defrag --shape llama-3.1-8b --type_k bf16 \
        --type_v bf16 --n_ctx 131072

What is rotated or moved is set against the bandwidth of a copy in the same run. Bytes are those of
the blocks touched: read once, and written once where a block changes, as in a copy.
By default the shape is SmolLM2's with 4,096 cells.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, get_args

import jax
import numpy as np
from absl import flags

from kvrt import CacheConfig, GroupSpec, MaskSpec, cells
from kvrt.cellcache import contents
from kvrt.cellcache.host_cells import HostCells
from kvrt.cells import edits
from kvrt.cells.edits import SeqEdit
from kvrt.cells.slots import one_sequence
from kvrt.cli.process.startup import available_bytes
from kvrt.kv_types import KVDtype
from kvrt.program import estimate
from kvrt.program.step import on_device
from kvrt.sizes import extent, store_spec
from kvrt.store import kv as kv_store
from kvrt.upkeep import shift
from kvrt.upkeep.defrag import plan_defrag
from scripts._lib import cases, commands, measure, shapes

_KINDS = ["k_shift", "defrag", "host"]
_WHAT = flags.DEFINE_list("what", _KINDS, f"Of {', '.join(_KINDS)}.")
_SHAPE = flags.DEFINE_enum("shape", "smollm2-135m", sorted(shapes.SHAPES), "Model of these sizes.")
_LAYERS = flags.DEFINE_integer("layers", None, "Only its first layers.", lower_bound=1)
_N_CTX = flags.DEFINE_integer("n_ctx", 4096, "Cells; a part of four times as many, too.", 512)
_TYPE_K = flags.DEFINE_enum("type_k", "f32", get_args(KVDtype), "KV dtype of keys.")
_TYPE_V = flags.DEFINE_enum("type_v", "f32", get_args(KVDtype), "KV dtype of values.")
_N_RUNS = flags.DEFINE_integer("runs", 31, "Samples of each figure.", lower_bound=1)

_HOST_CELLS = 32768
_FULL = GroupSpec(layers=(0,), n_kv_heads=3, head_dim=64, rope=None)
_WINDOW = dataclasses.replace(_FULL, layers=(1,), mask=MaskSpec(kind="window", size=512))


def main() -> None:
    commands.check_names(_WHAT, _KINDS)
    n = _N_CTX.value
    if "k_shift" in _WHAT.value:
        for n_ctx, n_moved in ((n, n), (4 * n, n), (4 * n, 256)):
            k_shift(n_ctx, n_moved)
    if "defrag" in _WHAT.value:
        defrag(n)
    if "host" in _WHAT.value:
        host(_HOST_CELLS)
        edits_of_cache(_HOST_CELLS)
        decode_plans(_HOST_CELLS)


def _group() -> GroupSpec:
    return cases.all_layers(shapes.shape(_SHAPE.value, _LAYERS.value))


def _config(n_ctx: int) -> CacheConfig:
    types: dict[str, Any] = {"type_k": _TYPE_K.value, "type_v": _TYPE_V.value}
    return CacheConfig(n_ctx=n_ctx, **types)


def _case(group: GroupSpec, config: CacheConfig) -> dict[str, Any]:
    """What a line says of the cache, and why it is not tried where they cannot fit."""
    said = {"shape": _SHAPE.value, "n_layers": len(group.layers), "n_ctx": config.n_ctx}
    said |= {"type_k": config.type_k, "type_v": config.type_v}
    need, limit = estimate.of_cells([group], None, config).n_bytes, 0.9 * available_bytes()
    if need > limit:
        said["skipped"] = f"needs {measure.gib(need)} GiB of {measure.gib(limit)} that are free"
    return said


def k_shift(n_ctx: int, n_moved: int) -> None:
    """Rotates n_moved cells of n_ctx, in every layer."""
    group, config = _group(), _config(n_ctx)
    measure.copy_gb_s()  # first, for it takes memory of its own
    said = {**_case(group, config), "n_moved": n_moved}
    if "skipped" in said:
        measure.emit("k_shift", **said)
        return
    held = cases.filled(n_ctx)
    rows = kv_store.create(store_spec(group, config))

    @functools.partial(jax.jit, donate_argnums=0)
    def run(rows: kv_store.KVStore, held: cells.Cells) -> kv_store.KVStore:
        size = extent(group, config)
        plan = shift.plan_shift(held, size.n_blocks, size.block_size)
        return shift.apply_shift(rows, plan, group, n_ctx)

    held = on_device(cells.seq_add(held, 0, 0, n_moved, 7))
    program = run.lower(rows, held).compile()

    def once() -> kv_store.KVStore:
        nonlocal rows
        rows = program(rows, held)
        return rows

    samples = measure.clock(once, _N_RUNS.value + 1)[1:]
    n_bytes = 2 * sum(x.nbytes for x in jax.tree.leaves(rows.k)) * n_moved // n_ctx
    analysis = program.memory_analysis()
    measure.emit(
        "k_shift",
        **said,
        ms=measure.quartiles(samples),
        **measure.beside_copy(samples, n_bytes),
        temp_bytes=None if analysis is None else analysis.temp_size_in_bytes,
    )


def defrag(n_ctx: int) -> None:
    """Packs a cache in which every second cell was freed."""
    group, config = _group(), _config(n_ctx)
    measure.copy_gb_s()  # first, for it takes memory of its own
    said = _case(group, config)
    if "skipped" in said:
        measure.emit("defrag", **said)
        return
    held = cases.every_second_freed(n_ctx)
    planning = measure.clock(lambda: plan_defrag(held)[1].n_moves, _N_RUNS.value)
    (moves,) = plan_defrag(held)[1].rounds
    size = extent(group, config)
    by_block = kv_store.plan_block_moves(moves[:, 0], moves[:, 1], size.block_size)
    assert by_block is not None, "no cell is read and written"
    move = jax.jit(kv_store.move_blocks, donate_argnums=0)
    rows = kv_store.create(store_spec(group, config))
    blocks = (np.asarray(by_block.src), np.asarray(by_block.dst))
    n_bytes = cases.bytes_touched(rows, size.n_blocks, *blocks)

    def once() -> kv_store.KVStore:
        nonlocal rows
        for first in range(0, len(by_block.src), size.n_blocks):
            rows = move(rows, *kv_store.part_of_moves(by_block, first, size.n_blocks))
        return rows

    samples = measure.clock(once, _N_RUNS.value + 1)[1:]
    measure.emit(
        "defrag",
        **said,
        n_moves=len(moves),
        n_bytes=n_bytes,
        plan_ms=measure.quartiles(planning),
        apply_ms=measure.quartiles(samples),
        **measure.beside_copy(samples, n_bytes),
    )


def host(n_ctx: int) -> None:
    """Sequence operations on the host, in microseconds."""
    held = cases.filled(n_ctx, n_used=n_ctx // 2)
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


def edits_of_cache(n_ctx: int) -> None:
    """The same on all that the host keeps: cells of every group, token history, counts, indexes."""
    half = n_ctx // 2
    operations: dict[str, SeqEdit] = {
        "seq_rm": edits.Remove(seq_id=0, p0=100, p1=5000),
        "seq_rm of the end": edits.Remove(seq_id=0, p0=half - 2000),
        "seq_cp": edits.Copy(src=0, dst=1),
        "seq_keep": edits.Keep(seq_id=0),
        "seq_add": edits.Shift(seq_id=0, p0=100, d=-50),
        "seq_div": edits.Divide(seq_id=0, p0=100, d=2),
    }
    for n_used in (half, n_ctx):
        host = HostCells((_FULL,), None, CacheConfig(n_ctx=n_ctx, type_k="f32", type_v="f32"))
        for first in range(0, n_used, 512):
            _step(host, first, 512)
        before = host.contents

        def once(edit: SeqEdit, host: HostCells = host, before: Any = before) -> float:
            start = time.perf_counter()
            host.commit(contents.apply(before, edit)[0])
            seconds = time.perf_counter() - start
            host.commit(before)
            return seconds

        for name, edit in operations.items():
            samples = [once(edit) for _ in range(20 * _N_RUNS.value + 20)][20:]
            figures = measure.quartiles(samples, scale=1e6, digits=1)
            said = {"operation": f"whole {name}", "n_ctx": n_ctx, "n_used": n_used}
            measure.emit("host", **said, us=figures)


def decode_plans(n_ctx: int) -> None:
    """What the host does for each decode step: cells, blocks, and the token's history."""
    kinds = {"full": (_FULL,), "window": (_WINDOW,), "both": (_FULL, _WINDOW)}
    for name, groups in kinds.items():
        host = HostCells(groups, None, CacheConfig(n_ctx=n_ctx, type_k="f32", type_v="f32"))
        for first in range(0, n_ctx // 2, 512):
            _step(host, first, 512)
        steps = iter(range(n_ctx // 2, n_ctx))
        for _ in range(20):
            _step(host, next(steps), 1)
        samples = measure.clock(lambda h=host, s=steps: _step(h, next(s), 1), 20 * _N_RUNS.value)
        figures = measure.quartiles(samples, scale=1e6, digits=1)
        measure.emit("host", operation=f"plan of a step, {name}", n_ctx=n_ctx, us=figures)


def _step(host: HostCells, first: int, n: int) -> None:
    step = one_sequence(np.zeros(n, np.int32), 0, first, n)
    planned = host.find(step.seq_ids, step.first)
    host.places(step, [x.slots for x in planned.found], planned.states)
    host.append(planned, step.pos, step.tokens)


if __name__ == "__main__":
    commands.run(main)
