"""Steps that are dispatched before the last one is read: nothing that is observed depends on it."""

import contextlib
import functools
import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvrt import CacheConfig, Engine, Sampling
from kvrt.cellcache import history as token_history
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import Rules
from kvrt.policies import AttentionSinks, ContextShift
from kvrt.serving.request import samples_of
from tests.numpy_device.device import installed
from tests.runtime.test_bad_logits import poisoned
from tests.serving.engines import MODELS, N_BATCH, N_ROWS, B, ask, make
from tests.serving.soundspace import assert_sound

pytestmark = pytest.mark.slow
SAMPLINGS = [Sampling(), Sampling(temp=1.5, seed=3), Sampling(temp=1, repeat_penalty=1.3, seed=1)]
POLICIES = ["default", "default", ContextShift(n_keep=5), AttentionSinks(n_sink=3, n_window=12)]
# What does not depend on the step that a request comes in: it may be one later than else.
COUNTED = ("finished", "drops", "n_extend", "n_bad_logits")
SALTS = itertools.count()
CANCEL = ()  # instead of requests: the oldest one that is served is cancelled
ALL = (*COUNTED, "n_steps", "tokens", "prefix", "sequences")


def pair(kind, mode, n_ctx=3000, **options):
    """Two engines that differ in whether steps run ahead; those with windows are compiled.

    All histories of a run fit into their cells: what runs ahead takes one earlier, so that other
    texts would leave the cache.
    """
    rules = Rules(n_batch=N_BATCH, n_ctx_seq=48)
    with installed() if kind == "full" else contextlib.nullcontext():
        made = [make(kind, mode, rules=rules, n_ctx=n_ctx, **options) for _ in range(2)]
    made[0]._steps._ahead = made[0].space.keeps_others
    made[1].device.programs = made[0].device.programs
    return made


shared = functools.cache(pair)


REQUEST = st.tuples(
    st.lists(st.integers(0, 31), min_size=1, max_size=24),
    st.integers(1, 20),
    st.sets(st.integers(0, 63), max_size=6),
    st.sampled_from(SAMPLINGS),
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from(POLICIES),
)
# Requests that come, and how many steps run before the next ones do.
HISTORIES = st.lists(st.tuples(st.lists(REQUEST, max_size=2), st.integers(1, 9)), max_size=5)


class Run:
    """What an engine gives of a history."""

    def __init__(self, engine, kind, mode):
        self.engine, self.kind, self.mode = engine, kind, mode
        self.tokens, self.ended, self.asked, self.saved = {}, {}, [], 0
        # What histories before this one have left in the cache is not found.
        self.salt = str(next(SALTS)).encode()

    def play(self, history):
        for asked, n_steps in history:
            for tokens, n_predict, stops, sampling, n, policy in asked:
                self.ask(tokens, n_predict, stops, sampling, n, policy)
            if asked is CANCEL and self.engine._scheduler.live:
                self.engine.cancel(next(iter(self.engine._scheduler.live)))
            for _ in range(n_steps):
                self.step()
        for _ in range(500):
            if not self.engine.has_work:
                return self
            self.step()
        raise AssertionError("the requests do not end")

    def ask(self, tokens, n_predict, stops, sampling, n, policy):
        policy = policy if self.kind == "full" else "default"
        more = 0 if policy == "default" else 40
        options = dict(stop_ids=tuple(stops), sampling=sampling, n=n, policy=policy)
        options |= {"salt": self.salt}
        request = ask(len(self.asked), tokens, n_predict + more, **options)
        self.asked.append(request)
        self.engine.add_request(request)

    def step(self):
        for out in self.engine.step():
            key = out.id, out.sample
            assert key not in self.ended and out.error is None
            self.tokens.setdefault(key, []).extend(out.tokens)
            if out.finish_reason:
                self.ended[key] = out.finish_reason
            if out.tokens:
                top = np.asarray(self.engine.logits(*key))
                assert len(top) and (out.tokens[0] == top.argmax() or self.is_random(out.id))
        for state in self.engine.running:
            assert 0 <= state.n_past_read <= 1 and min(state.tokens) >= 0
            assert state.n_computed - state.n_past_read < len(state.tokens)
        assert_sound(self.engine)

    def is_random(self, name):
        sampling = self.asked[int(name)].sampling
        return sampling.temp > 0 or sampling.repeat_penalty != 1

    def found(self):
        """What the prefix cache has of each text, the sampled tokens included."""
        out = []
        for request in self.asked:
            for sample in range(request.n):
                text = [*request.tokens, *self.tokens.get((request.id, sample), []), 0]
                (probe,) = samples_of(ask("probe", text, salt=self.salt))
                out.append(self.engine.space.find_hit(probe))
        return out


def compare(kind, mode, history, counted=COUNTED):
    ahead, read = shared(kind, mode)
    before = [ahead.stats(), read.stats()]
    runs = [Run(engine, kind, mode).play(history) for engine in (ahead, read)]
    # A request that is cancelled had sampled as much in both, for outputs come in the same steps.
    assert runs[0].tokens == runs[1].tokens and runs[0].ended == runs[1].ended
    assert runs[0].found() == runs[1].found()
    after = [ahead.stats(), read.stats()]
    for name in counted:
        assert less(before[0], after[0], name) == less(before[1], after[1], name), name
    assert less(before[0], after[0], "tokens")["sampled"] == sum(map(len, runs[0].tokens.values()))
    assert all(len(e.space._free) == N_ROWS for e in (ahead, read))
    assert read.stats().n_ahead == 0


def ids_of(snapshot):
    return token_history.tokens(snapshot.history, 0).tolist()


def less(before, after, name):
    a, b = getattr(before, name), getattr(after, name)
    return {k: b[k] - a[k] for k in b} if isinstance(b, dict) else b - a


@given(history=HISTORIES)
@settings(max_examples=8, deadline=None)
def test_random_stops_give_the_same(history):
    compare("full", "paged", history)


@given(asked=st.lists(REQUEST, min_size=1, max_size=2), n=st.integers(1, 20))
@settings(max_examples=8, deadline=None)
def test_all_that_is_counted_is_the_same_of_requests_that_come_together(asked, n):
    compare("full", "cell", [(asked, n), (CANCEL, 1)], ALL)


@given(history=HISTORIES)
@settings(max_examples=3, deadline=None)
def test_random_stops_give_the_same_with_windows(history):
    compare("window", "paged", history)


def test_what_runs_ahead_and_what_does_not():
    def n_ahead(kind, mode, *requests):
        (engine, _), before = shared(kind, mode), shared(kind, mode)[0].stats()
        run = Run(engine, kind, mode)
        for name, options in enumerate(requests):
            engine.add_request(ask(name, [name, 2, 3], 12, **options))
            run.asked.append(ask(name, [name, 2, 3], 12, **options))
        run.play([])
        stats = engine.stats()
        return stats.n_ahead - before.n_ahead, stats.n_steps - before.n_steps

    for mode in ("paged", "cell"):
        assert n_ahead("full", mode, {}, {}) == (11, 12)
        # What was sampled is looked at on the host.
        assert n_ahead("full", mode, {}, {"sampling": SAMPLINGS[2]}) == (0, 12)
        assert n_ahead("window", mode, {}) == (11, 12)
        # What others find of a state would move on.
        assert n_ahead("recurrent", mode, {}) == (0, 12)


def test_a_step_that_cannot_be_launched_leaves_the_one_before_it_to_be_read(monkeypatch):
    engine, read = shared("full", "paged")
    request = ask("a", [7, 8, 9], 9)
    wanted = [t for out in engine.generate(request) for t in out.tokens]
    read.add_request(request)
    engine.add_request(request)
    found = [t for _ in range(3) for out in engine.step() for t in out.tokens]

    def fails(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.device, "forward", fails)
        with pytest.raises(MemoryError):
            engine.step()
    while engine.has_work:
        found += [t for out in engine.step() for t in out.tokens]
    assert found == wanted
    while read.has_work:
        read.step()


def test_one_whose_logits_are_damaged_in_mid_run_ends_alone():
    def served(run_ahead, model, asked):
        config = CacheConfig(n_ctx=128, n_seq_max=4, block_size=B, n_ubatch=N_BATCH)
        engine = Engine(model, config, EngineConfig(run_ahead=run_ahead))
        for request in asked:
            engine.add_request(request)
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        found = [engine.space.find_hit(samples_of(r)[0]) for r in asked]
        assert (engine.stats().n_ahead > 0) == run_ahead
        return outputs, found, engine.stats().tokens["sampled"]

    asked = [ask("bad", [9, 8, 7, 6, 5], 9), ask("good", [3, 1, 4, 1, 5], 14)]
    outputs, *_ = served(False, MODELS["full"](), asked)
    sampled = {r.id: [t for out in outputs if out.id == r.id for t in out.tokens] for r in asked}
    others = {*sampled["good"], *asked[0].tokens, *asked[1].tokens}
    poison = next(t for t in sampled["bad"][2:] if t not in others)
    ahead, read = (served(x, poisoned(MODELS["full"](), poison), asked) for x in (True, False))
    assert ahead == read
    (error,) = (out.error for out in ahead[0] if out.error)
    n = len(asked[0].tokens) + sampled["bad"].index(poison)
    assert f"its token at position {n} have NaN" in error
    assert [t for out in ahead[0] if out.id == "good" for t in out.tokens] == sampled["good"]


def test_a_fork_and_a_session_have_what_was_reported_and_no_more():
    found = []
    for engine in shared("full", "paged"):
        salt = b"forked"
        engine.add_request(ask("a", [7, 8, 9, 1, 2], 30, salt=salt))
        tokens = {"a": [t for _ in range(10) for out in engine.step() for t in out.tokens], "b": []}
        (state,) = engine.running
        assert state.n_past_read == engine._steps._ahead and state.output == tokens["a"]
        n_forked = engine.fork("a", "b", sampling=Sampling(temp=1.5, seed=3))
        running = ids_of(engine.save("a"))
        while engine.has_work:
            for out in engine.step():
                tokens[out.id] += out.tokens
        text = [7, 8, 9, 1, 2, *tokens["a"]]
        found.append((n_forked, running, tokens, ids_of(engine.save(text, salt=salt))))
    assert found[0] == found[1] and found[0][0] == 14


def test_a_beam_search_and_what_is_beside_it_are_read_first():
    found = []
    for engine in shared("full", "paged"):
        before, tokens = engine.stats().n_ahead, {}
        engine.add_request(ask("a", [3, 2, 1], 12))
        engine.add_request(ask("b", [1, 2, 3], 8, num_beams=3))
        for _ in range(6):
            for out in engine.step():
                tokens.setdefault(out.id, []).extend(out.tokens)
        assert engine.stats().n_ahead == before
        while engine.has_work:
            for out in engine.step():
                tokens.setdefault(out.id, []).extend(out.tokens)
        found.append((tokens, engine.stats().n_ahead > before))
    assert found[0] == (found[1][0], True) and not found[1][1]
