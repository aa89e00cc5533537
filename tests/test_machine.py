"""Runs the state machine of machine.py, in both key frames."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import CacheMachine, runtime

from kvrt import MaskSpec

SETTINGS = settings(
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("mode", ["write", pytest.param("read", marks=pytest.mark.slow)])
def test_a_runtime_is_what_the_oracle_says(mode):
    run_state_machine_as_test(lambda: CacheMachine(mode), settings=SETTINGS)
    # forward: one token or 8 with one output, 8 with all; the shift and the moves.
    kinds = [key[0] for key in runtime(mode).programs.compiled()]
    assert kinds.count("forward") <= 4
    assert set(kinds) <= {"forward", "move", *(["shift"] if mode == "write" else [])}


def marked(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mode", "mask"),
    [
        ("write", MaskSpec(kind="window", size=3)),
        marked("read", MaskSpec(kind="window", size=3)),
        marked("write", MaskSpec(kind="chunked", size=3)),
    ],
)
def test_a_group_that_rolls_is_what_the_oracle_says(mode, mask):
    at = runtime(mode, (mask,))
    assert [len(c.pos) for c in at.group_cells] == [22, 16]
    run_state_machine_as_test(lambda: CacheMachine(mode, (mask,)), settings=SETTINGS)
