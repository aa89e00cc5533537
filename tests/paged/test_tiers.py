"""The host tier with real threads: two phases, and what is refused."""

import numpy as np
import pytest
from tierdevice import N_BYTES


def test_a_block_can_be_loaded_when_its_copy_is_complete(device):
    d = device()
    d.gate.clear()
    assert d.store(1, 2) == 2
    assert d.find(1, 2, 3) == (0, 2)
    assert d.tiers.is_busy
    d.gate.set()
    d.settle()
    assert d.find(1, 2, 3) == (2, 0) and d.find(3, 1) == (0, 0)
    d.load(1, 2)
    d.load(2)
    counts = d.tiers.counts
    assert (counts.stored, counts.loaded) == (2, 3)
    assert d.tiers.bytes_used() == {"host": 2 * N_BYTES}


def test_finished_copies_count_from_the_next_step_on(device):
    d = device()
    d.tiers.new_step()
    d.store(1)
    d.tiers.wait(5)
    assert d.tiers.find([1]) == (0, 1)
    assert d.find(1) == (1, 0)


def test_copies_that_ended_count_before_something_has_to_go(device):
    d = device(2)
    d.tiers.new_step()
    d.store(1, 2)
    d.tiers._jobs.wait(5, for_all=True)
    d.tiers._polled = False  # a step began, and nobody asked yet
    assert d.store(3) == 1
    d.settle()
    assert [d.find(k) for k in (1, 2, 3)] == [(0, 0), (1, 0), (1, 0)]


def test_no_more_is_under_way_than_may_be(device):
    d = device(8, n_moving=3)
    d.gate.clear()
    assert d.store(1, 2) == 2
    assert d.store(1, 2, 3, 4) == 1  # the first one that is new
    assert d.store(5) == 0
    assert d.tiers.counts.refused == 2
    d.gate.set()
    d.settle()
    assert d.find(1, 2, 3, 4) == (3, 0)
    assert d.store(4, 5) == 2


def test_a_store_without_room_is_refused_as_a_whole(device):
    d = device(2)
    d.gate.clear()
    d.store(1, 2)
    assert d.store(3) == 0
    d.gate.set()
    d.settle()
    assert d.store(1, 3, 4) == 0 and d.find(1, 2) == (2, 0)
    assert d.store(1, 3) == 1


def test_a_copy_that_fails_is_told_and_leaves_nothing(device):
    d = device()
    d.tiers._gather = lambda ids: np.zeros((1, 5), np.uint8)
    d.store(1)
    with pytest.raises(AssertionError, match=r"\(1, 5\)"):
        d.settle()
    assert d.find(1) == (0, 0) and d.tiers.counts.failed == 1 and d.host.index.n_used == 0
    d.tiers._gather = lambda ids: 1 / 0
    with pytest.raises(ZeroDivisionError):
        d.store(1)
    assert d.host.index.n_used == 0


def test_a_load_that_fails_lets_its_blocks_go(device):
    d = device(1)
    d.store(1)
    d.settle()
    d.tiers._scatter = lambda ids, array: 1 / 0
    with pytest.raises(ZeroDivisionError):
        d.tiers.load([1], [0])
    assert d.host.index.n_idle == 1
