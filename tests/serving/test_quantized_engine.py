"""Rows in codes in blocks: found, moved to tiers and back, and in cells, with their scales."""

import dataclasses

import numpy as np
import pytest

from kvrt import CacheConfig, MaskSpec, Runtime
from kvrt.errors import BadConfig
from kvrt.options.serving import Rules, TierConfig
from kvrt.program import estimate
from kvrt.serving.engine import Engine
from tests.serving.engines import N_BATCH, ask, make, one
from tests.store.plaincodec import head_bytes
from tests.toys import ToyLm

INT8 = {"type_k": "int8", "type_v": "int8", "hadamard": True}


def evict(engine, rng):
    for i in range(3):
        one(engine, ask(f"filler {i}", rng.integers(0, 32, 55), 4, salt=rng.bytes(4)))
    engine.tiers.flush()
    engine.space.begin_step()


@pytest.mark.slow
def test_a_hit_and_a_tier_give_what_a_miss_gives():
    """To the bit: each time all but the last tokens are found, and one step computes the rest."""
    rng = np.random.default_rng(0)
    tiers = TierConfig(host_bytes=1 << 20, always=True)
    rules = Rules(n_batch=N_BATCH)
    tokens = rng.integers(0, 32, N_BATCH + 3)
    with make("full", rules=rules, tiers=tiers, n_ctx=64, **INT8) as engine:
        first = one(engine, ask("first", tokens))
        resident = one(engine, ask("hit", tokens))
        engine.tiers.flush()
        engine.space.begin_step()
        evict(engine, rng)
        back = one(engine, ask("tier", tokens))
        loaded = engine.stats().tiers["host"].counts["loaded"]
        cold = one(engine, ask("cold", tokens, cache=False))
    assert loaded > 0
    for found in (resident, back, cold):
        assert found[0] == first[0]
        np.testing.assert_array_equal(found[1], first[1])


@pytest.mark.slow
def test_cells_and_blocks_change_places_with_their_scales():
    config = CacheConfig(n_ctx=64, n_seq_max=2, block_size=8, n_ubatch=16, **INT8)
    runtime = Runtime(ToyLm(n_layers=1), config)
    rng = np.random.default_rng(1)
    runtime.append(rng.integers(0, 32, 5).tolist(), 1)
    runtime.append(rng.integers(0, 32, 19).tolist(), 0)
    before = np.asarray(runtime.probe([3, 4], 0))
    assert runtime.to_blocks(0) > 0
    np.testing.assert_allclose(runtime.probe([3, 4], 0), before, atol=1e-5)
    runtime.to_cells(0)
    np.testing.assert_allclose(runtime.probe([3, 4], 0), before, atol=1e-5)
    runtime.seq_rm(1)
    assert runtime.defrag(by_sequence=True) >= 0
    np.testing.assert_allclose(runtime.probe([3, 4], 0), before, atol=1e-5)


# --- types by group, and what they take -----------------------------------------------------------

MASKS = [MaskSpec(), MaskSpec(kind="window", size=24)]
TYPES = {
    "int8": {"type_k": "int8", "type_v": "int8"},
    "K8V4": {"type_k": "q8_0", "type_v": "int4"},
    "by group": {"type_k": ("q8_0", "f16"), "type_v": ("int2", "int4")},
}


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_what_is_said_is_what_is_allocated(types):
    model = ToyLm(masks=MASKS, head_dim=32)
    config = CacheConfig(n_ctx=203, block_size=16, n_ubatch=7, **types)
    said = estimate.of_cells(model.groups, None, config)
    runtime = Runtime(model, config)
    assert said.cache_bytes == runtime.stats().cache_bytes
    cells = [g.n_held for g in said.parts]
    each = [x if isinstance(x, tuple) else (x, x) for x in (config.type_k, config.type_v)]
    widths = [2 * (head_bytes(k, 32) + head_bytes(v, 32)) for k, v in zip(*each, strict=True)]
    padded = [-(-n // 16) * 16 for n in cells]
    assert said.cache_bytes == sum(n * w for n, w in zip(padded, widths, strict=True))
    assert [p.types for p in said.parts] == [f"{k}/{v}" for k, v in zip(*each, strict=True)]


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_an_engine_allocates_what_blocks_of_its_types_take(types):
    model = ToyLm(masks=MASKS, head_dim=32)
    config = CacheConfig(n_ctx=128, n_seq_max=2, block_size=8, n_ubatch=8, **types)
    said = estimate.of_blocks(model.groups, None, config)
    engine = Engine(model, config)
    assert said.cache_bytes == engine.device.n_bytes
    n_pools = 2 if isinstance(config.type_k, tuple) else 1
    assert len(engine.device.cache.stores) == n_pools
    assert {p.types for p in said.parts} <= {"int8/int8", "q8_0/int4", "q8_0/int2", "f16/int4"}


@pytest.mark.slow
def test_pools_of_several_types_serve_requests():
    asked = ask("a", np.random.default_rng(2).integers(0, 32, 21), 8)
    sizes = dict(n_ctx=128, type_k=("f32", "int8", "int8"), type_v=("f32", "int8", "int8"))
    rules = Rules(n_batch=N_BATCH)
    found = [one(make("window", mode, rules=rules, **sizes), asked) for mode in ("paged", "cell")]
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type_k": ("f16", "f16", "int8")}, "type_k has 3 types .* the model 2 groups of layers"),
        ({"type_v": ("f16",)}, "type_v has 1 types .f16., the model 2 groups"),
        ({"type_k": ()}, r"type_k is \(\); give a type"),
        (
            {"type_k": "int8", "hadamard": True, "rope": "read"},
            "hadamard transforms keys after RoPE",
        ),
        ({"type_k": "q8_0"}, "do not fill a head of 16; choose int8"),
    ],
)
def test_types_that_cannot_be_are_refused_in_a_line(options, message):
    model = ToyLm(masks=MASKS)
    with pytest.raises(BadConfig, match=message) as found:
        Runtime(model, CacheConfig(n_ctx=32, block_size=8, **options))
    assert "\n" not in str(found.value)
    with pytest.raises(BadConfig, match=message):
        estimate.of_blocks(model.groups, None, CacheConfig(n_ctx=32, block_size=8, **options))


def test_codes_of_values_go_with_raw_keys():
    config = CacheConfig(type_k="f16", type_v="int8", rope="read", hadamard=True)
    assert dataclasses.replace(config, type_v="f16").hadamard
