"""Blocks in a file: what is damaged, torn, another's or does not fit is never taken for a block."""

import errno
import os
import resource

import numpy as np
import pytest

from kvrt.errors import BadConfig
from kvrt.paged.tiers.block_file import BlockFile

N = 1000  # bytes a block, no multiple of anything


def block(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, N).astype(np.uint8)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "blocks.kvt"


@pytest.fixture
def file(path):
    made = BlockFile(path, N, 8, b"model")
    yield made
    made.close()


def read(file: BlockFile, slot: int, name: bytes) -> np.ndarray | None:
    out = np.zeros(N, np.uint8)
    return out if file.read(slot, name, out) else None


def write_three(file: BlockFile) -> None:
    for i in range(3):
        assert file.write(i, b"name%d" % i, block(i))


def test_blocks_come_back(file, path):
    write_three(file)
    file.write(1, b"other", block(9))
    assert np.array_equal(read(file, 0, b"name0"), block(0))
    assert np.array_equal(read(file, 1, b"other"), block(9))
    assert read(file, 1, b"name1") is None
    assert read(file, 7, b"name7") is None  # never written
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_opened_again_tells_what_it_holds(path):
    file = BlockFile(path, N, 8, b"model")
    write_three(file)
    file.close()
    again = BlockFile(path, N, 8, b"model")
    assert list(again.names()) == [(i, b"name%d" % i) for i in range(3)]
    assert np.array_equal(read(again, 2, b"name2"), block(2))
    again.close()
    fewer = BlockFile(path, N, 2, b"model")
    assert [slot for slot, _ in fewer.names()] == [0, 1]
    fewer.close()


def test_a_changed_byte_anywhere_in_a_slot_is_noticed(file):
    file.write(2, b"next", block(2))
    file.write(1, b"name", block(1))
    at, n = file._offset(1), file.slot_bytes
    for offset in [*range(40), *range(40, n, 7)]:
        was = os.pread(file._fd, 1, at + offset)
        os.pwrite(file._fd, bytes([was[0] ^ 1]), at + offset)
        found = read(file, 1, b"name")
        # What lies beyond the name and beyond the block means nothing.
        dead = 20 + 4 <= offset < 20 + 1024 or offset >= 20 + 1024 + N
        assert (found is None) != dead, offset
        assert found is None or np.array_equal(found, block(1))
        os.pwrite(file._fd, was, at + offset)
    assert read(file, 1, b"name") is not None


@pytest.mark.parametrize("left", [0, 10, 4096, 4096 + 5, 4096 + 1500, 4096 + 20 + 1024 + N - 1])
def test_a_block_that_was_cut_off_is_not_there(file, path, left):
    file.write(0, b"name", block(0))
    os.truncate(path, left)
    assert read(file, 0, b"name") is None
    assert list(file.names()) in ([], [(0, b"name")])


def test_a_full_disk_refuses_that_store_alone(file, monkeypatch):
    write_three(file)
    real = os.pwritev

    def full(fd, parts, offset):
        if sum(map(len, parts)) > 100:
            real(fd, [bytes(parts[0])[:9]], offset)  # a part of it gets there
            raise OSError(errno.ENOSPC, "no space left")
        return real(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", full)
    assert file.write(1, b"new", block(5)) is False
    assert read(file, 1, b"new") is None and read(file, 1, b"name1") is None
    assert [slot for slot, _ in file.names()] == [0, 2]
    assert np.array_equal(read(file, 2, b"name2"), block(2))
    monkeypatch.setattr(os, "pwritev", real)
    assert file.write(1, b"new", block(5))


def test_what_is_no_refusal_is_raised(file, monkeypatch):
    def broken(fd, parts, offset):
        raise OSError(errno.EBADF, "bad descriptor")

    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(OSError, match="bad descriptor"):
        file.write(0, b"name", block(0))


def test_a_limit_on_the_file_refuses_that_store_alone(file):
    write_three(file)
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file._offset(3) + 600, was[1]))
    try:
        assert file.write(3, b"name3", block(3)) is False
        assert file.write(2, b"again", block(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
    assert read(file, 3, b"name3") is None
    assert np.array_equal(read(file, 2, b"again"), block(4))
    assert file.write(3, b"name3", block(3))


def test_writes_that_stop_halfway_go_on(file, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, parts, at: real(fd, [b"".join(map(bytes, parts))[:333]], at)
    )
    assert file.write(0, b"name", block(0))
    real_read = os.preadv

    def short(fd, parts, at):
        whole = bytearray(min(1200, sum(map(len, parts))))
        n = real_read(fd, [whole], at)
        left = whole[:n]
        for part in parts:
            part[: len(left[: len(part)])] = left[: len(part)]
            left = left[len(part) :]
        return n

    monkeypatch.setattr(os, "preadv", short)
    assert np.array_equal(read(file, 0, b"name"), block(0))


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ((N, 8, b"other model"), "another model, layout or block size"),
        ((N + 1, 8, b"model"), "another model, layout or block size"),
        ((0, 8, b"model"), "all must be at least 1"),
        ((N, 0, b"model"), "all must be at least 1"),
    ],
)
def test_another_ones_file_is_refused_and_left_alone(path, made, told):
    first = BlockFile(path, N, 8, b"model")
    first.write(0, b"name", block(0))
    first.close()
    was = path.read_bytes()
    with pytest.raises(BadConfig, match=told) as error:
        BlockFile(path, *made)
    assert "\n" not in str(error.value) and path.read_bytes() == was
    BlockFile(path, N, 8, b"model").close()  # the lock is free again


def test_a_file_of_before_is_taken_over_and_bound(path):
    first = BlockFile(path, N, 8, b"older")
    write_three(first)
    first.close()
    taken = BlockFile(path, N, 8, b"model", b"oldest", b"older")
    assert np.array_equal(read(taken, 2, b"name2"), block(2))
    taken.close()
    for other in ((b"older",), (b"other", b"older")):
        with pytest.raises(BadConfig, match="another model"):
            BlockFile(path, N, 8, *other)
    BlockFile(path, N, 8, b"model").close()


def test_names_have_their_own_size(path):
    file = BlockFile(path, N, 8, b"model", n_name=3)
    assert file.write(0, b"abc", block(0)) and file.n_name == 3
    file.close()
    with pytest.raises(BadConfig, match="another model, layout"):
        BlockFile(path, N, 8, b"model", n_name=4)
    with pytest.raises(BadConfig, match="at least 1"):
        BlockFile(path, N, 8, b"model", n_name=0)


def test_what_is_no_file_of_blocks_is_refused(tmp_path, path):
    path.write_bytes(b"a letter to somebody")
    with pytest.raises(BadConfig, match="holds no blocks of kvrt"):
        BlockFile(path, N, 8, b"model")
    assert path.read_bytes() == b"a letter to somebody"
    with pytest.raises(BadConfig, match="cannot be used"):
        BlockFile(tmp_path / "nowhere" / "x.kvt", N, 8, b"model")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "folder.kvt").mkdir()
    with pytest.raises(BadConfig, match="cannot be used: it is a folder, not a regular file"):
        BlockFile(tmp_path / "folder.kvt", N, 8, b"model")


def test_a_file_in_use_is_refused(file, path):
    with pytest.raises(BadConfig, match="in use by another process"):
        BlockFile(path, N, 8, b"model")
