"""The disk tier with real threads and files: what comes back is what was stored, or nothing."""

import errno
import os
import threading

import numpy as np
import pytest
from tierdevice import N_BYTES, Device

from kvrt.errors import BadConfig
from kvrt.paged.tiers.block_file import BlockFile
from kvrt.paged.tiers.disk import DiskTier, block_name
from kvrt.paged.tiers.host import HostTier
from kvrt.paged.tiers.index import TierIndex
from kvrt.paged.tiers.spill import OffloadLimits
from kvrt.paged.tiers.tiering import Tiering


def test_blocks_go_down_and_come_back(device):
    d = device(4, 16)
    for first in range(0, 12, 4):
        assert d.store(*range(first, first + 4)) == 4
        d.settle()
    assert d.tiers.counts.written == 12 and d.disk.index.n_used == 12
    assert d.tiers.bytes_used() == {"host": 4 * N_BYTES, "disk": 12 * N_BYTES}
    assert d.find(8, 9, 10, 11) == (4, 0)
    assert d.find(0, 1, 2) == (0, 3)  # on the disk alone: on their way up
    d.settle()
    assert d.find(0, 1, 2, 99) == (3, 0)
    d.load(0, 1, 2)
    assert d.tiers.counts.fetched == 3 and d.tiers.counts.damaged == 0


def test_a_prefix_longer_than_the_host_is_found_as_far_as_it_fits(device):
    d = device(4, 16)
    for key in range(8):
        d.store(key)
        d.settle()
    for _ in range(3):
        found = d.find(*range(8))
        d.settle()
    assert found == (4, 0)
    d.load(*range(4))


def test_what_is_found_does_not_go_for_what_comes_after_it(device):
    d = device(2, 16)
    for key in (1, 2, 5, 0):
        d.store(key)
        d.settle()
    assert d.find(0, 1, 2) == (1, 1)  # 1 takes the place of 5, and there is none for 2
    d.settle()
    assert d.find(0, 1, 2) == (2, 0)
    d.load(0, 1)


def test_two_that_read_for_themselves_both_get_on(device):
    """Each prefix fills the host: whoever came first gets it, the other one computes."""
    d = device(4, 16)
    a, b = range(4), range(10, 14)
    for key in (*a, *b):
        d.store(key)
        d.settle()
    first = d.find(*a)
    assert first.n_ready + first.n_coming == 4
    d.settle()
    for _ in range(3):
        assert d.find(*b) == (0, 0)  # no room, so absent: nobody waits for ever
        assert d.find(*a) == (4, 0)
    d.load(*a)
    assert d.find(*b).n_coming == 4
    d.settle()
    assert d.find(*b) == (4, 0)


def test_what_nobody_comes_for_may_go_after_some_steps(device):
    d = device(2, 8, n_held=3)
    for key in range(4):
        d.store(key)
        d.settle()
    assert d.find(0, 1) == (0, 2)
    d.settle()
    assert d.store(7) == 0
    for _ in range(4):
        d.tiers.new_step()
    assert d.store(7) == 1


def test_only_so_much_is_read_at_once(device):
    d = device(8, 16, n_loading=2, n_batch=1)
    for key in range(4):
        d.store(key)
        d.settle()
    d.empty_host()
    assert d.find(0, 1, 2, 3) == (0, 4)
    assert len(d.tiers._jobs) == 2 and d.host.index.n_used == 2
    d.settle()
    assert d.find(0, 1, 2, 3) == (2, 2)
    d.settle()
    assert d.find(0, 1, 2, 3) == (4, 0)
    d.load(0, 1, 2, 3)


def test_a_read_that_takes_too_long_counts_as_absent(device, monkeypatch):
    d = device(4, 8, wait_s=10.0)
    d.store(1)
    d.settle()
    d.empty_host()
    gate, real = threading.Event(), d.disk.read

    def slow(*args):
        gate.wait(10)
        return real(*args)

    monkeypatch.setattr(d.disk, "read", slow)
    assert d.find(1) == (0, 1)
    d.now = 9.0
    assert d.find(1) == (0, 1)
    d.now = 11.0
    assert d.find(1) == (0, 0)
    gate.set()
    d.settle()
    assert d.find(1) == (1, 0)
    d.load(1)


@pytest.mark.parametrize("what", ["flip", "cut", "empty"])
def test_damage_is_a_miss_and_is_dropped(device, tmp_path, what):
    d = device(4, 16)
    for key in range(3):
        d.store(key)
        d.settle()
    d.empty_host()
    path = tmp_path / "t.kvt"
    data = bytearray(path.read_bytes())
    slot = d.disk._file.slot_bytes
    if what == "flip":
        data[4096 + slot + 2000] ^= 4
    path.write_bytes({"flip": data, "cut": data[: 4096 + slot + 2000], "empty": b""}[what])
    assert d.find(0, 1, 2) == (0, 3)
    d.settle()
    whole = {"flip": [0, 2], "cut": [0], "empty": []}[what]
    assert d.find(0, 1, 2) == (bool(whole), 0)
    assert d.tiers.counts.damaged == 3 - len(whole) and d.disk.index.n_used == len(whole)
    d.load(*[k for k in (0, 2) if k in whole])
    if what == "empty":
        return
    assert d.store(1) == 1  # its place is used again
    d.settle()
    d.empty_host()
    d.find(1)
    d.settle()
    assert d.find(1) == (1, 0)
    d.load(1)


def test_a_full_disk_costs_that_store_alone(device, monkeypatch):
    d = device(4, 16)
    d.store(0)
    d.settle()
    real = os.pwritev

    def full(fd, parts, offset):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    assert d.store(1, 2) == 2
    d.settle()
    monkeypatch.setattr(os, "pwritev", real)
    assert d.tiers.counts.unwritten == 2 and d.disk.index.n_used == 1
    assert d.find(0, 1, 2) == (3, 0)  # the host has them
    d.load(0, 1, 2)
    assert d.store(3) == 1
    d.settle()
    assert d.disk.index.n_used == 2


def test_a_disk_that_breaks_is_told_and_the_rest_goes_on(device, monkeypatch):
    d = device(4, 16)

    def broken(fd, parts, offset):
        raise OSError(errno.EBADF, "bad file descriptor")

    monkeypatch.setattr(os, "pwritev", broken)
    d.store(1)
    with pytest.raises(OSError, match="bad file descriptor"):
        d.settle()
    monkeypatch.undo()
    assert d.find(1) == (1, 0) and d.host.index.n_idle == 1 and d.disk.index.n_used == 0
    d.load(1)


def test_a_disk_that_was_closed_is_read_by_the_next_process(tmp_path):
    first = Device(tmp_path, 4, 16)
    first.store(1, 2, 3)
    first.settle()
    first.tiers.close()
    second = Device(tmp_path, 4, 16)
    assert second.find(1, 2, 3, 4) == (0, 3)
    second.settle()
    second.load(1, 2, 3)
    assert second.store(4) == 1
    second.tiers.close()
    third = Device(tmp_path, 4, 3)  # fewer blocks than the file has
    third.find(1, 2, 3)
    third.settle()
    assert third.find(1, 2, 3) == (3, 0) and third.find(4) == (0, 0)
    third.tiers.close()


def test_a_name_too_long_for_a_slot_is_not_written(device):
    d = device(4, 16)
    d.disk._name = lambda key: b"x" * 2000
    d.store(1)
    d.settle()
    assert d.disk.index.n_used == 0 and d.tiers.counts.unwritten == 1
    assert d.find(1) == (1, 0)
    d.disk._name = lambda key: b"key %d" % key


def test_no_two_keys_have_one_name():
    keys = [(0, (b"a", b"bc")), (0, (b"ab", b"c")), (0, (b"abc",)), (1, (b"a", b"bc")), (0, ())]
    names = {block_name(key) for key in keys}
    assert len(names) == len(keys) and not any(
        a != b and a.startswith(b) for a in names for b in names if len(b) > 4
    )


def test_tiers_of_other_sizes_do_not_fit(tmp_path):
    host = HostTier(TierIndex(2), 10)
    disk = DiskTier(BlockFile(tmp_path / "x", 11, 2, b""), name=lambda key: b"x")
    with pytest.raises(BadConfig, match="10 bytes on the host and of 11"):
        Tiering(host, disk, gather=lambda *_: None, scatter=lambda *_: None)
    disk.close()
    for name in ("n_workers", "n_moving", "wait_s"):
        with pytest.raises(BadConfig, match=f"{name} is 0"):
            OffloadLimits(**{name: 0})


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_random_traffic_never_gives_wrong_bytes(device, tmp_path, policy, many, budget):
    """Stores, looks, loads and damage in any order; memory stays what it was made with."""
    n_turns = budget(800, 3000) if many else 150
    d = device(6, 12, policy=policy, n_moving=5, n_loading=3, n_batch=2)
    rng = np.random.default_rng(7)
    rows, slot = d.host.data, d.disk._file.slot_bytes
    n_loaded = 0
    for turn in range(n_turns):
        d.tiers.new_step()
        keys = [int(k) for k in rng.permutation(24)[: rng.integers(1, 5)]]
        if rng.random() < 0.5:
            d.store(*keys)
        else:
            n = d.tiers.find(keys).n_ready
            d.load(*keys[:n])
            n_loaded += n
        if turn % 25 == 0:
            with open(tmp_path / "t.kvt", "r+b") as f:
                f.seek(4096 + slot * int(rng.integers(12)) + 1500)
                f.write(bytes([turn % 251]))
        if turn % 3 == 0:
            d.tiers.flush()  # else how much is found would depend on the machine
        assert d.host.index.n_used <= 6 and d.disk.index.n_used <= 12
        assert d.tiers._n_copying <= 5 and len(d.tiers._jobs) <= 5 + 5 + 3
    d.settle()
    assert n_loaded > n_turns // 20 and d.tiers.counts.fetched > 0 and d.host.data is rows
    assert (tmp_path / "t.kvt").stat().st_size <= 4096 + 12 * slot
    for _ in range(20):
        d.tiers.new_step()
    assert d.host.index.n_idle == d.host.index.n_used  # nothing is held by nobody
