"""Sizes of arrays: few, close above what was asked, and behind it nothing is ever held."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from kvrt import (
    CacheConfig,
    ContextShift,
    Engine,
    EngineConfig,
    MaskSpec,
    Request,
    Runtime,
    session,
)
from kvrt.errors import BadRequest, CacheFull
from kvrt.sizes import Extent, pool_extent, rounded_up
from tests.numpy_device.device import installed
from tests.toys import ToyLm

SIZES = sorted({k << j for j in range(31) for k in range(8, 17)} | set(range(8)))
SOURCES = r", metadata=\{[^}]*\}|\nFileNames\n.*?(?=\n\n%|\n\nENTRY)"
WINDOW = MaskSpec(kind="window", size=24)


@pytest.mark.parametrize("low", [0, 1000, 4090, 100_000, 2**30])
def test_rounded_up_is_the_next_size_and_at_most_an_eighth_more(low):
    for n in range(low, low + 300):
        found = rounded_up(n)
        assert found == next(size for size in SIZES if size >= n)
        assert n <= found <= n * 9 / 8


def test_a_null_block_stands_beside_the_steps():
    assert [pool_extent(1 + n, 16).n_blocks for n in (16, 64, 65)] == [17, 65, 73]


@pytest.mark.parametrize("n_shards", [1, 2, 3, 8])
def test_parts_are_alike(n_shards):
    for n_cells in range(1, 400):
        size = Extent(n_cells=n_cells, block_size=4, n_shards=n_shards)
        assert size.n_blocks % n_shards == 0
        assert n_cells <= size.n_slots < n_cells * 9 / 8 + 4 * n_shards


def texts(runtime):
    """What the programs of a prompt, a decode step, a K-shift and a move of rows say."""
    runtime.append([1, 2, 3, 4, 5])
    list(runtime.generate(2))
    runtime.seq_add(0, 2, None, 1)
    runtime.seq_rm(0, 1, 2)
    runtime.defrag()
    runtime.flush()
    return said(runtime.programs)


def said(programs):
    """Programs as text, without the places in the source they were traced from."""
    found = {key: program.as_text() for key, program in programs.compiled().items()}
    return {
        (key.name, *key.shapes): re.sub(SOURCES, "", text, flags=re.S)
        for key, text in found.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("masks", [None, (WINDOW, MaskSpec())], ids=["full", "mixed"])
def test_two_sizes_of_one_step_share_programs(masks):
    """137 and 143 cells are 35 and 36 blocks of 4, 36 in both arrays; 145 are more."""
    model = ToyLm(n_layers=len(masks or "1"), masks=masks)

    def runtime(n_ctx):
        return Runtime(model, CacheConfig(n_ctx=n_ctx, block_size=4, n_ubatch=8))

    one, other = texts(runtime(137)), texts(runtime(143))
    kinds = {key[0] for key in one}
    assert kinds >= {"forward", "decode_steps", "sampled_once", "shift"} and kinds & {
        "move_kv",
        "move_blocks",
    }
    assert one == other
    larger = runtime(145)
    larger.append([1, 2])
    larger.seq_add(0, 0, None, 1)
    larger.flush()
    assert said(larger.programs)["shift",] != one["shift",]


@pytest.mark.slow
def test_two_engines_of_one_step_share_programs():
    found = []
    for n_ctx in (137, 141):
        config = CacheConfig(n_ctx=n_ctx, n_seq_max=2, block_size=4, n_ubatch=8)
        engine = Engine(ToyLm(), config)
        engine.add_request(Request(id="a", tokens=(1, 2, 3), n_predict=2))
        while engine.has_work:
            engine.step()
        found.append(said(engine.programs))
    assert found[0] == found[1] and found[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cell", "paged"])
def test_an_engine_gives_out_what_was_asked(mode):
    """A request for all of the context is served, one token more is refused."""
    config = CacheConfig(n_ctx=70, n_seq_max=1, block_size=2, n_ubatch=8)
    engine = Engine(ToyLm(), config, EngineConfig(mode=mode))
    assert engine.device.cache.stores[0].v[0].shape[0] == (36 if mode == "cell" else 37)
    (pool,) = engine.space.pool_use()
    assert pool.n_units == (70 if mode == "cell" else 35)
    engine.add_request(Request(id="a", tokens=(1,) * 60, n_predict=10))
    while engine.has_work:
        outputs = engine.step()
    assert outputs[-1].finish_reason == "length"
    # The last token that is drawn needs no place.
    engine.add_request(Request(id="b", tokens=(1,) * 61, n_predict=10))
    with pytest.raises(BadRequest, match="70"):
        engine.add_request(Request(id="c", tokens=(1,) * 62, n_predict=10))


@installed()
def test_the_cache_is_full_at_what_was_asked():
    runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=35, block_size=1, n_ubatch=8))
    assert runtime.cache.cells[0].pos.shape == (36,)
    assert runtime.n_free == runtime.stats().n_ctx == 35
    runtime.append([1] * 35)
    assert runtime.n_free == 0
    with pytest.raises(CacheFull, match="1 tokens need 1 cells, 0 of 35 are free"):
        runtime.append([1])
    runtime.seq_rm(0, 3, 5)
    runtime.append([1, 2])
    runtime.scrub()
    assert np.asarray(runtime.cache.cells[0].pos)[35] == -1


@installed()
def test_the_context_shifts_at_what_was_asked():
    config = CacheConfig(n_ctx=35, block_size=1, n_ubatch=8)
    runtime = Runtime(ToyLm(n_layers=1), config, policy=ContextShift(n_keep=3))
    runtime.append([1] * 35)
    assert runtime.stats().n_shift == 0
    runtime.append([1])
    assert [drop.n_past for drop in runtime.stats().drops] == [35]


@installed()
@pytest.mark.parametrize("n_ctx", [33, 35, 40, 30])
def test_sessions_say_what_was_asked_and_go_to_any_size(n_ctx, tmp_path):
    """Restored to the bit where the sizes are one, and in new cells elsewhere."""
    model, config = ToyLm(n_layers=1), CacheConfig(n_ctx=35, block_size=1, n_ubatch=8)
    source = Runtime(model, config)
    source.append([3, 1, 4, 1, 5, 9, 2, 6] * 4)
    source.seq_rm(0, 6, 12)
    expected = source.probe([7, 8])
    session.save(tmp_path / "x.kv", source.snapshot())
    found = session.read(tmp_path / "x.kv")
    assert [g.n_cells for g in found.groups] == [35]
    runtime = Runtime(model, dataclasses.replace(config, n_ctx=n_ctx))
    runtime.restore(found, {0: 0})
    assert runtime.stats().n_ctx == n_ctx
    if n_ctx == 35:
        assert jax.tree.map(np.array_equal, runtime.cells, source.cells)
    else:
        assert runtime.stats().n_kv == 26
    np.testing.assert_allclose(runtime.probe([7, 8]), expected, rtol=1e-5, atol=1e-5)
    assert (np.asarray(runtime.cache.cells[0].pos)[n_ctx:] == -1).all()
