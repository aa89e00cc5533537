"""Attention of one token over many cells, dense and sparse, in interleaved runs.

    python -m scripts.bench.layers.sparse_reads --n_tokens 7000 --rounds 30

Layers of SmolLM2's shape with random keys, one after the other in one program, as in a decode step;
a sparse read chooses by labels first. Lines of memory are counted, of the keys and values and of
the labels, beside the time.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from kvrt import BlockView, CacheConfig, GroupSpec, LayerAttention, LayerKV, TokenQKV, attend
from kvrt.arrays import Array, array_bytes
from kvrt.attention.select import choose, labels, lines, read
from kvrt.options.select import DoubleSparsity, Quest, Select
from kvrt.sizes import store_spec
from kvrt.store import kv as kv_store
from scripts._lib import commands, measure, rounds

_N_TOKENS = flags.DEFINE_integer("n_tokens", 7000, "Cells that hold a token.", lower_bound=256)
_N_CELLS = flags.DEFINE_integer("n_cells", 0, "Cells read; 0 is an eighth of the tokens.")
_N_LAYERS = flags.DEFINE_integer("n_layers", 8, "Layers of a run.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 30, "Runs of each side.", lower_bound=3)

_N_HEADS, _N_GROUP, _DIM, _N_CHANNELS = 3, 3, 64, 16
_GROUP = GroupSpec(layers=(0,), n_kv_heads=_N_HEADS, head_dim=_DIM, rope=None)


def main() -> None:
    n_cells = _N_CELLS.value or _N_TOKENS.value // 8 // 16 * 16
    rng = np.random.default_rng(0)
    channels = tuple(
        tuple(sorted(map(int, rng.choice(_DIM, _N_CHANNELS, replace=False))))
        for _ in range(_N_HEADS)
    )
    heavy = functools.partial(DoubleSparsity, n_cells=n_cells, channels=(channels,), n_dense=0)
    sides: dict[str, tuple[Select | None, int]] = {
        "dense, blocks of 256": (None, 256),
        "quest, blocks of 256": (Quest(n_cells=n_cells), 256),
        "quest, blocks of 16": (Quest(n_cells=n_cells), 16),
        "double sparsity, f32 labels": (heavy(), 256),
        "double sparsity, int4 labels": (heavy(label_type="int4"), 256),
        "double sparsity by cell": (heavy(by_cell=True), 256),
    }
    runs = {name: rounds.timed(_run(select, b)) for name, (select, b) in sides.items()}
    times = rounds.interleaved(runs, _ROUNDS.value)
    for name, (select, b) in sides.items():
        measure.emit(
            "sparse_reads",
            side=name,
            n_tokens=_N_TOKENS.value,
            n_cells=n_cells,
            n_layers=_N_LAYERS.value,
            ms=times.ms(name),
            times_as_fast=times.over("dense, blocks of 256", name, digits=2),
            **_counted(select, b, n_cells),
        )


def _run(select: Select | None, block_size: int) -> Callable[[], Array]:
    """A run over all layers, each with the output of the one before as its query."""
    n = _N_TOKENS.value
    config = CacheConfig(n_ctx=-(-n // 256) * 256, block_size=block_size, select=select)
    spec = store_spec(_GROUP, dataclasses.replace(config, type_k="f32", type_v="f32"))
    n_blocks = spec.extent.n_blocks
    kv = [_random_layer(i, n_blocks, block_size) for i in range(_N_LAYERS.value)]
    pos = np.arange(n_blocks * block_size, dtype=np.int32)
    pos = np.where(pos < n, pos, -1).reshape(n_blocks, block_size)
    view = BlockView(
        pos=jnp.asarray([n], jnp.int32),
        bits=jnp.ones((1, 1), jnp.uint32),
        blocks=jnp.arange(n_blocks, dtype=jnp.int32),
        n_blocks=jnp.int32(-(-n // block_size)),
        cell_pos=jnp.asarray(pos),
        cell_seqs=jnp.asarray((pos >= 0).astype(np.uint32)[..., None]),
    )
    made = []
    if select is not None:
        plan = labels.LabelPlan(select=select, layers=((0,),))
        blocks = jnp.arange(n_blocks, dtype=jnp.int32), jnp.int32(n_blocks)
        for x in kv:
            store = kv_store.KVStore(k=(x.k,), v=(x.v,))  # pyright: ignore[reportArgumentType]
            made += labels.rebuild(plan, 0, plan.create([spec])[0], store, pos, blocks)

    @jax.jit
    def run(q: Array, kv: list[LayerKV], made: list[labels.LabelArray], view: BlockView) -> Array:
        units = select and choose.unit_view(view, _GROUP, select)
        for i, of_layer in enumerate(kv):
            own = q[:, ::_N_GROUP]
            args = TokenQKV(q=q, k=own, v=own), of_layer, view, LayerAttention(group=_GROUP)
            if select is None or units is None:
                out = attend(*args)[0]
            else:
                chosen_by = read.Selection(labels=made[i], units=units)
                out = read.jitted(args, chosen_by, select, 0, attend)
            q = q + out
        return q

    q = jax.random.normal(jax.random.key(1), (1, _N_HEADS * _N_GROUP, _DIM))
    return lambda: run(q, kv, made, view)


def _random_layer(seed: int, n_blocks: int, block_size: int) -> LayerKV:
    of_k, of_v = jax.random.split(jax.random.key(seed))
    return LayerKV(
        k=jax.random.normal(of_k, (n_blocks, _N_HEADS, _DIM, block_size)),
        v=jax.random.normal(of_v, (n_blocks, _N_HEADS, block_size, _DIM)),
    )


def _counted(select: Select | None, block_size: int, n_cells: int) -> dict[str, object]:
    """Lines of 64 bytes of a layer that a run reads, of cells chosen at random, and of labels."""
    n, rng = _N_TOKENS.value, np.random.default_rng(0)
    every = np.arange(n, dtype=np.int32)
    if select is None:
        return {"lines": _N_HEADS * lines.lines_read(every, block_size, _DIM), "label_lines": 0}
    units = rng.choice(n // select.unit, n_cells // select.unit, replace=False)
    cells = (units[:, None] * select.unit + np.arange(select.unit)).reshape(-1).astype(np.int32)
    found = _N_HEADS * lines.lines_read(cells, block_size, _DIM)
    config = CacheConfig(n_ctx=n, block_size=block_size, select=select, type_k="f32", type_v="f32")
    plan = labels.LabelPlan(select=select, layers=((0,),))
    n_bytes = array_bytes(plan.create([store_spec(_GROUP, config)]))
    return {"lines": found, "label_lines": n_bytes // lines.LINE_BYTES}


if __name__ == "__main__":
    commands.run(main)
