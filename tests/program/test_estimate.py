"""What a cache is said to take, against the arrays of a runtime or an engine that was then made."""

import dataclasses
import functools

import jax
import pytest

from kvrt import (
    CacheConfig,
    DoubleSparsity,
    Engine,
    EngineConfig,
    GroupSpec,
    MaskSpec,
    Quest,
    Runtime,
)
from kvrt.errors import BadConfig
from kvrt.paged.layout.groups import group_layers, layer_caches
from kvrt.paged.layout.sizing import for_tokens
from kvrt.program import estimate
from kvrt.serving.sizing.pool_sizes import engine_plan
from kvrt.sizes import rounded_up
from tests.toys import HybridLm, ToyLm

WINDOW, CHUNK = MaskSpec(kind="window", size=24), MaskSpec(kind="chunked", size=16)
MODELS = {
    "full": lambda: ToyLm(),
    "window": lambda: ToyLm(n_layers=1, masks=[WINDOW]),
    "mixed": lambda: ToyLm(n_layers=3, masks=[WINDOW, MaskSpec(), CHUNK]),
    "sinks": lambda: ToyLm(n_layers=1, masks=[dataclasses.replace(WINDOW, n_sink=4)]),
    "hybrid": lambda: HybridLm(),
    "windowed hybrid": lambda: HybridLm(mask=WINDOW),
    "recurrent": lambda: HybridLm(attention=False),
}
CONFIGS = {
    "plain": CacheConfig(n_ctx=256, block_size=16, n_ubatch=32),
    "odd": CacheConfig(n_ctx=203, block_size=24, n_ubatch=7, type_k="bf16", type_v="f16"),
    "short": CacheConfig(n_ctx=20, block_size=32, n_ubatch=8, type_v="bf16"),
    "many": CacheConfig(n_ctx=512, block_size=16, n_ubatch=16, n_seq_max=40, n_rs_seq=3),
    "whole": CacheConfig(n_ctx=300, block_size=16, n_ubatch=32, n_seq_max=3, swa_full=True),
}


def n_bytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_runtime_takes_what_was_said(model, config):
    model = model()
    said = estimate.of_cells(model.groups, model.recurrent, config)
    runtime = Runtime(model, config)
    cache = runtime.cache
    made = [n_bytes(store) for store in cache.stores]
    made += [n_bytes(cache.states)] if model.recurrent else []
    assert [part.n_bytes for part in said.parts] == made
    assert said.cache_bytes == runtime.stats().cache_bytes
    host = sum(x.nbytes for c in runtime.group_cells for x in (c.pos, c.delta, c.seqs))
    assert said.index_bytes == n_bytes(cache.cells) + host


KEPT = {"n_checkpoints": 3, "checkpoint_bytes": 1 << 20}
SIZES = CONFIGS | {"checkpoints": dataclasses.replace(next(iter(CONFIGS.values())), **KEPT)}


# Every pair of a model, a size and a mode.
EACH = [
    (model, ("cell", "paged")[(i + j) % 2], size)
    for i, model in enumerate(MODELS)
    for j, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("model", "mode", "size"), EACH)
def test_an_engine_takes_what_was_said(model, mode, size):
    model, config = MODELS[model](), SIZES[size]
    n_batch = max(config.n_ubatch, config.n_seq_max)
    config = dataclasses.replace(config, n_rs_seq=0, n_ubatch=n_batch)
    engine, of = Engine(model, config, EngineConfig(mode=mode)), (model.groups, model.recurrent)
    plan = engine_plan(*of, config, engine.options, None)
    said = estimate.of_blocks(*of, config, plan=plan, page=1 if mode == "cell" else None)
    cache, space = engine.device.cache, engine.space
    made = n_bytes(cache.stores) + n_bytes(cache.states)
    assert said.cache_bytes + said.checkpoint_bytes == made
    assert said.plan is not None
    of_plan = sum(p.n_blocks * p.block_bytes for p in said.plan.pools) + said.rounding_bytes
    assert made == of_plan
    host = [x.cells for x in space._arrays._cells.values()]
    assert said.index_bytes == n_bytes(cache.cells) + n_bytes(host)


SPARSE = {"n_cells": 80, "n_dense": 1}
SELECTS = {
    "quest": Quest(**SPARSE),
    "double_sparsity": DoubleSparsity(
        **SPARSE, channels=(((0, 3),) * 2,) * 3, label_type="int4", by_cell=True
    ),
}


@pytest.mark.parametrize("select", SELECTS.values(), ids=SELECTS)
@pytest.mark.parametrize("mode", ["runtime", "cell", "paged"])
def test_labels_of_sparse_reads_are_counted(mode, select):
    if mode == "cell" and select.unit > 1:
        pytest.skip("refused: which cells are units depends on other requests")
    model, config = ToyLm(n_layers=3), dataclasses.replace(CONFIGS["plain"], select=select)
    how = estimate.of_cells if mode == "runtime" else estimate.of_blocks
    how = functools.partial(how, page=1) if mode == "cell" else how
    said = how(model.groups, None, config)
    engine = Engine(model, config, EngineConfig(mode=mode)) if mode != "runtime" else None
    made = engine.stats().cache_bytes if engine else Runtime(model, config).stats().cache_bytes
    assert said.cache_bytes == made
    without = how(model.groups, None, CONFIGS["plain"])
    assert said.cache_bytes - said.label_bytes == without.cache_bytes and said.label_bytes > 0


def test_blocks_are_those_of_any_sequences_of_so_many_tokens():
    model, config = MODELS["mixed"](), dataclasses.replace(CONFIGS["many"], n_ubatch=64)
    said = estimate.of_blocks(model.groups, None, config)
    layout = group_layers(layer_caches(model.groups, None, config))
    assert said.plan == for_tokens(layout, n_tokens=512, n_seq=40, n_inflight=64)
    parts = {(p.kind, p.size): p for p in said.parts}
    assert set(parts) == {("window", 24), ("full", 0), ("chunked", 16)}
    assert parts["full", 0].n_held == (512 + 40 * 15) // 16
    assert said.null_bytes == said.plan.pools[0].block_bytes == 16 * 2 * 16 * 8
    n_arrays = 1 + rounded_up(said.plan.pools[0].n_blocks - 1)
    assert said.index_bytes == n_arrays * 16 * 2 * (4 + 4 + 8)


def test_padding_is_told():
    """11 layers of windows and 3 full ones: groups of 3, the last a layer short."""
    masks = [MaskSpec() if i % 5 == 0 else WINDOW for i in range(14)]
    model, config = ToyLm(n_layers=14, masks=masks), CONFIGS["plain"]
    said = estimate.of_blocks(model.groups, None, config)
    windows = next(p for p in said.parts if p.kind == "window")
    assert (windows.n_groups, windows.n_layers, said.n_padding) == (4, 11, 1)
    assert said.empty_bytes == windows.empty_bytes == windows.n_bytes // 12


def test_one_page_size_takes_more_where_states_are_large():
    model, config = HybridLm(width=256), CONFIGS["plain"]
    own = estimate.of_blocks(model.groups, model.recurrent, config)
    pages = estimate.of_pages(model.groups, model.recurrent, config)
    assert pages.plan is not None and len(pages.plan.pools) == 1
    # A state of 4,096 bytes and 64 bytes a token: blocks of 64 tokens.
    assert {p.block_size for p in pages.parts} == {64}
    assert own.empty_bytes == pages.empty_bytes == 0
    wide = HybridLm(width=257)
    padded = estimate.of_pages(wide.groups, wide.recurrent, config)
    states = next(p for p in padded.parts if p.kind == "recurrent")
    assert (states.block_size, states.n_held) == (80, 2)
    assert padded.empty_bytes == 2 * (80 * 64 - 16 * 257)


@pytest.mark.parametrize("how", [estimate.of_cells, estimate.of_blocks, estimate.of_pages])
@pytest.mark.parametrize("name", ["full", "mixed", "hybrid"])
def test_the_greatest_context_fits_and_the_next_does_not(how, name):
    model, config = MODELS[name](), CONFIGS["many"]

    def of(config):
        return how(model.groups, model.recurrent, config)

    least = of(dataclasses.replace(config, n_ctx=1)).n_bytes
    assert estimate.most_tokens(of, config, least - 1) == 0
    for budget in (least, least + 10_000, 12_345_678):
        n = estimate.most_tokens(of, config, budget)
        assert of(dataclasses.replace(config, n_ctx=n)).n_bytes <= budget
        assert of(dataclasses.replace(config, n_ctx=n + 1)).n_bytes > budget


def test_windows_and_states_have_room_for_any_length():
    model, config = MODELS["recurrent"](), CONFIGS["plain"]

    def of(config):
        return estimate.of_cells(model.groups, model.recurrent, config)

    assert estimate.most_tokens(of, config, 10_000) == 2**31 - 1


def test_pages_that_do_not_divide_are_refused():
    groups = [
        GroupSpec(layers=(0,), n_kv_heads=1, head_dim=64, rope=None),
        GroupSpec(layers=(1,), n_kv_heads=1, head_dim=96, rope=None, mask=WINDOW),
    ]
    assert len(estimate.of_blocks(groups, None, CacheConfig()).parts) == 2
    with pytest.raises(BadConfig, match="no multiple"):
        estimate.of_pages(groups, None, CacheConfig())
