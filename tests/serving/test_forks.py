"""Forks of running samples: each is what a Runtime gives that is told the same from the start."""

import numpy as np
import pytest

from kvrt import After, Sampling, SelfExtend
from kvrt.errors import BadRequest, CacheFull
from kvrt.options.serving import Rules
from kvrt.policies import AttentionSinks, ContextShift
from tests.serving.engines import N_BATCH, N_ROWS, ask, make, runtime
from tests.serving.soundspace import assert_sound

pytestmark = pytest.mark.usefixtures("numpy_device")

WARM, OTHER = Sampling(temp=0.9, top_k=8, seed=7), Sampling(temp=0.8, seed=21)
PENALTY = Sampling(repeat_penalty=1.5, repeat_last_n=5)


def wanted(kind, request, n, sampling, *, n_ctx=128, extend=None):
    """Tokens of a request of which n are sampled as it says, and the rest in another way."""
    policy = None if isinstance(request.policy, str) else request.policy
    at = runtime(kind, n_ctx, policy, extend)
    at.clear()
    at.append(request.tokens)
    first = [t.id for t in at.generate(n, sampling=request.sampling)] if n else []
    text = [*request.tokens, *first]
    after = After(token=first[-1], n_sampled=n) if n else None
    told = dict(sampling=sampling, recent=text[-sampling.repeat_last_n :], after=after)
    return first + [t.id for t in at.generate(request.n_predict - n, **told)]


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 32, n).tolist()


def finish(engine, got):
    while engine.has_work:
        for out in engine.step():
            assert out.error is None
            got.setdefault((out.id, out.sample), []).extend(out.tokens)
        assert_sound(engine)
    assert len(engine.space._free) == N_ROWS
    return got


def until(engine, got, n, name="a"):
    """Steps until so many tokens of a request are sampled."""
    while len(got.get((name, 0), [])) < n:
        for out in engine.step():
            got.setdefault((out.id, out.sample), []).extend(out.tokens)


def check_fork(engine, kind, request, n, sampling, **oracle):
    """A request, and a fork of it at its nth token that is sampled otherwise."""
    got = {}
    engine.add_request(request)
    until(engine, got, n)
    n_shared = engine.fork("a", "b", sampling=sampling)
    finish(engine, got)
    whole = wanted(kind, request, request.n_predict, request.sampling, **oracle)
    other = wanted(kind, request, n, sampling, **oracle)
    assert got["a", 0] == whole
    assert got["b", 0] == other[n:]
    return n_shared


@pytest.mark.slow
def test_a_fork_goes_its_own_way_and_its_source_as_before():
    """In the middle of a block, and where one ends."""
    engine = make()
    for n in (1, 4):
        request = ask("a", prompt(9), 12, sampling=WARM)
        assert check_fork(engine, "full", request, n, OTHER) == 9 + n - 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), [("full", "cell"), ("recurrent", "paged")])
def test_forks_are_sampled_otherwise(kind, mode):
    """The matrix has forks of every kind of layers, in both modes."""
    engine = make(kind, mode)
    for n, n_prompt, sampling in ((1, 7, PENALTY), (6, 30, Sampling())):
        request = ask("a", prompt(n_prompt), 10, sampling=WARM)
        check_fork(engine, kind, request, n, sampling)
    engine.add_request(ask("a", prompt(12), 10, sampling=WARM))
    got = {}
    until(engine, got, 3)
    engine.fork("a", "b")
    finish(engine, got)
    assert got["b", 0] == got["a", 0][3:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "mode", "n", "rope"),
    [
        (ContextShift(n_keep=3), "cell", 45, "write"),
        (AttentionSinks(n_sink=6, n_window=19), "paged", 2, "read"),
    ],
)
def test_a_fork_of_what_a_policy_dropped_from_drops_by_itself(policy, mode, n, rope):
    """Before a drop and after some; both drop again, and neither moves what the other has."""
    rules = Rules(n_batch=N_BATCH, n_ctx_seq=40)
    engine = make("full", mode, rules=rules, n_ctx=120, rope=rope)
    request = ask("a", prompt(11), 90, sampling=WARM, policy=policy)
    n_shared = check_fork(engine, "full", request, n, OTHER, n_ctx=40)
    assert n_shared == 11 + n - 1
    assert engine.stats().drops["events"] > 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), [("full", "cell"), ("recurrent", "paged")])
def test_a_fork_of_what_self_extend_moved_moves_by_itself(kind, mode):
    extend = SelfExtend(ga_n=2, ga_w=8)
    engine = make(kind, mode, self_extend=extend)
    request = ask("a", prompt(21), 30, sampling=WARM)
    assert check_fork(engine, kind, request, 9, OTHER, extend=extend) == 29
    assert engine.stats().n_extend > 4


@pytest.mark.slow
def test_a_fork_before_its_source_runs_waits_and_is_computed():
    engine, got = make(), {}
    request = ask("a", prompt(40), 5, sampling=WARM)
    engine.add_request(request)
    assert engine.fork("a", "waits", sampling=OTHER) == 0
    engine.step()  # 8 of its 40 tokens
    assert engine.fork("a", "within", sampling=OTHER) == 8
    finish(engine, got)
    other = wanted("full", request, 0, OTHER)
    assert got["a", 0] == wanted("full", request, 0, WARM)
    assert got["waits", 0] == got["within", 0] == other


def test_a_fork_without_a_free_sequence_waits_and_sees_the_same():
    engine, got = make(), {}
    for i in range(N_ROWS - 1):
        engine.add_request(ask(i, prompt(5, i + 3), 30))
    request = ask("a", prompt(9), 12, sampling=WARM)
    engine.add_request(request)
    until(engine, got, 5)
    assert engine.fork("a", "b", sampling=OTHER) == 0
    finish(engine, got)
    assert got["b", 0] == wanted("full", request, 5, OTHER)[5:]


def test_forks_are_preempted_and_cancelled_as_others_are():
    rules = Rules(n_batch=N_BATCH, admit="chunk")
    engine, got = make("full", rules=rules, n_ctx=64), {}
    request = ask("a", prompt(9), 30, sampling=WARM)
    engine.add_request(request)
    until(engine, got, 5)
    for name in "bcd":
        engine.fork("a", name, sampling=OTHER)
    engine.fork("b", "e")
    engine.cancel("c")
    finish(engine, got)
    other = wanted("full", request, 5, OTHER)[5:]
    assert got["a", 0] == wanted("full", request, 0, WARM)
    assert got["b", 0] == got["d", 0] == got["e", 0] == other
    assert engine.stats().sequences["preempted"] and engine.stats().sequences["forked"] >= 3


def test_what_cannot_be_forked_is_said_in_one_line():
    engine = make("full", "cell")
    engine.add_request(ask("a", prompt(5), 3))
    with pytest.raises(BadRequest, match="'x', sample 0, is not being served; it ended or never"):
        engine.fork("x", "b")
    with pytest.raises(BadRequest, match="'a', sample 1, is not being served"):
        engine.fork("a", "b", sample=1)
    with pytest.raises(BadRequest, match="'a' is being served already"):
        engine.fork("a", "a")
    with pytest.raises(BadRequest, match="text of 1 to 256 characters"):
        engine.fork("a", "")
    with pytest.raises(BadRequest, match="repeat_last_n is 99, this engine looks back 64"):
        engine.fork("a", "b", sampling=Sampling(repeat_penalty=2, repeat_last_n=99))
    finish(engine, {})
    with pytest.raises(BadRequest, match="is not being served"):
        engine.fork("a", "b")
    assert not engine.has_work


def test_a_fork_that_cannot_be_computed_again_needs_room_at_once():
    rules = Rules(n_batch=N_BATCH, n_ctx_seq=40)
    engine, got = make("full", rules=rules, n_ctx=64), {}
    request = ask("a", prompt(11), 80, policy=ContextShift(n_keep=3))
    engine.add_request(request)
    until(engine, got, 45)
    with pytest.raises(CacheFull, match=r"'a' cannot be forked now: it dropped \d+ tokens.*; fork"):
        engine.fork("a", "b")
    finish(engine, got)
    assert got["a", 0] == wanted("full", request, 0, request.sampling, n_ctx=40)
