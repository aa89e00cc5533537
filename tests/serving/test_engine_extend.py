"""SelfExtend in an engine: each request gets what a Runtime with the same gives it alone."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime, Sampling, SelfExtend
from kvrt.errors import BadConfig, BadRequest
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import Rules
from kvrt.policies import ContextShift
from kvrt.serving.engine import Engine
from tests.marks import slow
from tests.serving.engines import MODELS, N_BATCH, N_ROWS, B, ask, drawn, make, served

pytestmark = pytest.mark.usefixtures("numpy_device")

CACHE = SelfExtend(ga_n=2, ga_w=12)
PAPER = SelfExtend(ga_n=3, ga_w=7, kind="paper")
WIDE = SelfExtend(ga_n=4, ga_w=32)


KINDS = [  # of the default suite one a kind
    (CACHE, "write", "paged"),
    slow(CACHE, "read", "cell"),
    slow(PAPER, "read", "cell"),
    slow(PAPER, "write", "paged"),
    slow(WIDE, "read", "paged"),
]


_OF_RULES = {f.name for f in dataclasses.fields(Rules)}


@functools.cache
def shared(extend, rope, mode, kind="full", **options):
    """An engine that tests share; options are fields of its rules and of its cache."""
    rules = {name: options.pop(name) for name in _OF_RULES & options.keys()}
    told = {"n_ctx": 360, "attention": "chunked", "rope": rope, **options}
    return make(kind, mode, rules=Rules(n_batch=N_BATCH, **rules), self_extend=extend, **told)


@functools.cache
def oracle(kind, extend, rope, type_k, policy, n_ctx):
    config = CacheConfig(
        **dict(n_ctx=n_ctx, block_size=8, n_ubatch=N_BATCH, rope=rope),
        type_k=type_k,
        self_extend=extend,
    )
    return Runtime(MODELS[kind](), config, policy=policy)


def alone(engine, kind, request, sample, n_ctx):
    config, policy = engine.config, request.policy
    policy = None if isinstance(policy, str) else policy
    at = oracle(kind, config.self_extend, config.rope, config.type_k, policy, n_ctx)
    at.clear()
    at.append(request.tokens)
    s = request.sampling
    sampling = Sampling(temp=s.temp, top_k=s.top_k, seed=s.seed + sample)
    return [t.id for t in at.generate(request.n_predict, sampling=sampling)]


def check(engine, asked, n_ctx=200, kind="full"):
    tokens = served(engine, asked)
    for request in asked:
        for sample in range(request.n):
            key = request.id, sample
            assert tokens[key] == alone(engine, kind, request, sample, n_ctx), key
    assert len(engine.space._free) == N_ROWS


def mixed(rng, n=5):
    """A request of many rounds, prompts beyond several of them, and short ones."""
    lively = Sampling(temp=0.9, top_k=8, seed=7)
    return [
        ask("long", rng.integers(0, 32, 101), 12),
        *[ask(i, tokens, 9) for i, tokens in enumerate(drawn(rng, n, high=30))],
        ask("two", rng.integers(0, 32, 21), 40, n=2, sampling=lively),
        ask("second", rng.integers(0, 32, 50), 20),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("extend", "rope", "mode"), KINDS)
def test_long_requests_beside_short_ones(extend, rope, mode):
    engine = shared(extend, rope, mode)
    n_before = engine.stats().n_extend
    check(engine, mixed(np.random.default_rng(1)))
    assert (engine.stats().n_extend > n_before + 20) == (extend is CACHE)


@pytest.mark.slow
def test_what_was_preempted_is_computed_again_with_the_same_rounds():
    rng = np.random.default_rng(3)
    engine = shared(CACHE, "write", "paged", n_ctx=128, admit="chunk")
    victims, preempt = [], engine._scheduler._requests.preempt
    engine._scheduler._requests.preempt = lambda s: (victims.append(s.n_gone), preempt(s))
    asked = [ask(i, tokens, 40) for i, tokens in enumerate(drawn(rng, 8, 20, 60))]
    check(engine, asked)
    assert any(victims)


@pytest.mark.slow
def test_quantized_keys_are_quantized_again_as_often():
    check(shared(CACHE, "write", "paged", type_k="int8"), mixed(np.random.default_rng(7)))


@pytest.mark.slow
def test_states_of_recurrent_layers_have_no_positions():
    engine = shared(CACHE, "read", "paged", "recurrent")
    check(engine, mixed(np.random.default_rng(6), 3), kind="recurrent")


@pytest.mark.slow
def test_layers_of_one_pool_rotate_as_each_of_them_does():
    check(
        shared(CACHE, "write", "paged", "full ropes"),
        mixed(np.random.default_rng(9), 3),
        kind="full ropes",
    )


@pytest.mark.slow
def test_the_plain_attention_of_several_sequences_groups_alike():
    check(shared(PAPER, "read", "paged", attention="reference"), mixed(np.random.default_rng(8), 2))


@pytest.mark.slow
def test_prefixes_are_found_and_what_moves_is_found_by_nobody():
    """The paper's kind moves nothing; in the cache a hit ends before the first round, in copies."""
    rng = np.random.default_rng(4)
    start = rng.integers(0, 32, 40).tolist()
    short = [ask(i, start[:9], 2) for i in "ab"]
    for extend, rope, n_hits in ((PAPER, "read", [8, 8, 40, 8]), (CACHE, "write", [8, 8, 8, 8])):
        engine, hits = shared(extend, rope, "paged"), [0]
        check(engine, short[:1])
        n_before = engine.stats().prefix["hit"]
        again = ask("again", start[:9], 2)
        for request in [short[1], ask("c", [*start, 1], 20), ask("d", [*start, 2], 20), again]:
            check(engine, [request])
            hits.append(engine.stats().prefix["hit"] - n_before)
        assert np.diff(hits).tolist() == n_hits


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["read", "write"])
def test_a_policy_drops_what_the_papers_kind_reads(rope):
    engine = shared(PAPER, rope, "paged", n_ctx_seq=40)
    asked = mixed(np.random.default_rng(5))[1:6]
    check(engine, [ask("x", range(30), 60, policy=ContextShift(n_keep=3)), *asked], n_ctx=40)


def test_extending_is_refused_when_made():
    sizes = dict(n_ctx=64, n_seq_max=4, block_size=B, n_ubatch=N_BATCH, self_extend=CACHE)
    made = [
        ("window", "cannot reach layers that see a window of their own"),
        ("states", "has no positions to divide, for all layers are recurrent"),
    ]
    for (kind, says), mode in itertools.product(made, ("cell", "paged")):
        with pytest.raises(BadConfig, match=says):
            Engine(MODELS[kind](), CacheConfig(**sizes), EngineConfig(mode=mode))
    both = "ContextShift and SelfExtend in the cache both move positions; choose one of them"
    with pytest.raises(BadConfig, match=both):
        Engine(MODELS["full"](), CacheConfig(**sizes), policy=ContextShift(n_keep=3))
    engine = shared(CACHE, "write", "paged")
    with pytest.raises(BadRequest, match=both):
        engine.add_request(ask("x", [1], 99, policy=ContextShift(n_keep=3)))
    assert not engine.has_work
