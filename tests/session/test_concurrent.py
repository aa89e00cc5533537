"""Writers of names that begin alike, and readers beside writers: nobody fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from snapshots import assert_equal, snapshot

from kvrt import session
from kvrt.files import atomic

NAMES = ("book", "book.kv", "book.kv.1", "book.1", "b[o]ok", "bo*k", "boook")


@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_takes_its_own_temporaries_and_no_others(tmp_path, name):
    for other in NAMES:
        (tmp_path / f".{other}.123.tmp").write_bytes(b"of a writer")
    (tmp_path / f".{name}.77.tmp").mkdir()
    (tmp_path / f".{name}.77.tmp" / "part-1").write_bytes(b"of a folder session's writer")
    not_ours = [
        f".{name}.tmp",
        f".{name}.12x.tmp",
        f".{name}..tmp",
        f".{name}.\u0661.tmp",
        f"{name}.1.tmp",
    ]
    not_ours = [x for x in not_ours if x not in {f".{other}.123.tmp" for other in NAMES}]
    for other in not_ours:
        (tmp_path / other).write_bytes(b"of the user")
    atomic.sweep(tmp_path / name)
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {f".{other}.123.tmp" for other in NAMES if other != name} | set(not_ours)


def test_a_link_with_the_name_of_a_temporary_is_left_alone(tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / ".x.kv.123.tmp").symlink_to(tmp_path / "letters")
    session.save(tmp_path / "x.kv", snapshot())
    assert (tmp_path / "letters").is_dir() and (tmp_path / ".x.kv.123.tmp").is_symlink()


def test_a_save_beside_a_save_of_a_longer_name_lets_it_be(tmp_path, monkeypatch):
    """Item for item what two processes do: one saves while the other has its temporary open."""
    real, seen = os.replace, []

    def replace(source, target):
        monkeypatch.setattr(os, "replace", real)
        session.save(tmp_path / "book", snapshot())
        seen.append(Path(source).exists())
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    session.save(tmp_path / "book.kv", snapshot(seed=1))
    assert seen == [True]
    assert_equal(session.read(tmp_path / "book.kv"), snapshot(seed=1))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_reader_beside_a_lengthening_writer_sees_one_session(tmp_path, monkeypatch, when):
    path, old, new = tmp_path / "x.kv", snapshot(n_cells=(900,)), snapshot(n_cells=(1200,))
    session.save(path, old)
    real = os.fstat

    def fstat(fd):
        monkeypatch.setattr(os, "fstat", real)
        if when == "before":
            saved = session.save(path, new)
            assert saved.n_written < saved.n_bytes, "it was not made longer"
            return real(fd)
        found = real(fd)
        session.save(path, new)
        return found

    monkeypatch.setattr(os, "fstat", fstat)
    assert_equal(session.read(path), new)


WORK = """
import os, sys, time
sys.path[:0] = sys.argv[4:]
from pathlib import Path
from snapshots import assert_equal, snapshot
from kvrt import errors, session

folder, container, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
if container == "folder":
    import orbax.checkpoint  # once for all
names = ("book", "book.kv", "book.kv.1", "b[o]ok")
taken = {n: snapshot(n_cells=(n,), seed=n < 500) for n in (200, 600, 900, 1200)}
end = time.monotonic() + seconds

def write(name):
    n = 0
    while time.monotonic() < end:
        for one in taken.values():
            session.save(folder / name, one, container)
            n += 1
    return n

def is_there(path):
    try:
        session.read_manifest(path)
    except errors.BadSession:
        return False
    return True

def read(name):
    n = 0
    while not is_there(folder / name):
        time.sleep(0.05)
    while time.monotonic() < end:
        found = session.read(folder / name)
        assert_equal(found, taken[len(found.groups[0].pos)])
        n += 1
    return n

children = []
for job, name in [(write, name) for name in names] + [(read, "book"), (read, "book.kv")]:
    child = os.fork()
    if not child:
        try:
            n = job(name)
        except BaseException as error:
            print(f"{job.__name__} {name}: {error!r}"[:500], file=sys.stderr, flush=True)
            os._exit(1)
        print(job.__name__, n, flush=True)
        os._exit(not n)
    children.append(child)
failed = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
left = sorted(p.name for p in folder.iterdir() if p.name.endswith(".tmp"))
print("left", left)
sys.exit(any(failed) or bool(left))
"""


@pytest.mark.slow
@pytest.mark.parametrize("container", ["file", "folder"])
def test_writers_of_neighbouring_names_and_their_readers(tmp_path, container, budget):
    """Four processes save under names that begin alike, two read: no save and no read fails."""
    seconds = budget(*{"file": ("2", "5"), "folder": ("3", "15")}[container])
    command = [sys.executable, "-W", "ignore", "-c", WORK, tmp_path, container, seconds, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
