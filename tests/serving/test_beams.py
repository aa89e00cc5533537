"""Beam search in an engine against one that computes every text anew: the brute-force beam."""

import functools

import numpy as np
import pytest

from kvrt import Sampling, SelfExtend
from kvrt.errors import BadRequest
from kvrt.options.serving import Rules
from kvrt.policies import AttentionSinks, ContextShift
from tests.numpy_device.device import compiled
from tests.serving.engines import N_BATCH, N_ROWS, alone, ask, make, runtime
from tests.serving.plainbeams import beam_search
from tests.serving.soundspace import assert_sound

pytestmark = pytest.mark.usefixtures("numpy_device")

WARM = Sampling(temp=0.9, top_k=8, seed=7)


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(0, 32, n).tolist()


def brute_force(kind, request, n_ctx=128, extend=None):
    """What a beam search gives that computes each text from its first token on."""
    policy = None if isinstance(request.policy, str) else request.policy
    at, n = runtime(kind, n_ctx, policy, extend), len(request.tokens)

    @functools.cache
    def logits(text):
        at.clear()
        if policy is None and extend is None:
            return np.asarray(at.append(list(text))[0])
        out = at.append(list(text[:n]))
        for token in text[n:]:  # what moves does so token by token
            out = at.append([token])
        return np.asarray(out[0])

    def next_logits(texts):
        return np.stack([logits(tuple(text)) for text in texts])

    return beam_search(next_logits, list(request.tokens), request.beams)


def assert_nothing_is_left(engine):
    space = engine.space
    assert len(space._free) == N_ROWS and space._n_ahead == 0
    assert not any(space.manager.promises.n_kept())
    space.begin_step()
    assert all(p.n_free == p.n_blocks - 1 for p in space.pools)


def serve(engine, asked):
    """Outputs of all requests, by id and sample; what is promised is there after each step."""
    got = {}
    for request in asked:
        engine.add_request(request)
    while engine.has_work:
        for out in engine.step():
            assert out.error is None
            key = out.id, out.sample
            tokens = got[key].tokens if key in got else ()
            got[key] = out._replace(tokens=(*tokens, *out.tokens))
        assert_sound(engine)
    assert_nothing_is_left(engine)
    return got


def assert_is(got, request, wanted):
    """The best texts of a search, with their scores and why they ended."""
    for i, (score, text) in enumerate(wanted[: request.n]):
        out = got[request.id, i]
        assert list(out.tokens) == text
        assert out.score == pytest.approx(score, abs=1e-4, rel=1e-5)
        assert out.finish_reason == ("stop" if text[-1] in request.stop_ids else "length")
    assert (request.id, request.n) not in got


def check(engine, kind, request, beside=(), **oracle):
    got = serve(engine, [request, *beside])
    assert_is(got, request, brute_force(kind, request, **oracle))
    for other in beside:
        assert list(got[other.id, 0].tokens) == alone(kind, other)
    return got


def test_beams_beside_other_requests_are_those_of_brute_force():
    request = ask("a", prompt(9), 7, num_beams=3, n=2, stop_ids=tuple(range(0, 32, 3)))
    beside = [ask("b", prompt(6, 3), 9, sampling=WARM), ask("c", prompt(20, 4), 3)]
    engine = make()
    check(engine, "full", request, beside)
    assert engine.stats().sequences["forked"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), [("full", "cell"), ("recurrent", "paged")])
def test_penalties_and_early_stopping(kind, mode):
    """Prompts that end within a block and with one; the matrix has every kind of layers."""
    engine = make(kind, mode)
    for n_prompt, n_beams, penalty, early in ((8, 3, 2.0, "never"), (21, 2, -1.0, False)):
        told = dict(num_beams=n_beams, length_penalty=penalty, early_stopping=early, n=2)
        request = ask("a", prompt(n_prompt, n_prompt), 9, stop_ids=(3, 9, 17, 20, 30), **told)
        check(engine, kind, request)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "mode", "rope"),
    [
        (ContextShift(n_keep=3), "cell", "write"),
        (AttentionSinks(n_sink=5, n_window=19), "paged", "read"),
    ],
)
def test_beams_that_outgrow_their_context_drop_alike(policy, mode, rope):
    rules = Rules(n_batch=N_BATCH, n_ctx_seq=40)
    engine = make("full", mode, rules=rules, n_ctx=160, rope=rope)
    request = ask("a", prompt(36), 14, num_beams=2, policy=policy)
    got = check(engine, "full", request, n_ctx=40)
    assert got["a", 0].n_dropped and engine.stats().drops["events"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mode"), [("full", "paged"), ("recurrent", "cell")])
def test_beams_that_self_extend_moves(kind, mode):
    extend = SelfExtend(ga_n=2, ga_w=8)
    engine = make(kind, mode, self_extend=extend)
    request = ask("a", prompt(13), 10, num_beams=2)
    check(engine, kind, request, extend=extend)
    assert engine.stats().n_extend > 2


@pytest.mark.slow
def test_beams_have_their_room_and_others_are_preempted_around_them():
    rules = Rules(n_batch=N_BATCH, admit="chunk")
    engine = make("full", rules=rules, n_ctx=48)
    beside = [ask(i, prompt(7, i), 30, sampling=WARM) for i in range(2)]
    request = ask("a", prompt(9), 12, num_beams=2)
    check(engine, "full", request, beside)
    assert engine.stats().sequences["preempted"]


@pytest.mark.slow
def test_searches_that_do_not_fit_together_follow_each_other():
    engine = make("full", n_ctx=72)
    asked = [ask(i, prompt(9, i), 12, num_beams=3) for i in range(3)]
    got = serve(engine, asked)
    for request in asked:
        assert_is(got, request, brute_force("full", request))


def test_the_best_text_of_a_search_is_found_by_the_next_request():
    engine = make()
    request = ask("a", prompt(17), 12, num_beams=3)
    best = serve(engine, [request])["a", 0].tokens
    again = ask("b", [*request.tokens, *best, 5], 3)
    got = serve(engine, [again])
    assert got["b", 0].n_cached >= 24 and list(got["b", 0].tokens) == alone("full", again)


def test_a_search_ends_as_a_whole_when_it_is_cancelled():
    engine = make()
    engine.add_request(ask("a", prompt(9), 30, num_beams=3, n=2))
    for _ in range(5):
        assert engine.step() == []
    for call in (lambda: engine.cancel("a", 0), lambda: engine.fork("a", "b")):
        with pytest.raises(BadRequest, match="'a' is a beam search, whose beams stand and fall"):
            call()
    with pytest.raises(BadRequest, match="sampled nothing for request 'a'"):
        engine.logits("a")
    engine.cancel("a")
    got = [(out.sample, out.finish_reason, out.tokens) for out in engine.step()]
    assert got == [(0, "cancelled", ()), (1, "cancelled", ())]
    assert not engine.has_work
    assert_nothing_is_left(engine)
    engine.add_request(ask("a", prompt(40), 3, num_beams=4))
    engine.step()  # within its prompt
    engine.cancel("a")
    engine.step()
    assert_nothing_is_left(engine)


def test_a_search_that_never_fits_is_refused():
    engine = make("full", n_ctx=64)
    for request, said in (
        (ask("a", prompt(9), 30, num_beams=4), "reserves room for 4 x 38 tokens, the cache"),
        (ask("a", prompt(9), 2, num_beams=5), "reserves room for 5 x 10 tokens, the cache has"),
        (ask("a", prompt(9), 2, num_beams=60, stop_ids=tuple(range(5))), "60 beams begin with as"),
    ):
        with pytest.raises(BadRequest, match=f"request 'a'.* {said}"):
            engine.add_request(request)
    assert not engine.has_work


@pytest.mark.slow
@compiled()
def test_a_search_compiles_a_program_for_its_first_step_and_one_for_the_others():
    engine = make()
    serve(engine, [ask("a", prompt(9), 20)])
    before = set(engine.programs.compiled())
    serve(engine, [ask("a", prompt(9, 1), 20, num_beams=3)])
    new = [key for key in set(engine.programs.compiled()) - before if key.name == "best_tokens"]
    assert len(new) == 2
    before = set(engine.programs.compiled())
    serve(engine, [ask("a", prompt(9, 2), 60, num_beams=3)])
    assert set(engine.programs.compiled()) == before
