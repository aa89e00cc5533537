"""Drops that are decided ahead are those that `plan_drops` plans from the cells, one by one."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, example, given

from kvrt import CacheConfig, Runtime, policies
from kvrt.cache.schedules import DropPlan, plan_drops
from kvrt.cellcache.host_cells import HostCells
from kvrt.policies import AttentionSinks, ContextShift, Drop, DropSchedule, SeqCounts
from tests.toys import ToyLm

pytestmark = pytest.mark.usefixtures("numpy_device")

KEPT, SOME = st.integers(0, 12), st.integers(1, 9)
SHIFTS = st.builds(ContextShift, n_keep=KEPT, n_discard=st.none() | SOME)
SINKS = st.builds(
    lambda n_sink, n_window, n_drop: AttentionSinks(
        n_sink=n_sink, n_window=n_window, n_drop=min(n_drop, n_window - 1)
    ),
    KEPT,
    st.integers(2, 30),
    SOME,
)


class Cells:
    """A sequence alone in n_ctx cells, on the host."""

    def __init__(self, context):
        self.context, self.drops = context, []
        config = CacheConfig(n_ctx=context.n_ctx, block_size=8, n_ubatch=context.n_ctx)
        self.host = HostCells(ToyLm(n_layers=1).groups, None, config)

    def take(self, n):
        """n tokens come in after room was made for them, as `cache.schedules` makes it."""
        policy, host = self.context.policy, self.host
        n_past = host.pos_max(0) + 1
        if policy.n_fit(host.n_free, n_past) < n:
            counts = SeqCounts(0, n_past + n, n_past, n_new=n)
            plan = plan_drops(DropPlan(contents=host.contents), self.context, counts)
            self.drops += [(n_past, drop) for _, n_past, drop in plan.drops]
            host.commit(plan.contents)
        first = host.pos_max(0) + 1
        pos = np.arange(first, first + n, dtype=np.int32)
        slots = host.find(np.zeros(n, np.int32), {0: first})  # raises CacheFull
        host.append(slots, pos, np.zeros(n, np.int32))


def test_a_context_is_as_full_as_what_is_left_in_it():
    context = DropSchedule(policy=ContextShift(), n_ctx=8, n_step=8)
    for n_computed, n_gone in ((7, 0), (10, 3)):
        due = context.due(SeqCounts(0, 4, n_computed, n_gone))
        assert due.drops == (Drop(p0=0, p1=3),) and due.n_gone == 3
        assert due.n_until == n_computed + 3


@pytest.mark.slow
@example(policy=ContextShift(), n_ctx=8, n_step=8, n_prompt=16, n_more=0, requantizes=False)
@example(policy=ContextShift(n_keep=3), n_ctx=8, n_step=4, n_prompt=16, n_more=9, requantizes=False)
@given(
    policy=SHIFTS | SINKS,
    n_ctx=st.integers(8, 40),
    n_step=st.integers(1, 9),
    n_prompt=st.integers(1, 99),
    n_more=st.integers(0, 60),
    requantizes=st.booleans(),
)
def test_drops_are_those_of_the_cells(policy, n_ctx, n_step, n_prompt, n_more, requantizes):
    context = DropSchedule(policy=policy, n_ctx=n_ctx, n_step=n_step, requantizes=requantizes)
    assume(policy.n_keep <= n_ctx - 2 and context.n_least >= 1)
    cells, n_whole = Cells(context), n_prompt + n_more
    part = context.n_part(n_prompt)
    for start in range(0, n_prompt, part):
        cells.take(min(part, n_prompt - start))
    for _ in range(n_more):
        cells.take(1)
    n_computed, n_dropped, drops = 0, 0, []
    while n_computed < n_whole:
        found = context.due(SeqCounts(0, n_prompt, n_computed, n_dropped))
        for drop in found.drops:
            assert drop.p0 == policy.n_keep
            drops.append((n_computed - n_dropped, drop))
            n_dropped += drop.n
        assert n_computed < found.n_until <= n_dropped + min(n_ctx, context.n_most)
        n_computed = found.n_until
    assert drops == cells.drops
    # Until they recur, the same are told ahead.
    events = list(context.events(n_prompt, n_whole))
    assert drops[: len(events)] == events
    assert {drop for _, drop in drops} == {drop for _, drop in events}


@pytest.mark.slow
def test_a_prompt_beyond_the_context_in_steps_as_long_as_it():
    """Halves leave one token, so that a step of all cells but the last never fits beside it."""
    config = CacheConfig(n_ctx=8, block_size=8, n_ubatch=8)
    at = Runtime(ToyLm(), config, policy=ContextShift())
    at.append(list(range(20)))
    assert at.seq_pos_max() < 8
    assert sum(drop.n_dropped for drop in at.stats().drops) == 20 - 1 - at.seq_pos_max()


def test_former_names_say_their_successors():
    with pytest.raises(ImportError, match="PolicyContext is DropSchedule since"):
        from kvrt.policies import PolicyContext  # noqa: F401
    assert not hasattr(policies, "Whatever")
