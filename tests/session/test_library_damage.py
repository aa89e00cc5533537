"""The index of a folder of sessions: damaged, and used by several at once."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from libraries import F, best, change, line, names, put

from kvrt.errors import BadSession, KvrtError
from kvrt.session.library import index
from kvrt.session.library.library import BLOCK, Content, Library, Synced

ROOT = Path(__file__).parents[2]

# --- damage -----------------------------------------------------------------------------------


def _cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _overwrite(path):
    path.write_bytes(b"not a database, " * 300)


def _zero_a_page(path):
    with path.open("r+b") as f:
        f.seek(4096)
        f.write(bytes(4096))


def _break_long_rows(path):
    """Pages that neither a name nor a number is read from."""
    pages = bytearray(path.read_bytes())
    long = [i for i in range(4096, len(pages), 4096) if pages[i] not in (2, 5, 10, 13)]
    assert long
    for i in long:
        pages[i : i + 4] = b"\xff" * 4
    path.write_bytes(pages)


def _trigger(path):
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TRIGGER t AFTER UPDATE ON sessions BEGIN DELETE FROM blocks; END")


@pytest.mark.parametrize("harm", [_cut, _overwrite, _zero_a_page, _break_long_rows, _trigger])
def test_a_damaged_index_is_told_and_rebuilt_only_on_request(library, harm):
    for i in range(4):
        put(library, f"{i}.kv", [i] * 2000)
        os.utime(library.folder / f"{i}.kv", ns=(9 - i, 9 - i))
    path = library.folder / index.NAME
    harm(path)
    before = path.read_bytes()
    for call in (library.sync, lambda: library.prune(0)):
        with pytest.raises(BadSession) as e:
            call()
        assert "is damaged" in line(e) and "rebuild" in line(e)
    assert path.read_bytes() == before
    assert len(list(library.folder.glob("*.kv"))) == 4

    def read(path):
        if path.name == "2.kv":
            raise BadSession("2.kv is cut off")
        return Content(fingerprint=F, tokens=[int(path.stem)] * 2000, n_bytes=10)

    again = Library(library.folder)
    rebuilt = again.rebuild(read)
    assert rebuilt.added == ("3.kv", "1.kv", "0.kv")
    assert rebuilt.refused == {"2.kv": "2.kv is cut off"}
    assert names(again.entries()) == ["0.kv", "1.kv", "3.kv"]
    assert best(again, [1] * 5000) == ("1.kv", 2000)
    assert again.sync() == Synced(dropped=(), unindexed=("2.kv",))
    assert not list(again.folder.glob(".*"))


def test_a_rebuild_that_fails_leaves_the_old_index(library):
    put(library, "a.kv", [1])

    def read(path):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        library.rebuild(read)
    assert names(library.entries()) == ["a.kv"]
    assert sorted(os.listdir(library.folder)) == ["a.kv", index.NAME]


def test_the_journal_of_a_damaged_index_does_not_survive_it(library):
    put(library, "a.kv", [1])
    (library.folder / f"{index.NAME}-journal").write_bytes(b"\xd9\xd5\x05\xf9 left over" * 100)
    library.rebuild(lambda path: Content(fingerprint=F, tokens=[1], n_bytes=1))
    assert sorted(os.listdir(library.folder)) == ["a.kv", index.NAME]


def test_what_killed_rebuilds_left_goes_with_the_next_one(library):
    put(library, "a.kv", [1])
    ours = (f".{index.NAME}.123.tmp", f".{index.NAME}.123.tmp-journal")
    others = (f".{index.NAME}.x.tmp", f".{index.NAME}.123.tmp-wal", f"{index.NAME}.123.tmp")
    for name in ours + others:
        (library.folder / name).write_bytes(b"left")
    library.rebuild(lambda path: Content(fingerprint=F, tokens=[1], n_bytes=1))
    assert sorted(os.listdir(library.folder)) == sorted(["a.kv", index.NAME, *others])
    assert (library.folder / index.NAME).stat().st_mode & 0o777 == 0o600


def test_a_change_of_the_index_is_on_the_disk_when_it_is_done(library):
    """SQLite promises so with these settings; what it promises is not tested here again."""
    with index.writing(library.folder, make=True) as db:
        (synchronous,) = db.execute("PRAGMA synchronous").fetchone()
        (journal,) = db.execute("PRAGMA journal_mode").fetchone()
    assert (synchronous, journal) == (2, "delete")


def test_an_index_of_another_version_is_refused_by_number(library):
    put(library, "a.kv", [1])
    change(library, "PRAGMA user_version = 3")
    with pytest.raises(BadSession) as e:
        library.entries()
    assert "is of version 3, this kvrt reads 2" in line(e)


def test_impossible_rows_are_damage(library):
    put(library, "a.kv", [1, 2])
    for bad in ("n_tokens = 3", "used_ns = -1", "size = 'x'", "used_ns = 9223372036854775807"):
        change(library, f"UPDATE sessions SET {bad}")
        with pytest.raises(BadSession, match="impossible"):
            library.entries()
        change(library, "DELETE FROM sessions")
        change(library, "DELETE FROM blocks")
        put(library, "a.kv", [1, 2])
    change(library, "UPDATE sessions SET used_ns = 9223372036854775807")
    with pytest.raises(BadSession, match="was used at"):
        library.touch(Path("a.kv"))
    change(library, "UPDATE sessions SET used_ns = 1, tokens = '12345678'")
    with pytest.raises(BadSession, match="are text"):
        library.best(F, [1])


# --- several at once --------------------------------------------------------------------------

WORK = """
import sys
from pathlib import Path
from kvrt.session.library.library import Library
folder, me, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
library = Library(folder)
print("ready", flush=True)
i = 0
while i < rounds or rounds == 0:
    name = f"{me}-{i}.kv"
    (library.folder / name).write_bytes(b"x" * 10)
    library.add(Path(name), "f", [int(me), *range(300 + i % 20)], 10)
    assert library.best("f", [int(me), *range(400)]) is not None
    if i % 4 == 3:
        library.prune(150)
    i += 1
"""


def worker(folder, me, rounds):
    code = [sys.executable, "-c", WORK, str(folder), str(me), str(rounds)]
    return subprocess.Popen(
        code, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


CROWD = """
import sys, time
from pathlib import Path
from kvrt.session.library import index
from kvrt.session.library.stored import Content
from kvrt.session.library.library import Library
folder, me, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
library, n, end = Library(folder), 0, time.monotonic() + seconds
index.WAIT_S = 2.0
content = Content(fingerprint="f", tokens=[1], n_bytes=10)
while time.monotonic() < end:
    if me:
        path = folder / f"{me}-{n % 40}.kv"
        path.write_bytes(b"x" * (10 + n))
        library.add(path, "f", [me, *range(20000)], 10)
    else:
        library.sync(), library.prune(10**9), library.rebuild(lambda path: content)
    library.entries()
    n += 1
sys.exit(n < 5)
"""


@pytest.mark.slow
def test_each_of_six_processes_gets_the_index_in_time(tmp_path, budget):
    """Five add without a pause; a sixth prunes and rebuilds, for which it needs the index alone."""
    folder = Library(tmp_path / "sessions").folder
    six = [
        subprocess.Popen(
            [sys.executable, "-c", CROWD, str(folder), str(me), str(budget(5, 15))],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for me in range(6)
    ]
    for process in six:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    sound(folder)


def sound(folder):
    library = Library(folder)
    library.sync()
    with contextlib.closing(sqlite3.connect(folder / index.NAME)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (n_blocks,) = db.execute("SELECT count(*) FROM blocks").fetchone()
    assert n_blocks == sum(1 + e.n_tokens // BLOCK for e in library.entries())
    return library


@pytest.mark.slow
def test_two_processes_at_once(tmp_path):
    folder = tmp_path / "sessions"
    both = [worker(folder, me, 12) for me in (1, 2)]
    for process in both:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
    library = sound(folder)
    # Whoever came last made the others' sessions fit the budget as well.
    assert len(library.entries()) == 15
    assert sorted(names(library.entries())) == sorted(p.name for p in folder.glob("*.kv"))


@pytest.mark.slow
def test_processes_that_are_killed_leave_a_sound_index(tmp_path, budget):
    rng = np.random.default_rng(0)
    folder = tmp_path / "sessions"
    for _ in range(budget(3, 10)):
        both = [worker(folder, me, 0) for me in (1, 2)]
        for process in both:
            assert process.stdout.readline() == "ready\n"
        for process in both:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=float(rng.uniform(0, 0.1)))
            process.send_signal(signal.SIGKILL)
            process.communicate()
        sound(folder)
    assert sound(folder).entries()


def test_others_wait_for_a_lock_and_then_say_so(library, monkeypatch):
    put(library, "a.kv", [1])
    monkeypatch.setattr(index, "WAIT_S", 0.05)
    with index.reading(library.folder):
        assert names(library.entries()) == ["a.kv"]
        with pytest.raises(KvrtError) as e:
            library.touch(Path("a.kv"))
        assert "in use by others for 0.05 s" in line(e)
        with pytest.raises(KvrtError, match="in use by others"):
            library.rebuild(lambda path: Content(fingerprint=F, tokens=[1], n_bytes=1))
    library.touch(Path("a.kv"))


def test_threads_share_a_library(library):
    def work(me):
        for i in range(5):
            put(library, f"{me}-{i}.kv", [me, i])

    threads = [threading.Thread(target=work, args=(me,)) for me in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.entries()) == 15


@pytest.mark.slow
def test_a_read_only_index_is_told(library, monkeypatch):
    put(library, "a.kv", [1])
    real = index._connect

    def read_only(path):
        db = real(path)
        db.execute("PRAGMA query_only = ON")
        return db

    monkeypatch.setattr(index, "_connect", read_only)
    with pytest.raises(KvrtError) as e:
        library.touch(Path("a.kv"))
    assert "cannot be used" in line(e) and not isinstance(e.value, BadSession)
