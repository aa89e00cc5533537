"""Files that kvrt wrote before its fingerprints had all fields are read, and mean what they did."""

import contextlib
import functools
import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from samples import LONG, PLAIN, SAMPLES, foreign, next_tokens, said, serve, tokens

from kvrt import CacheConfig, Engine, EngineConfig, TierConfig, session
from kvrt.errors import BadConfig
from kvrt.policies.scored import H2O
from kvrt.session.fingerprint import digest
from kvrt.session.library import index, library
from kvrt.session.library.library import Library

BEFORE = Path(__file__).parents[1] / "data" / "before_16"
FOREIGN = ("orbax", "llama_whole", "llama_sequence", "mlx")


@functools.cache
def expected():
    return json.loads((BEFORE / "expected.json").read_text())


def assert_said(snapshot, wanted):
    """Compares all but the tokens that follow; values were decoded by another XLA, perhaps."""
    found = json.loads(json.dumps(said(snapshot)))
    for a, b in zip(found["groups"], wanted["groups"], strict=True):
        for side in "kv":
            assert a[side].pop("mean") == pytest.approx(b[side]["mean"], rel=1e-3)
            assert a[side]["sha256"] == b[side]["sha256"]
            a[side] = b[side]
    assert found == {name: x for name, x in wanted.items() if name != "next"}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_session_says_what_it_said(name):
    assert_said(session.read(BEFORE / f"{name}.kv"), expected()["sessions"][name])


@pytest.mark.parametrize(
    "name", [n if n == "f32" else pytest.param(n, marks=pytest.mark.slow) for n in SAMPLES]
)
def test_a_session_is_resumed_as_it_was(name):
    found = session.read(BEFORE / f"{name}.kv")
    assert next_tokens(SAMPLES[name], found) == expected()["sessions"][name]["next"]


def test_a_file_that_was_made_longer_twice():
    assert_said(session.read(BEFORE / "longer.kv"), expected()["longer"])


@pytest.mark.slow
def test_a_file_that_was_made_longer_twice_is_resumed():
    found = session.read(BEFORE / "longer.kv")
    assert next_tokens(LONG, found) == expected()["longer"]["next"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_other_containers(tmp_path, name):
    # Reading a checkpoint leaves no trace, but nobody promises it.
    folder = shutil.copytree(BEFORE, tmp_path / "before")
    found, wanted = foreign(folder)[name], expected()["foreign"][name]
    assert_said(found, wanted)
    assert next_tokens(PLAIN, found) == wanted["next"]


@pytest.mark.slow
def test_blocks_on_a_disk_serve_an_engine(tmp_path):
    folder = shutil.copytree(BEFORE / "tier", tmp_path / "tier")
    assert [*serve(folder)] == expected()["tier"][2:]


def open_tier(folder, policy=None, **identity):
    """An engine on a tier's folder, that of `samples.serve` but for a policy and an identity."""
    tiers = TierConfig(host_bytes=1 << 16, disk=folder, disk_bytes=1 << 18)
    config = CacheConfig(n_ctx=64, n_seq_max=2, block_size=4, n_ubatch=16)
    options = EngineConfig(mode="paged", tiers=tiers, identity=identity)
    Engine(PLAIN.model(), config, options, policy=policy).close()


def test_blocks_of_before_belong_to_who_opens_them_first(tmp_path):
    folder = shutil.copytree(BEFORE / "tier", tmp_path / "tier")
    for wrong in ({"policy": H2O(budget=20, interval=8)}, {"version": "of my decoder"}):
        with pytest.raises(BadConfig, match="blocks of another model"):
            open_tier(folder, **wrong)
    open_tier(folder, arch="llama")
    with pytest.raises(BadConfig, match="blocks of another model"):
        open_tier(folder)
    open_tier(folder, arch="llama")


@pytest.fixture
def older_library(tmp_path):
    """The folder of sessions, whose files are as old as their index says."""
    folder = shutil.copytree(BEFORE / "library", tmp_path / "library")
    for name, mtime_ns in expected()["library"].items():
        os.utime(folder / name, ns=(mtime_ns, mtime_ns))
    return folder


def version(folder):
    with contextlib.closing(sqlite3.connect(folder / index.NAME)) as db:
        return db.execute("PRAGMA user_version").fetchone()[0]


def test_an_older_index_is_rebuilt_once(older_library, monkeypatch):
    monkeypatch.setattr(library, "_SILENT_S", 1e9)  # on a slow machine as well
    told = []
    at = Library(older_library, tell=told.append)
    assert version(older_library) == 1
    names = [e.path.name for e in at.entries()]
    assert names == ["c.kv", "b.kv", "a.kv"]  # the order of their last use
    assert version(older_library) == 2 and not told
    kind = digest(session.read_manifest(older_library / "a.kv").fingerprint)
    assert {e.fingerprint for e in at.entries()} == {kind}
    match = at.best(kind, tokens(18))
    assert match is not None and (match.entry.path.name, match.n_common) == ("c.kv", 18)
    monkeypatch.setattr(index, "renewing", None)  # Never again.
    assert len(Library(older_library).entries()) == 3


def test_a_slow_rebuild_says_so(older_library, monkeypatch):
    monkeypatch.setattr(library, "_SILENT_S", -1.0)
    told = []
    Library(older_library, tell=told.append).touch(Path("b.kv"))
    assert len(told) == 1 and "rebuilt once, from 3 sessions" in told[0] and "\n" not in told[0]
    assert [e.path.name for e in Library(older_library).entries()] == ["b.kv", "c.kv", "a.kv"]


def test_a_rebuild_leaves_out_what_has_changed(older_library):
    (older_library / "a.kv").unlink()
    (older_library / "b.kv").write_bytes(b"x")
    assert [e.path.name for e in Library(older_library).entries()] == ["c.kv"]


def test_another_process_may_be_quicker(older_library, monkeypatch):
    """Whoever waited for it finds the new index, and keeps what it says."""
    late, quick = Library(older_library), Library(older_library)
    real = index.renewing

    def after_the_other(*args):
        monkeypatch.setattr(index, "renewing", real)
        quick.touch(Path("a.kv"))
        return real(*args)

    monkeypatch.setattr(index, "renewing", after_the_other)
    assert [e.path.name for e in late.entries()] == ["a.kv", "c.kv", "b.kv"]
