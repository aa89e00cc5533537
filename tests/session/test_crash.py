"""Whatever stops a save, the old or the new session is there, whole: never neither."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from snapshots import assert_equal, snapshot

from kvrt import errors, session
from kvrt.files import atomic

CALLS = ("open", "pwrite", "fsync", "replace", "ftruncate")


class Fault:
    """Makes the k-th call of the system fail, after half of its work where it is a write."""

    def __init__(self, monkeypatch, at, error=errno.ENOSPC):
        self.at, self.error, self.n = at, error, 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, call):
        def run(*args, **kwargs):
            # A lock file is no part of the session.
            if not (args and str(args[0]).endswith(".lock")):
                self.n += 1
                if self.n == self.at:
                    if call.__name__ == "pwrite":
                        call(args[0], bytes(args[1][: len(args[1]) // 2]), args[2])
                    raise OSError(self.error, os.strerror(self.error))
            return call(*args, **kwargs)

        return run


def is_one_of(path, *taken):
    found = session.read(path)
    for one in taken:
        try:
            assert_equal(found, one)
        except AssertionError:
            continue
        return True
    return False


SAVES = {
    "a longer session": (600, 900),
    "another session": (600, 200),
    "a new file": (None, 300),
}


@pytest.mark.slow
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("kind", SAVES)
def test_every_call_of_a_save_fails_once(tmp_path, monkeypatch, kind, error):
    before, after = (n and snapshot(n_cells=(n,), seed=n < 500) for n in SAVES[kind])
    at, ends = 0, set()
    while True:
        at += 1
        path = tmp_path / f"{at}.kv"
        if before:
            session.save(path, before)
        with monkeypatch.context() as patch:
            fault = Fault(patch, at, error)
            try:
                session.save(path, after)
                failed = False
            except errors.SaveError as told:
                assert f"{path}: cannot be written: {os.strerror(error).lower()}" in str(told)
                failed = True
        if not failed:
            assert fault.n < at, "a failed call was not told"
            break
        if before or path.exists():
            assert is_one_of(path, *(x for x in (before, after) if x))
            ends.add("new" if is_one_of(path, after) else "old")
        # The next save finds nothing in its way, and leaves nothing of this one.
        session.save(path, after)
        assert is_one_of(path, after)
        assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))
    assert at > 5
    assert "old" in ends or before is None


def test_a_read_only_folder_is_refused(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(errors.SaveError, match="read-only file system"):
        session.save(tmp_path / "x.kv", snapshot())


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(errors.SaveError, match=r"cannot be written: no such file"):
        session.save(tmp_path / "no" / "x.kv", snapshot())
    assert not (tmp_path / "no").exists()


def test_a_full_disk_leaves_the_old_session(tmp_path):
    """A file system of 1 MB, where one can be mounted; a limit on the size of files where not."""
    path, old = tmp_path / "x.kv", snapshot(n_cells=(64,))
    session.save(path, old)
    code = (
        "import resource, signal, sys; sys.path[:0] = sys.argv[2:]\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from pathlib import Path; from snapshots import snapshot; from kvrt import session\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000))\n"
        "try: session.save(Path(sys.argv[1]), snapshot(n_cells=(3000,)))\n"
        "except session.SaveError as e: print(e); sys.exit(7)\n"
    )
    code = code.replace("session.SaveError", "__import__('kvrt.errors').errors.SaveError")
    command = [sys.executable, "-c", code, path, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
    assert "file too large" in done.stdout and done.stdout.count("\n") == 1
    assert_equal(session.read(path), old)


# --- two writers, and writers that are killed -----------------------------------------------------


def test_a_second_writer_waits_or_says_so(tmp_path, monkeypatch):
    path = tmp_path / "x.kv"
    monkeypatch.setattr(atomic, "LOCK_S", 0.05)
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with atomic.locked(path):
            entered.set()
            leave.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(5)
    with pytest.raises(errors.SaveError, match="another process has been writing it"):
        session.save(path, snapshot())
    leave.set()
    thread.join()
    session.save(path, snapshot())


def test_writers_at_once_leave_one_of_their_sessions(tmp_path):
    path = tmp_path / "x.kv"
    taken = [snapshot(n_cells=(300 + 100 * i,), seed=i % 2) for i in range(6)]
    threads = [threading.Thread(target=session.save, args=(path, one)) for one in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_one_of(path, *taken)


KILLED = """
import itertools, os, random, signal, sys, time
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from snapshots import assert_equal, snapshot
from kvrt import session
path, n = Path(sys.argv[1]), int(sys.argv[2])
taken = {k: snapshot(n_cells=(k,), layers=16) for k in (2000, 2300, 2600)}
taken[700] = snapshot(n_cells=(700,), layers=16, seed=1)
session.save(path, taken[700])
rng, found = random.Random(0), []
start = time.perf_counter()
sizes = 2000, 2300, 2600, 700
for one in sizes:
    session.save(path, taken[one])
each = time.perf_counter() - start
for i in range(n):
    child = os.fork()
    if not child:
        # Each begins with another one, for on a busy machine few get further.
        for k in itertools.count(i):
            session.save(path, taken[sizes[k % 4]])
    time.sleep(rng.random() * each)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    is_one = session.read(path)
    size = len(is_one.groups[0].pos)
    assert_equal(is_one, taken[size])
    found.append(size)
print(*sorted(set(found)), len(found))
"""


def killed(path: Path, n: int) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-c", KILLED, path, str(n), *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
def test_kills_lose_no_session(tmp_path, budget):
    n_kills = budget(40, 200)
    *sizes, n = killed(tmp_path / "x.kv", n_kills)
    assert n == str(n_kills) and len(sizes) >= 3
    session.save(tmp_path / "x.kv", snapshot())
    assert sorted(p.name for p in tmp_path.iterdir()) == [".x.kv.lock", "x.kv"]


@pytest.mark.slow
def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(tmp_path):
    taken = snapshot(n_cells=(600,))
    before = [np.array(x) for x in (taken.groups[0].pos, taken.groups[0].blocks[0].k)]
    job = session.start_save(tmp_path / "x.kv", taken)
    assert job.result().n_bytes == (tmp_path / "x.kv").stat().st_size
    found = session.read(tmp_path / "x.kv")
    np.testing.assert_array_equal(found.groups[0].pos, before[0])
    np.testing.assert_array_equal(found.groups[0].blocks[0].k, before[1])
    with pytest.raises(errors.SaveError):
        session.start_save(tmp_path / "no" / "x.kv", taken).result()
