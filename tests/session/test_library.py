"""The index of a folder of sessions: what it finds, and what it does not believe."""

import contextlib
import dataclasses
import json
import os
import sqlite3
import stat
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import F, best, change, line, names, put
from snapshots import snapshot

from kvrt import session
from kvrt.cli.main import main
from kvrt.errors import BadSession, KvrtError, UsageError
from kvrt.files import atomic
from kvrt.reuse.diff import common_prefix
from kvrt.runtime.chunks.chunk import CachedChunk
from kvrt.runtime.chunks.store import ChunkStore
from kvrt.session.library import index, stored
from kvrt.session.library.library import BLOCK, Content, Library, Synced

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
    monkeypatch.setattr("kvrt.session.library.library.time.time_ns", lambda: 1)
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


@pytest.mark.parametrize("moment", ["before", "under", "while"])
def test_prune_leaves_a_session_that_is_saved_while_it_runs(library, monkeypatch, moment):
    for name in ("a.kv", "b.kv", "c.kv"):
        put(library, name, [1], n_bytes=100)
    path, remove = library.folder / "a.kv", atomic.remove
    held = contextlib.ExitStack()

    def save_first(gone, is_unchanged):
        if gone != path:
            return remove(gone, is_unchanged)
        if moment == "before":
            path.write_bytes(b"saved again")
        elif moment == "while":
            held.enter_context(atomic.locked(path))
        else:
            real = is_unchanged

            def is_unchanged():
                path.write_bytes(b"saved again")
                return real()

        return remove(gone, is_unchanged)

    monkeypatch.setattr(atomic, "remove", save_first)
    with held:
        assert names(library.prune(200)) == ["b.kv"]
        assert path.exists()
    # Neither its file nor that of its lock is left of one that is deleted.
    assert not [x for x in os.listdir(library.folder) if "b.kv" in x]


def test_a_folder_session_is_indexed_and_pruned_like_a_file(library):
    for name in ("a.orbax", "b.orbax"):
        (library.folder / name / "rows-000001").mkdir(parents=True)
        (library.folder / name / "rows-000001" / "part-0").write_bytes(b"x" * 90)
        (library.folder / name / stored.FOLDER_INDEX).write_bytes(b"x" * 10)
    (library.folder / "neither").mkdir()
    assert library.sync().unindexed == ("a.orbax", "b.orbax")
    seen = []

    def read(path):
        seen.append(path.name)
        return Content(fingerprint=F, tokens=[1, 2], n_bytes=stored.bytes_on_disk(path))

    assert sorted(library.rebuild(read).added) == sorted(seen) == ["a.orbax", "b.orbax"]
    assert [e.n_bytes for e in library.entries()] == [100, 100]
    library.touch(Path("a.orbax"))
    assert best(library, [1, 2]) == ("a.orbax", 2)
    assert names(library.prune(100)) == ["b.orbax"]
    assert sorted(os.listdir(library.folder)) == ["a.orbax", index.NAME, "neither"]
    # Each save replaces the index of a folder.
    (library.folder / "a.orbax" / stored.FOLDER_INDEX).write_bytes(b"saved again")
    assert library.prune(0) == () and library.sync().unindexed == ("a.orbax",)


def test_ls_and_prune_count_folder_sessions(library, plain, capfd):
    path, file = library.folder / "x.orbax", library.folder / "y.kv"
    session.save(path, snapshot(), "folder")
    session.save(file, snapshot())
    os.utime(path / stored.FOLDER_INDEX, (5, 5))
    assert main(["ls", str(library.folder), "--json"]) == 0
    found = {Path(e["path"]).name: e for e in json.loads(capfd.readouterr().out)}
    assert found["x.orbax"]["n_tokens"] == found["y.kv"]["n_tokens"] == 40
    assert found["x.orbax"]["n_bytes"] == stored.bytes_on_disk(path) > 5_000
    assert found["x.orbax"]["used_ns"] == 5 * 10**9, "a list of sessions is no use of them"
    with atomic.locked(path):
        assert main(["prune", str(library.folder), "--budget", "0", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert [Path(e["path"]).name for e in told["deleted"]] == ["y.kv"]
    assert [e["why"] for e in told["kept"]] == ["saved by another process meanwhile"]
    assert main(["prune", str(library.folder), "--budget", "0", "--quiet"]) == 0
    assert os.listdir(library.folder) == [index.NAME]


def test_a_chunk_is_found_whatever_the_index_says(library, monkeypatch):
    store = ChunkStore(library.folder)
    taken = dataclasses.replace(snapshot(), draws={}, logits={}, ga_i={})
    ids = taken.history.pieces[0][0][1].tolist()
    path = store.add(taken.fingerprint, CachedChunk(snapshot=taken))
    change(library, "DELETE FROM sessions")  # `kvrt ls` of a folder that was restored, say
    assert store.find_stored(taken.fingerprint, ids) is not None
    assert names(library.entries()) == [path.name]

    def busy(*_, **__):
        raise KvrtError("the index was in use by others")

    monkeypatch.setattr(index, "writing", busy)
    assert store.find_stored(taken.fingerprint, ids) is not None


def test_a_rebuild_reads_again_what_was_saved_while_it_read(library, monkeypatch):
    for name in ("a.kv", "b.kv"):
        put(library, name, [1])
    replacing, reads = index.replacing, []

    def read(path):
        reads.append(path.name)
        return Content(fingerprint=F, tokens=list(path.read_bytes()), n_bytes=1)

    def saved_first(folder):
        (folder / "a.kv").write_bytes(b"longer than before")
        (folder / "c.kv").write_bytes(b"new")
        return replacing(folder)

    monkeypatch.setattr(index, "replacing", saved_first)
    library.rebuild(read)
    assert sorted(reads) == ["a.kv", "a.kv", "b.kv", "c.kv"]
    assert {e.path.name: e.n_tokens for e in library.entries()} == {
        "a.kv": 18,
        "b.kv": 10,
        "c.kv": 3,
    }


def test_take_in_leaves_what_others_added_meanwhile(library):
    for name in ("a.kv", "b.kv", "c.kv"):
        put(library, name, [1, 2])
    entries = {e.path.name: e for e in library.entries()}
    library.touch(Path("a.kv"))  # by another process, after the files were looked at
    (library.folder / "b.kv").write_bytes(b"saved by another process")
    change(library, "DELETE FROM sessions WHERE name = 'c.kv'")
    content = Content(fingerprint=F, tokens=[7], n_bytes=10)
    library.take_in(tuple(entries.values()), dict.fromkeys(entries, content))
    now = {e.path.name: e for e in library.entries()}
    assert sorted(now) == ["a.kv", "c.kv"]
    assert (now["a.kv"].n_tokens, now["c.kv"].n_tokens) == (2, 1)
    assert now["a.kv"].used_ns > entries["a.kv"].used_ns


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
    assert "deleted before it: a.kv" in line(e)
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


def test_looking_at_a_folder_leaves_it_as_it_is(tmp_path):
    (tmp_path / "note.txt").write_bytes(b"x")
    tmp_path.chmod(0o755)
    before = tmp_path.stat()
    library = Library(tmp_path)
    assert library.entries() == () and library.best(F, [1, 2]) is None
    assert library.scan().others == library.sync().unindexed == ("note.txt",)
    assert library.prune(0) == () and not list(library.tree(F).leaves())
    assert not library.touch(Path("note.txt"))
    after = tmp_path.stat()
    assert os.listdir(tmp_path) == ["note.txt"]
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)

    def none(path):
        raise BadSession(f"{path.name} is no session")

    assert library.rebuild(none).refused == {"note.txt": "note.txt is no session"}
    assert os.listdir(tmp_path) == ["note.txt"]


def test_a_session_may_have_been_used_before_it_was_added(library):
    for name, used_ns in (("a.kv", 300), ("b.kv", 100), ("c.kv", 300), ("d.kv", None)):
        (library.folder / name).write_bytes(b"x")
        library.add(Path(name), F, [1], 1, used_ns)
    # Of two that were used at once, the one added later counts as the newer one.
    assert names(library.entries()) == ["d.kv", "c.kv", "a.kv", "b.kv"]
    assert names(library.prune(2)) == ["b.kv", "a.kv"]
    with pytest.raises(UsageError, match="since 1970"):
        library.add(Path("d.kv"), F, [1], 1, -1)


@pytest.mark.parametrize("seconds", [-9, 4_000_000_000])
def test_files_of_impossible_times_are_kept_like_others(library, seconds):
    put(library, "a.kv", [1])
    os.utime(library.folder / "a.kv", (seconds, seconds))
    library.add(Path("a.kv"), F, [1], 1)
    assert names(library.entries()) == ["a.kv"] and library.scan().others == ()
    library.rebuild(lambda path: Content(fingerprint=F, tokens=[1], n_bytes=1))
    assert names(library.entries()) == ["a.kv"]
    assert 0 <= library.entries()[0].used_ns <= time.time_ns()


def test_modes_keep_others_out(tmp_path):
    library = Library(tmp_path / "new")
    assert not os.listdir(library.folder)
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
