"""Folder sessions whose save was killed or refused: one line, and no name that cannot be used."""

import os
import shutil
import subprocess
import sys

import pytest
from snapshots import assert_equal, snapshot

from kvrt import errors, session
from kvrt.session.orbax import rows, write


class Killed(BaseException):
    """What a process does not live to handle."""


def killed(path, monkeypatch, at, old=None):
    """Saves up to the k-th change of names or files; whether it was stopped there."""
    n = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal n
            n += 1
            if n >= at:
                # Nothing is tidied up either.
                raise Killed
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("mkdir", "fsync", "rename", "replace", "chmod", "unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            session.save(path, snapshot(n_cells=(30,), seed=1), "folder")
        except Killed:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("old", [None, "empty", "session"])
def test_a_killed_save_leaves_a_name_that_can_be_used(tmp_path, monkeypatch, plain, old):
    before, after = snapshot(n_cells=(40,)), snapshot(n_cells=(50,))
    at, stopped = 0, True
    while stopped:
        at += 1
        path = tmp_path / f"{at}.kvd"
        if old == "session":
            session.save(path, before, "folder")
        elif old == "empty":
            path.mkdir()
        stopped = killed(path, monkeypatch, at)
        if stopped and old == "session":
            found = session.read(path)
            assert len(found.groups[0].pos) in (30, 40)
        elif stopped and path.exists():
            try:
                assert len(session.read(path).groups[0].pos) == 30
            except errors.BadSession as error:
                assert "\n" not in str(error)
        session.save(path, after, "folder")
        assert_equal(session.read(path), after)
        names = sorted(p.name for p in path.iterdir())
        assert len(names) == 2 and names[1] == "session.json", names
        assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]
    assert at > 10


def test_a_first_save_that_is_refused_leaves_nothing(tmp_path, monkeypatch):
    def refuse(path, tree):
        (path.parent / "half").write_bytes(b"rows")
        raise ValueError("RESOURCE_EXHAUSTED: no room [os_error_code='28']\nmore lines")

    path = tmp_path / "x.kvd"
    with monkeypatch.context() as patch:
        patch.setattr(write, "write_checkpoint", refuse)
        with pytest.raises(errors.SaveError) as error:
            session.save(path, snapshot(), "folder")
    assert str(error.value) == (
        f"{path}: cannot be written: no space left on device; nothing is half written, make room "
        "or give another name"
    )
    assert [p.name for p in tmp_path.iterdir()] == [".x.kvd.lock"]


def test_what_is_not_ours_is_left_alone(tmp_path):
    path = tmp_path / "x.kvd"
    # Names like ours, but nothing of ours beside them.
    (path / "rows-000001").mkdir(parents=True)
    with pytest.raises(errors.SaveError, match="is no session and stays as it is"):
        session.save(path, snapshot())
    # A file that has the name of our index.
    (path / "session.json").write_text('{"cookies": []}')
    with pytest.raises(errors.SaveError, match="is no session and stays as it is"):
        session.save(path, snapshot())
    assert sorted(p.name for p in path.iterdir()) == ["rows-000001", "session.json"]
    assert (path / "session.json").read_text() == '{"cookies": []}'
    shutil.rmtree(path)
    session.save(path, snapshot(), "folder")
    others = ("rows-backup", "rows-1", "notes.txt", ".rows-000001.x.tmp")
    for name in others:
        (path / name).mkdir()
    session.save(path, snapshot(seed=1))
    assert all((path / name).is_dir() for name in others)
    assert_equal(session.read(path), snapshot(seed=1))
    (tmp_path / "file").write_text("a")
    with pytest.raises(errors.SaveError, match="is a file; give another name for a session in a"):
        session.save(tmp_path / "file", snapshot(), "folder")


def test_a_damaged_session_stays_until_the_new_one_is_there(tmp_path, monkeypatch):
    path = tmp_path / "x.kvd"
    session.save(path, snapshot(), "folder")
    data = (path / "session.json").read_bytes()
    (path / "session.json").write_bytes(data[:-9])

    def stop(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(write, "write_checkpoint", stop)
        with pytest.raises(errors.SaveError):
            session.save(path, snapshot(seed=1))
    (path / "session.json").write_bytes(data)
    assert_equal(session.read(path), snapshot())


def test_nobody_else_can_enter_what_is_being_written(tmp_path, monkeypatch):
    path, seen, real = tmp_path / "x.kvd", [], write.write_checkpoint
    path.mkdir(mode=0o755)  # the user's own folder, which others may enter

    def save(target, tree):
        real(target, tree)
        seen.append(target.parent.stat().st_mode & 0o777)
        assert target.parent.parent == path

    monkeypatch.setattr(write, "write_checkpoint", save)
    session.save(path, snapshot(), "folder")
    assert seen == [0o700]


def test_a_save_beside_a_read_gives_it_the_new_session(tmp_path, monkeypatch, plain):
    path, old, new = tmp_path / "x.kvd", snapshot(n_cells=(40,)), snapshot(n_cells=(50,))
    session.save(path, old, "folder")
    real = rows.read_rows

    def read_rows(*args):
        monkeypatch.setattr(rows, "read_rows", real)
        session.save(path, new)
        return real(*args)

    monkeypatch.setattr(rows, "read_rows", read_rows)
    assert_equal(session.read(path), new)


LIMITED = """
import resource, signal, sys
sys.path[:0] = sys.argv[2:]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from snapshots import snapshot
from kvrt import errors, session
taken = snapshot(n_cells=(6000,), layers=4)
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    session.save(sys.argv[1], taken, "folder")
except errors.SaveError as error:
    print(error)
    sys.exit(7)
"""


@pytest.mark.slow
def test_orbax_adds_nothing_to_the_one_line(tmp_path):
    """Where a disk is full while many arrays are written at once."""
    path = tmp_path / "x.kvd"
    command = [sys.executable, "-W", "ignore", "-c", LIMITED, path, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == (
        f"{path}: cannot be written: file too large; nothing is half written, make room or give "
        "another name\n"
    )
    assert [p.name for p in tmp_path.iterdir()] == [".x.kvd.lock"]


KILLS = """
import os, random, signal, sys, time
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import orbax.checkpoint
from snapshots import assert_equal, snapshot
from kvrt import errors, session
folder, rng = Path(sys.argv[1]), random.Random(0)
taken, after = snapshot(n_cells=(6000,), layers=16), snapshot(n_cells=(40,))
for i in range(12):
    path = folder / f"{i}.kvd"
    ready, go = os.pipe()
    child = os.fork()
    if not child:
        os.write(go, b"1")
        session.save(path, taken, "folder")
        os._exit(0)
    os.read(ready, 1)
    time.sleep(rng.random() * 0.2)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(*sorted(p.name for p in path.iterdir()) if path.exists() else ["none"], flush=True)
    # TensorStore allows no forks after its first use.
    child = os.fork()
    if not child:
        try:
            try:
                assert_equal(session.read(path), taken)
            except errors.BadSession as error:
                assert chr(10) not in str(error)
            session.save(path, after, "folder")
            assert_equal(session.read(path), after)
            assert len(list(path.iterdir())) == 2, list(path.iterdir())
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_first_saves_that_are_killed_can_be_repeated(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", KILLS, tmp_path, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(".tmp") >= 3, done.stdout
