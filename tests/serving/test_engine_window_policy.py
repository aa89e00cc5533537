"""Policies in blocks beside windows: what a drop moves is what a Runtime's cells show."""

import functools

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt.errors import BadConfig
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import Rules
from kvrt.policies import AttentionSinks, ContextShift
from kvrt.serving.engine import Engine
from tests.marks import slow
from tests.serving import test_engine_policy as plain
from tests.serving.engines import MODELS, N_BATCH, N_ROWS, B, ask, drawn

pytestmark = pytest.mark.usefixtures("numpy_device")

N_CTX = plain.N_CTX
POLICIES = {
    # After a drop windows see what is never dropped, or not; a drop leaves more than a window.
    "shift": ContextShift(n_keep=6, n_discard=28),
    "short": ContextShift(n_keep=4, n_discard=10),
    "sinks": AttentionSinks(n_sink=4, n_window=19),
}


@functools.cache
def paged(kind, rope):
    rules = Rules(n_batch=N_BATCH, n_ctx_seq=N_CTX)
    sizes = dict(n_ctx=120, n_seq_max=N_ROWS, block_size=B, n_ubatch=N_BATCH)
    config = CacheConfig(**sizes, rope=rope)
    return Engine(MODELS[kind](), config, EngineConfig(rules=rules))


@functools.cache
def runtime(kind, rope, policy):
    # Without windows that roll, so that a layer of windows alone drops as well.
    sizes = dict(n_ctx=N_CTX, block_size=8, n_ubatch=N_BATCH, swa_full=True)
    config = CacheConfig(**sizes, rope=rope)
    return Runtime(MODELS[kind](), config, policy=policy)


@pytest.fixture
def oracle(monkeypatch):
    monkeypatch.setattr(plain, "oracle", runtime)


@pytest.mark.parametrize(
    ("kind", "rope", "name"),
    [
        slow("ropes", "write", "shift"),
        slow("chunked", "read", "shift"),
        slow("sinks", "read", "sinks"),
    ],
)
def test_an_endless_request_beside_short_ones(oracle, kind, rope, name):
    rng = np.random.default_rng(1)
    engine = paged(kind, rope)
    asked = plain.mixed(rng, POLICIES[name], n=3)
    drops = plain.check(engine, kind, rope, asked)
    assert len(drops["endless", 0]) > 1 and len(drops["long", 0]) > 2
    assert all(p.n_free == p.n_blocks - 1 for p in engine.space.pools)


@pytest.mark.slow
def test_what_is_never_dropped_is_found_in_all_groups(oracle):
    """By one who drops, and by one who does not; whole where windows will see it again."""
    rng, engine = np.random.default_rng(6), paged("window", "write")
    prompt = rng.integers(0, 32, 30)
    for n_keep, n_discard in ((12, 26), (16, 8)):
        policy = ContextShift(n_keep=n_keep, n_discard=n_discard)
        hits = []
        for i in range(3):
            drops = i != 1
            name = f"{n_keep} {i}"
            asked = ask(name, prompt, 60, policy=policy) if drops else ask(name, prompt, 4)
            engine.add_request(asked)
            tokens = []
            while engine.has_work:
                for out in engine.step():
                    tokens += out.tokens
            hits.append(out.n_cached)
            assert tokens == plain.alone("window", "write", asked)[0]
        assert hits[2] == n_keep
        prompt = prompt[::-1]


def test_what_is_refused():
    sizes = dict(n_ctx=64, n_seq_max=2, block_size=B, n_ubatch=N_BATCH)
    few = ContextShift(n_keep=2, n_discard=20)
    options = EngineConfig(rules=Rules(n_batch=N_BATCH, n_ctx_seq=N_CTX))
    with pytest.raises(BadConfig, match=r"see the first 3 for ever: .* keep 3, or set swa_full"):
        Engine(MODELS["sinks"](), CacheConfig(**sizes), options, policy=few)
    Engine(MODELS["sinks"](), CacheConfig(**sizes, swa_full=True), options, policy=few)


@pytest.mark.slow
def test_pools_have_room_for_what_windows_keep():
    """The engine's policy is counted in its blocks: each request that fits its context is taken."""
    policy = ContextShift(n_keep=20, n_discard=15)
    sizes = dict(n_ctx=56, n_seq_max=1, block_size=B, n_ubatch=N_BATCH)
    options = EngineConfig(rules=Rules(n_batch=N_BATCH, n_ctx_seq=44))
    without = Engine(MODELS["window"](), CacheConfig(**sizes), options)
    engine = Engine(MODELS["window"](), CacheConfig(**sizes), options, policy=policy)
    assert engine.space.pools[0].n_blocks > without.space.pools[0].n_blocks
    rng = np.random.default_rng(3)
    for tokens in drawn(rng, 2):
        engine.add_request(ask("x", tokens, 70))
        while engine.has_work:
            for out in engine.step():
                assert out.error is None
    assert engine.stats().drops["tokens"]
