"""An endless request beside short ones: each gets what a Runtime with its policy gives it alone."""

import functools

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime, Sampling
from kvrt.errors import BadConfig, BadRequest
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import Rules
from kvrt.policies import AttentionSinks, ContextShift
from kvrt.serving.engine import Engine
from tests.numpy_device.device import compiled
from tests.serving.engines import MODELS, N_BATCH, N_ROWS, B, ask, drawn, served

pytestmark = pytest.mark.usefixtures("numpy_device")

N_CTX = 40
POLICIES = {
    "shift": ContextShift(n_keep=3),
    "discard": ContextShift(n_keep=2, n_discard=5),
    "sinks": AttentionSinks(n_sink=4, n_window=19),
    "sinks by 6": AttentionSinks(n_sink=5, n_window=21, n_drop=6),
}


KINDS = [  # one a policy, each with another rope and mode; the matrix has the pairs
    ("shift", "write", "cell"),
    ("sinks", "read", "paged"),
    ("discard", "write", "paged"),
    ("sinks by 6", "read", "cell"),
]


def serve(engine, asked):
    """Tokens of all samples, and what was dropped of each, as (n_past, n_dropped)."""
    drops, plan = {}, engine._scheduler.plan

    def spied():
        found = plan()
        for state, n_past, due in found.edited:
            for drop in due.drops:
                key = state.request.id, state.sample
                drops.setdefault(key, []).append((n_past, drop.n))
                n_past -= drop.n
        return found

    engine._scheduler.plan = spied
    tokens = served(engine, asked)
    del engine._scheduler.plan
    return tokens, drops


@functools.cache
def shared(kind, mode, rope, n_ctx=120, **rules):
    rules = Rules(n_batch=N_BATCH, n_ctx_seq=N_CTX, **rules)
    sizes = dict(n_ctx=n_ctx, n_seq_max=N_ROWS, block_size=B, n_ubatch=N_BATCH)
    config = CacheConfig(**sizes, rope=rope)
    return Engine(MODELS[kind](), config, EngineConfig(mode=mode, rules=rules))


@functools.cache
def oracle(kind, rope, policy):
    sizes = dict(n_ctx=N_CTX, block_size=8, n_ubatch=N_BATCH)
    config = CacheConfig(**sizes, rope=rope)
    return Runtime(MODELS[kind](), config, policy=policy)


def alone(kind, rope, request, sample=0):
    at = oracle(kind, rope, None if request.policy == "default" else request.policy)
    at.clear()
    n_before = len(at.stats().drops)
    at.append(request.tokens)
    s = request.sampling
    sampling = Sampling(temp=s.temp, top_k=s.top_k, seed=s.seed + sample)
    tokens = [t.id for t in at.generate(request.n_predict, sampling=sampling)]
    return tokens, [(d.n_past, d.n_dropped) for d in at.stats().drops[n_before:]]


def check(engine, kind, rope, asked):
    tokens, drops = serve(engine, asked)
    for request in asked:
        for sample in range(request.n):
            key = request.id, sample
            wanted = alone(kind, rope, request, sample)
            assert (tokens[key], drops.get(key, [])) == wanted, key
    assert len(engine.space._free) == N_ROWS
    return drops


def mixed(rng, policy, n_predict=90, n=6):
    """An endless request, one with a prompt beyond its context, and short ones."""
    lively = Sampling(temp=0.9, top_k=8, seed=7)
    short = drawn(rng, n, high=20)
    long = rng.integers(0, 32, 3 * N_CTX + 5)
    return [
        ask("endless", short[0], n_predict, policy=policy, sampling=lively),
        *[ask(i, tokens, 9) for i, tokens in enumerate(short)],
        ask("long", long, 30, policy=policy),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rope", "mode"), KINDS)
def test_an_endless_request_beside_short_ones(mode, rope, name):
    rng = np.random.default_rng(1)
    asked = mixed(rng, POLICIES[name])
    drops = check(shared("full", mode, rope), "full", rope, asked)
    assert len(drops["endless", 0]) > 2 and len(drops["long", 0]) > 2


@pytest.mark.slow
@pytest.mark.parametrize(("rope", "mode"), [("read", "paged"), ("write", "cell")])
def test_samples_of_one_prompt_drop_apart(mode, rope):
    """What they share is copied before it moves."""
    rng = np.random.default_rng(2)
    policy, lively = POLICIES["shift"], Sampling(temp=1, top_k=9, seed=3)
    asked = [
        ask("a", rng.integers(0, 32, 21), 60, n=2, policy=policy, sampling=lively),
        ask("b", rng.integers(0, 32, 50), 25, n=2, policy=policy, sampling=lively),
        ask("c", rng.integers(0, 32, 9), 8),
    ]
    check(shared("full", mode, rope), "full", rope, asked)


@pytest.mark.slow
def test_short_requests_are_preempted_and_the_endless_one_is_not():
    rng = np.random.default_rng(3)
    engine = shared("full", "paged", "write", n_ctx=64, admit="chunk")
    asked = mixed(rng, POLICIES["sinks"], n=9)
    victims, preempt = [], engine._scheduler._requests.preempt
    engine._scheduler._requests.preempt = lambda s: (victims.append((s, s.n_dropped)), preempt(s))
    check(engine, "full", "write", asked)
    assert victims and not any(n for _, n in victims)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["write", "read"])
def test_no_later_request_hits_what_was_moved(rope):
    """What a policy never drops is found, in whole blocks; the rest of its prompt is not."""
    rng, policy = np.random.default_rng(6), ContextShift(n_keep=11)
    prompt, engine = rng.integers(0, 32, 30), shared("full", "paged", rope)
    asked = ask("endless", prompt, 80, policy=policy)
    hits = []
    engine.add_request(asked)
    for i in range(60):
        outs = engine.step()
        if i % 10 == 5:
            engine.add_request(ask(f"later {i}", prompt, 4))
        hits += [o.n_cached for o in outs if o.id != "endless" and o.finish_reason]
        # Nobody shares, and nobody finds, a block that the endless one moves.
        for state in engine.running:
            if state.n_dropped:
                table = engine.space.manager.table(state.seq_id, 0)
                later = table[-(-policy.n_keep // B) :]
                pool = engine.space.pools[0]
                assert not set(later) & pool._keys.keys()
                assert pool.count(later, n_refs=1) == len(later)
    assert hits[0] in (8, 11 // B * B) and len(hits) > 3
    while engine.has_work:
        engine.step()
    again = [ask("e2", prompt, 80, policy=policy), ask("plain", prompt, 9)]
    check(engine, "full", rope, again)
    # Here the first part of the prompt, 9 tokens or two blocks, ends before what is kept.
    for n_keep in (30, 31):
        long, policy = rng.integers(0, 32, 60), ContextShift(n_keep=n_keep)
        for name in ("first", "second"):
            check(engine, "full", rope, [ask(name, long, 30, policy=policy)])


@pytest.mark.slow
def test_windows_that_a_drop_leaves_whole():
    """A request has what a drop lets its window of 9 see again, whatever that leaves."""
    engine, rng = shared("window", "cell", "write"), np.random.default_rng(4)
    lively = Sampling(temp=1, top_k=9, seed=3)
    two = ask("two", rng.integers(0, 32, 21), 60, n=2, policy=POLICIES["sinks"], sampling=lively)
    check(engine, "window", "write", [*mixed(rng, POLICIES["shift"]), two])
    policy = ContextShift(n_keep=3, n_discard=30)
    check(engine, "window", "write", [ask("x", [1, 2], 90, policy=policy)])


def test_policies_are_refused_when_made():
    sizes = dict(n_ctx=64, n_seq_max=4, block_size=B, n_ubatch=N_BATCH)
    options = EngineConfig(mode="cell")
    policy = ContextShift(n_keep=3)
    with pytest.raises(BadConfig, match="the state of recurrent layers cannot forget"):
        Engine(MODELS["recurrent"](), CacheConfig(**sizes), options, policy=policy)
    with pytest.raises(BadConfig, match="keeps 63 tokens, which leaves nothing to drop in the 64"):
        Engine(MODELS["full"](), CacheConfig(**sizes), options, policy=ContextShift(n_keep=63))
    only = CacheConfig(**(sizes | {"n_seq_max": 1}))
    with pytest.raises(BadConfig, match="keeps up to 64 tokens, and needs two blocks more for"):
        Engine(MODELS["full"](), only, policy=policy)
    engine = shared("full", "cell", "write")
    with pytest.raises(BadRequest, match="keeps 39 tokens, which leaves nothing to drop in the 40"):
        engine.add_request(ask("x", [1], 99, policy=ContextShift(n_keep=39)))
    with pytest.raises(BadRequest, match="or give it a policy, or raise n_ctx"):
        engine.add_request(ask("x", [1], 99))


@compiled()
@pytest.mark.slow
def test_a_policy_costs_nothing_before_a_drop():
    """The same plans and programs as without; `none` takes the default policy from a request."""
    made = []
    for policy in (None, POLICIES["sinks"]):
        sizes = dict(n_ctx=96, n_seq_max=N_ROWS, block_size=B, n_ubatch=N_BATCH)
        options = EngineConfig(rules=Rules(n_batch=N_BATCH, n_ctx_seq=N_CTX))
        engine = Engine(MODELS["full"](), CacheConfig(**sizes), options, policy=policy)
        rng = np.random.default_rng(5)
        asked = [ask(i, x, 5) for i, x in enumerate(drawn(rng, 7, high=15))]
        found = serve(engine, asked)
        made.append((found, sorted(map(str, engine.programs.compiled())), engine.stats().n_steps))
    assert made[0] == made[1]
    with pytest.raises(BadRequest, match="give it a policy"):
        engine.add_request(ask("x", [1], 99, policy="none"))
    serve(engine, [ask("y", [1], 99)])
    assert engine.stats().drops["tokens"] == 99 - 23
