"""Random arrivals, cancels and shortage: nobody is lost, everybody ends, and twice is the same."""

from typing import get_args

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from plainspace import PlainSpace, Served, alone

from kvrt.errors import BadRequest
from kvrt.options.serving import Order, Rules
from kvrt.serving.request import Request
from kvrt.serving.scheduling.queue import _step_key

PREFIXES = [(), (1,) * 5, (1,) * 5 + (2,) * 6, tuple(range(9))]


class SchedulerMachine(RuleBasedStateMachine):
    """Two schedulers that are asked the same; each request's stream is known beforehand."""

    @initialize(
        n_seq_max=st.integers(1, 5),
        n_blocks=st.integers(6, 24),
        n_batch=st.integers(5, 24),
        n_chunk=st.sampled_from([None, 3, 8]),
        order=st.sampled_from(get_args(Order)),
        n_wait=st.sampled_from([None, 1, 8]),
        admit=st.sampled_from(["chunk", "text", "whole"]),
        offloads=st.booleans(),
        finds=st.booleans(),
        by_prefix=st.booleans(),
    )
    def begin(self, n_seq_max, n_blocks, offloads, finds, **rules):
        made = Rules(preempt="swap" if offloads else "recompute", n_alike=4, **rules)
        self.two = [
            Served(PlainSpace(n_seq_max, n_blocks, offloads=offloads, finds=finds), made)
            for _ in range(2)
        ]
        self.served = self.two[0]
        self.asked: dict[str, Request] = {}
        self.n_quiet = 0

    @rule(
        prefix=st.sampled_from(PREFIXES),
        rest=st.lists(st.integers(0, 3), min_size=1, max_size=12),
        n_predict=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        priority=st.integers(-2, 2),
        cache=st.booleans(),
        stop=st.sampled_from([(), (5, 50), tuple(range(40))]),
    )
    def arrive(self, prefix, rest, stop, **options):
        request = Request(
            id=f"r{len(self.asked)}", tokens=prefix + tuple(rest), stop_ids=stop, **options
        )
        for served in self.two:
            if request.n_whole > served.space.n_max:
                with pytest.raises(BadRequest):
                    served.add(request)
            else:
                served.add(request)
                self.asked[request.id] = request

    @rule(data=st.data())
    def cancel(self, data):
        live = list(self.served.scheduler.live)
        name = data.draw(st.sampled_from([*live, "nobody"]))
        for served in self.two:
            if name == "nobody":
                with pytest.raises(BadRequest):
                    served.cancel(name)
            else:
                served.cancel(name)

    @rule(n=st.integers(1, 6))
    def step(self, n):
        for _ in range(n):
            self._step()

    def _step(self):
        was = {id(s): s.tokens.copy() for all in self.served.scheduler.live.values() for s in all}
        # Both are looked at alike: who is first decides which prefixes are gathered.
        waiting, _ = [set(self._waiting(served)) for served in self.two]
        plans = [served.step() for served in self.two]
        # The same calls, the same plan.
        tells = [
            [[(s.request.id, s.sample) for s in x] for x in (p.decode, p.admitted, p.preempted)]
            for p in plans
        ]
        assert tells[0] == tells[1]
        for all in self.served.scheduler.live.values():
            for state in all:
                before = was[id(state)]
                assert state.tokens[: len(before)] == before  # nothing sampled is sampled again
        self._check_order(plans[0], waiting)
        # Rows are busy whenever anybody is there: a step without tokens would be for ever.
        assert plans[0].n_tokens or not waiting or plans[0].preempted or plans[0].refused

    def _check_order(self, plan, waiting):
        """Nobody is passed who stood before one that was admitted; the overdue go first."""
        rules, left = self.served.rules, [s for s in waiting if s.seq_id is None]
        left = [s for s in left if s.status != "finished"]
        if rules.holds_back or not plan.admitted or not left:
            return
        queue = self.served.scheduler._queue
        late = [s for s in plan.admitted if queue._is_overdue(s)]
        left_late = [s for s in left if queue._is_overdue(s)]
        if late and left_late:
            assert max(map(_step_key, late)) < min(map(_step_key, left_late))
        was_fresh = [s for s in plan.admitted if s.n_preempted == 0 and s not in late]
        if was_fresh:
            assert not left_late
            assert max(map(queue._key, was_fresh)) < min(map(queue._key, left))

    def _waiting(self, served):
        return served.scheduler._queue.first(10**6, served.space.n_cached)

    @invariant()
    def everybody_is_in_one_place(self):
        if not hasattr(self, "two"):
            return
        for served in self.two:
            requests = served.scheduler._requests
            live = [s for all in requests.live.values() for s in all]
            there = [*requests.running, *requests.queue.first(10**6, served.space.n_cached)]
            there += [s for leader in requests.leaders for s in leader.followers]
            assert sorted(map(id, live)) == sorted(map(id, there))
            assert served.scheduler.n_waiting == len(live) - len(requests.running)
            held = {s.seq_id for s in requests.running}
            assert held == set(served.space.held) and served.space.n_free >= 0
            ended = {name for name, _ in served.ended}
            assert set(self.asked) == ended | set(requests.live)

    def teardown(self):
        if not hasattr(self, "two"):
            return
        # Everybody who runs gets a token or a chunk, and the first one is never preempted.
        n = sum(r.n * (r.n_whole + 2) for r in self.asked.values())
        for served in self.two:
            served.run(10 + 4 * n)
            assert not served.space.held
            assert not served.scheduler._requests.leaders and not served.scheduler.n_waiting
        for (name, sample), state in self.served.ended.items():
            expected = alone(self.asked[name], sample)
            if state.finish_reason == "cancelled":
                assert state.output == expected[: len(state.output)]
            else:
                assert state.finish_reason in ("stop", "length")
                assert state.output == expected
            assert state.n_preempted <= len(state.tokens)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = hypothesis.settings(max_examples=6, stateful_step_count=30, deadline=None)


@pytest.mark.slow
def test_many_long_histories(budget):
    n = budget(40, 150)
    settings = hypothesis.settings(max_examples=n, stateful_step_count=60, deadline=None)
    run_state_machine_as_test(SchedulerMachine, settings=settings)
