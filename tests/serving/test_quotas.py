"""Quotas and reservations: what a request may have at once, and what nobody takes from it."""

import numpy as np
import pytest

from kvrt import Sampling
from kvrt.errors import BadRequest
from kvrt.options.serving import Rules
from kvrt.policies import AttentionSinks, ContextShift
from tests.serving.engines import N_BATCH, N_ROWS, alone, ask, make, served

pytestmark = pytest.mark.usefixtures("numpy_device")

WARM = Sampling(temp=0.9, top_k=8, seed=7)


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 32, n).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "policy"),
    [("cell", AttentionSinks(n_sink=4, n_window=30)), ("paged", ContextShift(n_keep=3))],
)
def test_a_quota_is_the_context_of_a_policy(mode, policy):
    """Requests of two contexts in one engine: each is what a Runtime of its context gives."""
    engine = make("full", mode, rules=Rules(n_batch=N_BATCH, n_ctx_seq=80))
    asked = [
        ask(i, prompt(11 + i, i), 60, quota=quota, policy=policy, sampling=WARM, n=2)
        for i, quota in enumerate((40, 24))
    ]
    got = served(engine, asked)
    for request in asked:
        assert got[request.id, 0] == alone("full", request, n_ctx=request.quota)
    assert engine.stats().drops["events"] > 2


def preempted(engine, asked):
    """Ids of requests in the order in which they are preempted, while all are served."""
    names, plan = [], engine._scheduler.plan

    def spied():
        found = plan()
        names.extend(s.request.id for s in found.preempted)
        return found

    engine._scheduler.plan = spied
    got = served(engine, asked)
    del engine._scheduler.plan
    for request in asked:
        assert got[request.id, 0] == alone("full", request)
    assert len(engine.space._free) == N_ROWS
    return names


@pytest.mark.parametrize(
    ("mode", "order"),
    [
        ("cell", "fcfs"),
        pytest.param("cell", "priority", marks=pytest.mark.slow),
        pytest.param("paged", "fcfs", marks=pytest.mark.slow),
    ],
)
def test_what_is_reserved_is_not_preempted(mode, order):
    """Without a reservation the last one goes; with one those before it do."""
    rules = Rules(n_batch=N_BATCH, admit="chunk", order=order)
    engine = make("full", mode, rules=rules, n_ctx=64, prefix_cache=False)
    asked = [ask(i, prompt(9, i), 14, sampling=WARM, priority=i) for i in range(4)]
    assert "3" in preempted(engine, asked)
    asked[3] = ask(3, prompt(9, 3), 14, sampling=WARM, priority=3, reserve=99)
    names = preempted(engine, asked)
    assert names and "3" not in names


@pytest.mark.slow
def test_beyond_what_it_reserved_a_request_is_preempted_as_others():
    rules = Rules(n_batch=N_BATCH, admit="chunk")
    asked = [ask(i, prompt(9, i), 20, sampling=WARM, reserve=12) for i in range(4)]
    assert preempted(make("full", rules=rules, n_ctx=80), asked)


def test_a_reservation_is_kept_before_it_is_used():
    """A short prompt that reserves nearly all: the next request waits for its end."""
    engine = make("full", n_ctx=80)
    engine.add_request(ask("a", prompt(5), 40, reserve=60))
    engine.step()
    engine.add_request(ask("b", prompt(62, 1), 3))
    engine.add_request(ask("c", prompt(12, 2), 20, reserve=8, n=2))
    for _ in range(20):
        engine.step()
        assert [s.request.id for s in engine.running] == ["a"]
    while engine.has_work:
        engine.step()
    assert len(engine.space._free) == N_ROWS
    assert not any(engine.space.manager.promises.n_kept())


@pytest.mark.slow
def test_forks_and_samples_reserve_for_themselves():
    engine = make("full", n_ctx=96)
    request = ask("a", prompt(9), 20, sampling=WARM, n=3, reserve=28)
    got = {}
    engine.add_request(request)
    for _ in range(4):
        for out in engine.step():
            got.setdefault((out.id, out.sample), []).extend(out.tokens)
    engine.fork("a", "b")
    while engine.has_work:
        for out in engine.step():
            got.setdefault((out.id, out.sample), []).extend(out.tokens)
    assert engine.stats().sequences["preempted"] == 0
    assert got["a", 0] == alone("full", request) and got["b", 0] == got["a", 0][-len(got["b", 0]) :]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"quota": 0}, r"quota is 0; it must be a whole number in \[1, "),
        ({"reserve": -1}, r"reserve is -1; it must be a whole number in \[0, "),
        ({"quota": 30, "reserve": 31}, "reserve is 31, above its quota of 30 tokens; lower it"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(told, said):
    with pytest.raises(BadRequest, match=f"request 'a': {said}"):
        ask("a", [1, 2], **told)


def test_a_quota_that_cannot_be_met_is_refused_in_one_line():
    engine = make("full", n_ctx=64)
    for told, said in (
        ({"quota": 20}, "need room for 28 tokens, its quota is 20; shorten it, or give it a pol"),
        (
            {"quota": 9, "policy": ContextShift(n_keep=8)},
            "ContextShift keeps 8 tokens, which leaves nothing to drop in the 9 of one request",
        ),
    ):
        with pytest.raises(BadRequest, match=f"request 'a': .*{said}"):
            engine.add_request(ask("a", prompt(9), 20, **told))
    assert not engine.has_work
