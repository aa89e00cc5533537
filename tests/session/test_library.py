"""The index of a folder of sessions: what it finds, and what it does not believe."""

import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrt.errors import BadSession, KvrtError, UsageError
from kvrt.session import index
from kvrt.session.diff import common_prefix
from kvrt.session.library import BLOCK, Content, Library, Synced

ROOT = Path(__file__).parents[2]
F = "f" * 64


@pytest.fixture
def library(tmp_path):
    return Library(tmp_path / "sessions")


def put(library, name, tokens, *, fingerprint=F, n_bytes=10):
    (library.folder / name).write_bytes(b"x" * n_bytes)
    library.add(Path(name), fingerprint, tokens, n_bytes)


def names(entries):
    return [e.path.name for e in entries]


def best(library, tokens, fingerprint=F):
    match = library.best(fingerprint, tokens)
    return match and (match.entry.path.name, match.n_common)


def change(library, *commands):
    """Changes the index behind the library's back."""
    with contextlib.closing(sqlite3.connect(library.folder / index.NAME)) as db, db:
        for command in commands:
            db.execute(command)


def line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


# --- finding ----------------------------------------------------------------------------------


def test_an_empty_library_has_nothing(library):
    assert library.entries() == () and best(library, [1, 2]) is None
    assert library.sync() == Synced(dropped=(), unindexed=())
    assert best(library, []) is None


def test_the_longest_prefix_of_the_same_model_wins(library):
    long = list(range(1000))
    put(library, "short.kv", long[:300])
    put(library, "long.kv", long[:700])
    put(library, "turns-off.kv", [*long[:600], *[9] * 400])
    put(library, "other-model.kv", long, fingerprint="0" * 64)
    assert best(library, long) == ("long.kv", 700)
    assert best(library, [*long[:600], 9, 9, 8]) == ("turns-off.kv", 602)
    assert best(library, long[:100]) == ("short.kv", 100)
    assert best(library, [7, *long]) is None
    assert best(library, long, "0" * 64) == ("other-model.kv", 1000)
    assert best(library, long, "1" * 64) is None


def test_of_equal_prefixes_the_shortest_then_the_last_used_wins(library):
    put(library, "a.kv", [1, 2, 3, 4])
    put(library, "b.kv", [1, 2, 9])
    put(library, "c.kv", [1, 2, 8])
    assert best(library, [1, 2, 7]) == ("c.kv", 2)
    library.touch(Path("b.kv"))
    assert best(library, [1, 2, 7]) == ("b.kv", 2)


SIZES = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 5])


def grown(parts):
    """A text of few kinds, so that beginnings are shared."""
    return [(i + kind) % 3 for kind, n in parts for i in range(n)] or [1]


TEXTS = st.lists(st.tuples(st.integers(0, 1), SIZES), min_size=1, max_size=3).map(grown)


@given(st.lists(TEXTS, min_size=1, max_size=5), TEXTS)
@settings(max_examples=10)
def test_best_is_what_a_comparison_of_all_finds(tmp_path_factory, held, wanted):
    library = Library(tmp_path_factory.mktemp("sessions"))
    for i, tokens in enumerate(held):
        put(library, f"{i}.kv", tokens)
    ids = np.array(wanted, np.int32)
    most = max(common_prefix(np.array(t, np.int32), ids) for t in held)
    match = library.best(F, wanted)
    assert (match.n_common if match else 0) == most
    if match:
        name = int(match.entry.path.stem)
        assert held[name][:most] == wanted[:most]
        assert len(held[name]) == match.entry.n_tokens


def test_digests_only_point_tokens_decide(library):
    tokens = list(range(600))
    put(library, "a.kv", tokens)
    # The digests of a.kv, but other tokens.
    change(library, f"UPDATE sessions SET tokens = zeroblob({4 * 600})")
    assert best(library, tokens) == ("a.kv", 1)


def test_a_file_that_is_gone_or_changed_is_not_found(library):
    put(library, "a.kv", [1, 2, 3])
    put(library, "b.kv", [1, 2])
    (library.folder / "a.kv").write_bytes(b"something else")
    assert best(library, [1, 2, 3]) == ("b.kv", 2)
    (library.folder / "b.kv").unlink()
    assert best(library, [1, 2, 3]) is None


# --- keeping ----------------------------------------------------------------------------------


def test_entries_come_newest_use_first(library, monkeypatch):
    for name in ("a.kv", "b.kv", "c.kv"):
        put(library, name, [1], n_bytes=5)
    # Uses keep their order where a clock was put back.
    monkeypatch.setattr("kvrt.session.library.time.time_ns", lambda: 1)
    library.touch(library.folder / "a.kv")
    assert names(library.entries()) == ["a.kv", "c.kv", "b.kv"]
    put(library, "b.kv", [1, 2], n_bytes=6)
    entry = library.entries()[0]
    assert (entry.path, entry.n_tokens, entry.n_bytes) == (library.folder / "b.kv", 2, 6)
    assert len(library.entries()) == 3


def test_prune_deletes_what_was_used_least_recently(library):
    for name in ("a.kv", "b.kv", "c.kv", "d.kv"):
        put(library, name, [1], n_bytes=100)
    library.touch(Path("a.kv"))
    (library.folder / "stranger.txt").write_bytes(b"x" * 999)
    assert library.prune(400) == ()
    assert names(library.prune(399)) == ["b.kv"]
    assert names(library.prune(100)) == ["c.kv", "d.kv"]
    assert sorted(os.listdir(library.folder)) == ["a.kv", index.NAME, "stranger.txt"]
    assert names(library.prune(0)) == ["a.kv"] and library.entries() == ()


def test_prune_leaves_files_that_changed(library):
    put(library, "a.kv", [1], n_bytes=100)
    (library.folder / "a.kv").write_bytes(b"a longer session, not added yet")
    assert library.prune(0) == ()
    assert library.sync().unindexed == ("a.kv",)


def test_prune_tells_what_it_cannot_delete(library, monkeypatch):
    put(library, "a.kv", [1])
    put(library, "b.kv", [1])
    delete = Path.unlink

    def refuse(path, missing_ok=False):
        if path.name == "b.kv":
            raise PermissionError(13, "Permission denied")
        delete(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(KvrtError) as e:
        library.prune(0)
    assert "b.kv cannot be deleted: Permission denied" in line(e)
    assert library.sync().dropped == ("a.kv",) and names(library.entries()) == ["b.kv"]


def test_sync_drops_what_is_gone_or_changed_and_names_the_others(library):
    for name in ("a.kv", "b.kv", "c.kv", "d.kv"):
        put(library, name, [1])
    (library.folder / "a.kv").unlink()
    (library.folder / "b.kv").write_bytes(b"longer than it was")
    os.utime(library.folder / "c.kv", ns=(1, 1))
    (library.folder / ".hidden.tmp").touch()
    (library.folder / "folder").mkdir()
    (library.folder / "link.kv").symlink_to(library.folder / "d.kv")
    synced = library.sync()
    assert synced == Synced(dropped=("a.kv", "b.kv", "c.kv"), unindexed=("b.kv", "c.kv"))
    assert names(library.entries()) == ["d.kv"]
    assert library.sync().dropped == ()


def test_modes_keep_others_out(tmp_path):
    library = Library(tmp_path / "new")
    put(library, "a.kv", [1])
    mode = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (library.folder, *tmp_path.iterdir())}
    assert mode["new"] == 0o700
    assert stat.S_IMODE((library.folder / index.NAME).stat().st_mode) == 0o600
    library.rebuild(lambda path: Content(fingerprint=F, tokens=[1], n_bytes=1))
    assert stat.S_IMODE((library.folder / index.NAME).stat().st_mode) == 0o600


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../a.kv", "/etc/passwd", "sub/a.kv", "", ".", "..", ".a.kv", index.NAME, "a\nb.kv"]
)
def test_no_name_leads_out_of_the_folder(library, name):
    for call in (lambda p: library.add(p, F, [1], 1), library.touch):
        with pytest.raises(UsageError) as e:
            call(Path(name))
        assert "is no session of" in line(e)


@pytest.mark.parametrize("name", ["../victim", "/victim", "sub/x", ".x", index.NAME, "x\0y"])
def test_a_name_in_the_index_that_leads_out_deletes_nothing(library, name):
    put(library, "a.kv", [1])
    victim = library.folder.parent / "victim"
    victim.write_bytes(b"x" * 10)
    with contextlib.closing(sqlite3.connect(library.folder / index.NAME)) as db, db:
        db.execute("UPDATE sessions SET name = ?", (name,))
        db.execute("UPDATE blocks SET name = ?", (name,))
    for call in (library.entries, lambda: library.prune(0), library.sync):
        with pytest.raises(BadSession):
            call()
    with pytest.raises(BadSession) as e:
        library.best(F, [1])
    assert "is impossible" in line(e) and victim.exists()


def test_what_cannot_be_an_entry_is_refused(library):
    (library.folder / "a.kv").touch()
    for args in ([F, [], 1], [F, [1], -1], ["", [1], 1], [F, [-1], 1], [F, [2**31], 1]):
        with pytest.raises(UsageError):
            library.add(Path("a.kv"), *args)
    (library.folder / "link.kv").symlink_to(library.folder / "a.kv")
    for name in ("missing.kv", "link.kv"):
        with pytest.raises(UsageError, match="is no file in"):
            library.add(Path(name), F, [1], 1)
    with pytest.raises(UsageError, match="add it first"):
        library.touch(Path("a.kv"))
    with pytest.raises(UsageError, match="at least 0"):
        library.prune(-1)
    assert library.entries() == ()


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError) as e:
        Library(tmp_path / "file")
    assert "cannot be a folder of sessions" in line(e)
    (tmp_path / index.NAME).symlink_to(tmp_path / "file")
    with pytest.raises(BadSession, match="is a link"):
        Library(tmp_path)


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


def test_an_index_of_another_version_is_refused_by_number(library):
    change(library, "PRAGMA user_version = 2")
    with pytest.raises(BadSession) as e:
        library.entries()
    assert "is of version 2, this kvrt reads 1" in line(e)


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
from kvrt.session.library import Library
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


def sound(folder):
    library = Library(folder)
    library.sync()
    with contextlib.closing(sqlite3.connect(folder / index.NAME)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (n_blocks,) = db.execute("SELECT count(*) FROM blocks").fetchone()
    assert n_blocks == sum(1 + e.n_tokens // BLOCK for e in library.entries())
    return library


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
def test_processes_that_are_killed_leave_a_sound_index(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "sessions"
    for _ in range(10):
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
    with index.writing(library.folder):
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
