"""Runs the state machine of machine.py, in both key frames, on a device in NumPy and compiled."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from machine import CacheMachine, runtime
from machine_blocks import BlockMachine

from kvrt import MaskSpec
from tests.marks import slow
from tests.numpy_device.device import compiled

pytestmark = pytest.mark.usefixtures("numpy_device")


def histories(n):
    return settings(
        max_examples=n,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@pytest.fixture(autouse=True)
def _own_runtimes():
    """Runtimes that a test shares with no other, whose device may be another."""
    yield
    runtime.cache_clear()


@pytest.mark.parametrize("mode", ["write", "read"])
def test_a_runtime_is_what_the_oracle_says(mode, budget):
    n = budget(6, 40)
    run_state_machine_as_test(lambda: CacheMachine(mode), settings=histories(n))


@compiled()
@pytest.mark.parametrize("mode", ["write", slow("read")])
def test_a_compiled_runtime_is_what_the_oracle_says(mode, budget):
    n = budget(2, 20)
    run_state_machine_as_test(lambda: CacheMachine(mode), settings=histories(n))
    # forward: one token or 8 with one output, 8 with all; the shift and the moves.
    kinds = [key[0] for key in runtime(mode).programs.compiled()]
    assert kinds.count("forward") <= 4
    moves = {"move_kv", "move_blocks"}
    assert set(kinds) <= {"forward", *moves, *(["shift"] if mode == "write" else [])}


def test_cells_behind_the_last_are_never_used(budget):
    """Blocks of one cell: the arrays have a whole block more than may be used."""
    n = budget(6, 40)
    run_state_machine_as_test(lambda: CacheMachine("write", (), 1), settings=histories(n))
    assert runtime("write", (), 1).cache.cells[0].pos.shape == (22,)


@pytest.mark.parametrize("mode", ["write", slow("read")])
def test_sequences_in_blocks_are_what_the_oracle_says(mode, budget):
    n = budget(6, 40)
    run_state_machine_as_test(lambda: BlockMachine(mode), settings=histories(n))


def test_sequences_in_blocks_beside_a_window_are_what_the_oracle_says(budget):
    n = budget(8, 40)
    run_state_machine_as_test(lambda: BlockMachine("write", (WINDOW,)), settings=histories(n))


WINDOW, CHUNKS = (MaskSpec(kind=kind, size=3) for kind in ("window", "chunked"))


@pytest.mark.parametrize(
    ("mode", "mask"), [("write", WINDOW), slow("read", WINDOW), slow("write", CHUNKS)]
)
def test_a_group_that_rolls_is_what_the_oracle_says(mode, mask, budget):
    at = runtime(mode, (mask,))
    assert [len(c.pos) for c in at.group_cells] == [21, 16]
    n = budget(6, 40)
    run_state_machine_as_test(lambda: CacheMachine(mode, (mask,)), settings=histories(n))


def test_tokens_that_a_window_has_lost_are_shared_again():
    """The window keeps the first tokens of sequence 1 alone; nothing that reads 2 sees them."""
    at = CacheMachine("read", (WINDOW,))
    at.begin(lengths=[2, 6, 4], fork=False)
    for tokens in ({0: 0}, {0: 28}, {0: 0}):
        at.decode(tokens=tokens)
    at.div(d=4, seq=0, within=(0, None))
    at.fork(src=1, dst=0)
    for tokens in ({0: 12, 1: 31}, {0: 0, 1: 0, 2: 0}, {0: 4, 1: 8}):
        at.decode(tokens=tokens)
    at.fork(src=0, dst=2)
    at.fork(src=1, dst=2)
    at.decode(tokens={2: 5})
    at.counts_alike()
