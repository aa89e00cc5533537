"""An engine whose size is given in bytes takes no more, and no less than it could."""

import dataclasses

import jax
import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt.errors import BadConfig
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import Rules, TierConfig
from kvrt.policies import AttentionSinks
from kvrt.program import estimate
from kvrt.serving.engine import Engine
from kvrt.serving.sizing import budget
from tests.latentlm import RANK, ROPE
from tests.serving.engines import MODELS, N_BATCH, ask, make
from tests.sharedlm import D

CONFIG = CacheConfig(n_seq_max=3, block_size=8, n_ubatch=N_BATCH, type_v="bf16")
POLICY = AttentionSinks(n_sink=4, n_window=19)


def options(n_bytes, mode="paged", **more):
    rules = Rules(n_batch=N_BATCH, n_ctx_seq=40)
    return EngineConfig(mode=mode, rules=rules, budget_bytes=n_bytes, **more)


def taken(engine):
    """Bytes of an engine's cache, and of positions and owners on the device and on the host."""
    cache, space = engine.device.cache, engine.space
    host = [x.cells for x in space._arrays._cells.values()]
    trees = cache.stores, cache.states, cache.cells, host
    return sum(x.nbytes for tree in trees for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("kind", "mode", "policy"),
    [
        *(("full", "paged", None), ("full", "cell", POLICY)),
        *(("window", "paged", POLICY), ("window", "cell", None)),
        *(("sinks", "paged", None), ("sinks", "cell", POLICY)),
        *(("recurrent", "paged", None), ("recurrent", "cell", None)),
    ],
)
def test_what_is_allocated_is_what_was_given(kind, mode, policy):
    model = MODELS[kind]()
    engine = Engine(model, CONFIG, options(600_000, mode), policy=policy)
    assert 0.8 * 600_000 < taken(engine) <= 600_000
    again = dataclasses.replace(options(600_000, mode), budget_bytes=taken(engine))
    at = (model.groups, model.recurrent)
    same = budget.fit_budget(*at, CONFIG, again, policy)
    assert same.n_ctx == engine.config.n_ctx
    less = dataclasses.replace(again, budget_bytes=taken(engine) - 1)
    assert budget.fit_budget(*at, CONFIG, less, policy).n_ctx < same.n_ctx


@pytest.mark.parametrize(
    ("kind", "sizes", "readers"),
    [("latent", (ROPE, RANK), [(), ()]), ("shared", (D, D), [((2, 0),), ((3, 1),)])],
)
def test_a_pool_of_two_groups_has_what_they_keep_once(kind, sizes, readers):
    """A latent is no keys and values of heads; layers that read others have no array."""
    layout = make(kind).device.layout
    assert [g.kv_of for g in layout.groups] == readers
    (store,) = layout.stores
    assert (store.head_dim, store.head_dim_v, store.n_buffers) == (*sizes, 1)


def test_tiers_on_the_host_are_counted():
    tiers = TierConfig(host_bytes=200_000)
    with Engine(MODELS["full"](), CONFIG, options(600_000, tiers=tiers)) as engine:
        assert taken(engine) <= 400_000
    without = Engine(MODELS["full"](), CONFIG, options(400_000))
    assert without.config.n_ctx == engine.config.n_ctx


@pytest.mark.parametrize("policy", [None, POLICY], ids=["no policy", "policy"])
@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_the_least_that_is_said_does(mode, policy):
    """One byte less is refused in one line, which says how many; those serve a request alone."""
    with pytest.raises(BadConfig, match="1000 bytes have no room for one request of 40") as error:
        Engine(MODELS["window"](), CONFIG, options(1000, mode), policy=policy)
    least = int(str(error.value).partition("which needs ")[2].partition(";")[0])
    assert "\n" not in str(error.value)
    with pytest.raises(BadConfig, match=f"which needs {least};"):
        Engine(MODELS["window"](), CONFIG, options(least - 1, mode), policy=policy)
    engine = Engine(MODELS["window"](), CONFIG, options(least, mode), policy=policy)
    engine.add_request(ask("a", np.arange(20) % 32, 21 if policy is None else 60))
    assert not engine._limits.n_max < 40


def test_layers_that_take_the_same_for_any_length():
    for mode in ("cell", "paged"):
        engine = Engine(MODELS["rolling"](), CONFIG, options(300_000, mode))
        assert engine.config.n_ctx >= 3 * 40


def test_what_it_became_is_said():
    model, given = MODELS["window"](), options(600_000)
    config = budget.fit_budget(model.groups, None, CONFIG, given, None)
    engine = Engine(model, CONFIG, given)
    said = budget.budget_line(model.groups, None, config, given, None)
    (pool,) = engine.space.pools
    n_blocks = f"{pool.n_blocks - 1:,}"
    wanted = f"{config.n_ctx:,} tokens in {n_blocks} blocks of 8, 3 requests of 40 at once, "
    assert said == f"{wanted}{taken(engine):,} bytes"
    few = budget.fit_budget(model.groups, None, CONFIG, options(40_000), None)
    assert "1 request of 40 at once" in budget.budget_line(
        model.groups, None, few, options(40_000), None
    )


def test_who_gives_bytes_says_how_long_a_request_may_be():
    with pytest.raises(BadConfig, match="set n_ctx_seq of the rules"):
        Engine(MODELS["full"](), CONFIG, EngineConfig(budget_bytes=1 << 20))


def test_what_a_runtime_with_a_policy_takes():
    """Windows keep what the policy never drops."""
    model, config = MODELS["window"](), CacheConfig(n_ctx=200, block_size=8, n_ubatch=8)
    said = estimate.of_cells(model.groups, None, config, n_pinned=POLICY.n_keep)
    assert Runtime(model, config, policy=POLICY).stats().cache_bytes == said.cache_bytes
