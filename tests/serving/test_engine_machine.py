"""Random histories of requests: every stream is what the request gets alone, no block is lost."""

import dataclasses
import functools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvrt import Sampling, SelfExtend
from kvrt.errors import BadRequest, CacheFull, UsageError
from kvrt.options.serving import Rules, TierConfig
from kvrt.policies import AttentionSinks, ContextShift
from kvrt.serving.request import samples_of
from tests.serving.engines import N_BATCH, N_ROWS, alone, ask, make
from tests.serving.soundspace import assert_sound
from tests.serving.test_beams import brute_force

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("numpy_device")]

# Beginnings that requests share, longer and shorter than a block and a step.
STARTS = [
    tuple(np.random.default_rng(i).integers(0, 32, n).tolist()) for i, n in enumerate((3, 9, 21))
]
SAMPLINGS = [Sampling(), Sampling(temp=1, seed=3), Sampling(temp=0.7, top_k=4, seed=9)]
N_CTX_SEQ = 48
POLICIES = [
    *["default"] * 3,
    ContextShift(n_keep=5),
    AttentionSinks(n_sink=3, n_window=12),
    AttentionSinks(n_sink=4, n_window=17, n_drop=5),
]
TIERS = TierConfig(host_bytes=1 << 17, always=True)


@functools.cache
def shared(kind, mode, fine, extend):
    """An engine with room for about half of what its sequences might want."""
    rules = Rules(n_batch=N_BATCH, n_chunk=6, admit="chunk", preempt="swap", by_prefix=True)
    rules = dataclasses.replace(rules, n_ctx_seq=N_CTX_SEQ)
    tiers = TIERS if mode == "paged" else None
    # Layers that keep all make no checkpoints; two of each sequence of others.
    sizes = {"n_ctx": 72, "n_checkpoints": 2, "self_extend": extend}
    return make(kind, mode, rules=rules, tiers=tiers, hash_block_size=fine, **sizes)


@functools.cache
def expected(kind, extend, tokens, n_predict, sampling, policy):
    request = ask("alone", tokens, n_predict, sampling=sampling, policy=policy)
    return alone(kind, request, 128 if isinstance(policy, str) else N_CTX_SEQ, extend)


@functools.cache
def searched(kind, extend, tokens, n_predict):
    """Texts of a search of two beams, the best first."""
    request = ask("alone", tokens, n_predict, num_beams=2)
    return tuple(tuple(text) for _, text in brute_force(kind, request, extend=extend))


class Requests(RuleBasedStateMachine):
    kind, mode, fine, extend = "full", "paged", None, None

    def __init__(self):
        super().__init__()
        self.engine = shared(self.kind, self.mode, self.fine, self.extend)
        # What an example that failed has left.
        for name in {s.request.id for s in self.engine.running}:
            self.engine.cancel(name)
        while self.engine.has_work:
            self.engine.step()
        for pin in list(self.engine._pins._handles):
            self.engine.unpin(pin)
        self.n, self.asked, self.got, self.ended = 0, {}, {}, {}
        # Of forks, their source and the tokens that it had sampled; the one pin.
        self.forks, self.pin = {}, None

    @rule(
        start=st.sampled_from([(), *STARTS]),
        rest=st.lists(st.integers(0, 31), min_size=1, max_size=12),
        n_predict=st.integers(1, 14),
        sampling=st.sampled_from(SAMPLINGS),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        cache=st.booleans(),
        policy=st.sampled_from(POLICIES),
        more=st.integers(0, 60),
    )
    def add(self, start, rest, n_predict, sampling, n, cache, policy, more):
        self.n += 1
        if self.kind != "full" or self.extend:
            policy = "default"
        n_predict += 0 if policy == "default" else more
        options = dict(sampling=sampling, n=n, cache=cache, policy=policy)
        request = ask(self.n, (*start, *rest), n_predict, **options)
        self.engine.add_request(request)
        self.asked[request.id] = request
        with pytest.raises(BadRequest, match="is being served already"):
            self.engine.add_request(request)

    @rule(start=st.sampled_from(STARTS), n_predict=st.integers(1, 5))
    def search(self, start, n_predict):
        self.n += 1
        request = ask(self.n, start, n_predict, num_beams=2, n=2)
        self.engine.add_request(request)
        self.asked[request.id] = request

    @rule(which=st.integers(0, 99))
    def fork(self, which):
        live = [
            i
            for i, request in self.asked.items()
            if i not in self.ended and request.num_beams == 1 and self.is_served(i)
        ]
        if not live:
            return
        name = live[which % len(live)]
        self.n += 1
        n_live = len(self.engine._scheduler.live)
        try:
            self.engine.fork(name, str(self.n))
        except CacheFull as error:
            assert "cannot be forked now: it dropped" in str(error)
            assert len(self.engine._scheduler.live) == n_live
            return
        source, n = self.forks.get(name, (name, 0))
        self.forks[str(self.n)] = source, n + len(self.got.get((name, 0), []))
        self.asked[str(self.n)] = dataclasses.replace(self.asked[source], n=1)

    @rule()
    def pin_or_unpin(self):
        """A short text, so that every request still fits beside it."""
        if self.kind != "full":
            return
        if self.pin is not None:
            self.engine.unpin(self.pin)
            self.pin = None
            return
        try:
            self.pin = self.engine.pin(STARTS[1][:8])
        except UsageError as error:
            assert "nothing of these 8 tokens" in str(error)
        except CacheFull as error:
            assert "to pin" in str(error)

    def is_served(self, name):
        return any(s.sample == 0 for s in self.engine._scheduler.live.get(name, ()))

    @rule(n=st.integers(1, 6))
    def steps(self, n):
        for _ in range(n):
            self.take(self.engine.step())

    # What is drawn must not depend on who has ended: that follows from what the engine has cached
    # of histories before this one.
    @rule(which=st.integers(0, 99))
    def cancel(self, which):
        live = [i for i in self.asked if i not in self.ended]
        if not live:
            return
        name = live[which % len(live)]
        self.engine.cancel(name)
        with pytest.raises(BadRequest, match="is not being served"):
            self.engine.cancel(name)
        self.ended[name] = "cancelled"

    def take(self, outputs):
        for out in outputs:
            assert out.error is None
            self.got.setdefault((out.id, out.sample), []).extend(out.tokens)
            request = self.asked[out.id]
            if request.num_beams > 1:
                texts = searched(self.kind, self.extend, request.tokens, request.n_predict)
                if out.finish_reason == "length":
                    assert out.tokens == texts[out.sample]
                    self.ended[out.id] = "length"
                continue
            state = samples_of(request)[out.sample]
            asked = request.tokens, request.n_predict, state.sampling, request.policy
            _, n_before = self.forks.get(out.id, ("", 0))
            wanted = expected(self.kind, self.extend, *asked)[n_before:]
            found = self.got[out.id, out.sample]
            assert found == wanted[: len(found)]
            if out.finish_reason == "length":
                assert len(found) == len(wanted)
                finished = [self.got.get((out.id, i), []) for i in range(request.n)]
                if all(len(x) == len(wanted) for x in finished):
                    self.ended[out.id] = "length"

    @invariant()
    def no_block_is_lost(self):
        assert_sound(self.engine)

    def teardown(self):
        # Policies have the room of a whole context, so that requests may well come one by one: what
        # must not be is that nobody comes on.
        n_idle = 0
        while self.engine.has_work and n_idle < 200:
            outputs = self.engine.step()
            n_idle = 0 if outputs else n_idle + 1
            self.take(outputs)
        assert not self.engine.has_work
        if self.pin is not None:
            self.engine.unpin(self.pin)
        assert set(self.ended) == set(self.asked)
        assert len(self.engine.space._free) == N_ROWS
        if self.mode == "paged":
            self.engine.tiers.flush()
        self.engine.space.begin_step()
        assert all(p.n_free == p.n_blocks - 1 for p in self.engine.space.pools)


def machine(kind, mode, n, fine=None, extend=None, **rest):
    told = {"kind": kind, "mode": mode, "fine": fine, "extend": extend}
    of = type(f"{kind}_{mode}", (Requests,), told)
    run_state_machine_as_test(
        of, settings=settings(max_examples=n, stateful_step_count=20, deadline=None, **rest)
    )


@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_a_few_histories(mode):
    machine("full", mode, 3, derandomize=True)


@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_many_histories_with_rounds_of_self_extend(mode):
    machine("full", mode, 3, extend=SelfExtend(ga_n=2, ga_w=8))


@pytest.mark.parametrize("mode", ["paged", "cell"])
@pytest.mark.parametrize("kind", ["window", "recurrent"])
def test_many_histories(kind, mode):
    machine(kind, mode, 2)


@pytest.mark.parametrize(
    "kind", ["full", "recurrent", "window", pytest.param("sinks", marks=pytest.mark.full)]
)
def test_many_histories_with_hits_within_blocks(kind):
    machine(kind, "paged", 2, fine=2)
