"""Rounds of SelfExtend by counts alone: where a Runtime has them, however a prompt is cut."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvrt import SelfExtend
from kvrt import cells as kc
from kvrt.policies import SeqCounts
from kvrt.policies.schedule import n_first
from kvrt.policies.self_extend import ExtendSchedule

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("numpy_device")]

N_CTX = 160


def written(cells, start, n):
    pos = kc.seq_pos_max(cells, 0) + 1 + np.arange(n, dtype=np.int32)
    slots = np.arange(start, start + n, dtype=np.int32)
    return kc.place(cells, slots, pos, np.zeros(n, np.int32))


def as_a_runtime(extend, n_step, n_prompt, n_tokens):
    """Cells after each step: a prompt in whole steps, then a token a step; and the rounds."""
    cells, n_gone, n_rounds, n_done, found = kc.create(N_CTX, 1), 0, 0, 0, []
    schedule = ExtendSchedule(extend=extend, n_step=n_step)
    while n_done < n_tokens:
        due = schedule.due(SeqCounts(0, 0, n_done, n_gone))
        for edit in due.edits:
            cells = kc.apply(cells, edit)
        n_gone, n_rounds = n_gone + due.n_gone, n_rounds + len(due.divided)
        n = min(n_step, n_prompt - n_done) if n_done < n_prompt else 1
        cells = written(cells, n_done, n)
        n_done += n
        found.append((n_done, cells.pos.tolist()))
    return dict(found), n_rounds


@pytest.mark.parametrize(("n", "w"), [(2, 4), (3, 6), (4, 8), (2, 32)])
@given(
    n_step=st.sampled_from([1, 5, 8, 16]),
    n_prompt=st.integers(1, 90),
    n_more=st.integers(0, 60),
    data=st.data(),
)
@settings(max_examples=15, deadline=None)
def test_rounds_are_those_of_a_runtime_whatever_the_chunks(n, w, n_step, n_prompt, n_more, data):
    extend = SelfExtend(ga_n=n, ga_w=w)
    schedule, n_tokens = ExtendSchedule(extend=extend, n_step=n_step), n_prompt + n_more
    wanted, n_rounds = as_a_runtime(extend, n_step, n_prompt, n_tokens)
    cells, n_done, n_folded, rounds = kc.create(N_CTX, 1), 0, 0, 0
    until = n_first(schedule, n_prompt)
    while n_done < n_tokens:
        if n_done == until:
            found = schedule.due(SeqCounts(0, n_prompt, n_done, n_folded))
            for edit in found.edits:
                cells = kc.apply(cells, edit)
            assert found.n_until > n_done
            until, n_folded = found.n_until, n_folded + found.n_gone
            rounds += len(found.divided)
        chunk = data.draw(st.integers(1, 2 * n_step), label="chunk")
        chunk = min(chunk, n_tokens - n_done, until - n_done)
        cells = written(cells, n_done, chunk)
        n_done += chunk
        assert kc.seq_pos_max(cells, 0) + 1 == n_done - n_folded
        if n_done in wanted:
            assert cells.pos.tolist() == wanted[n_done]
    assert rounds == n_rounds
