"""Sessions in a folder: the same content, and from eight devices onto one, two and four."""

import dataclasses
import json
import subprocess
import sys

import pytest
from snapshots import assert_equal, snapshot

from kvrt import errors, session
from kvrt.session.orbax import folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "x.kvd"
    taken = snapshot(n_cells=(300, 0, 7), states=True, dtype="uint16")
    session.save(path, taken, "folder")
    return path, taken


def test_what_is_read_is_what_was_saved(sound):
    path, taken = sound
    assert_equal(session.read(path), taken)
    assert session.read_manifest(path).n_tokens == {0: 300}
    for file in path.rglob("*"):
        assert file.stat().st_mode & 0o077 == 0, file


def test_a_newer_session_replaces_the_older_one(tmp_path):
    path = tmp_path / "x.kvd"
    for seed in range(3):
        taken = snapshot(n_cells=(40,), seed=seed)
        session.save(path, taken, "folder" if seed == 0 else None)
        assert_equal(session.read(path), taken)
        assert len(list(path.glob("rows-*"))) == 1


def test_a_save_that_was_stopped_leaves_the_older_one(tmp_path, monkeypatch):
    path, old = tmp_path / "x.kvd", snapshot(n_cells=(40,))
    session.save(path, old, "folder")

    def stop(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder.atomic, "replace", stop)
        with pytest.raises(errors.SaveError, match="no space left"):
            session.save(path, snapshot(n_cells=(50,)))
    assert_equal(session.read(path), old)
    new = snapshot(n_cells=(60,))
    session.save(path, new)
    assert_equal(session.read(path), new)
    assert len(list(path.glob("rows-*"))) == 1


def test_a_session_that_a_reader_would_refuse_replaces_none(tmp_path, plain):
    path, old = tmp_path / "x.kvd", snapshot(n_cells=(40,))
    session.save(path, old, "folder")
    wrong = snapshot(n_cells=(50,))
    wrong = dataclasses.replace(wrong, history=dataclasses.replace(wrong.history, n_marks=5))
    with pytest.raises(errors.SaveError, match="cannot be read again"):
        session.save(path, wrong)
    assert_equal(session.read(path), old)
    assert len(list(path.glob("rows-*"))) == 1


def test_a_folder_of_something_else_stays_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(errors.SaveError, match="is no session and stays as it is"):
        session.save(tmp_path, snapshot())
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".txt"] == ["a.txt"]


@pytest.mark.slow
def test_every_damaged_file_is_refused_or_reads_the_same(sound, tmp_path):
    """One flipped bit in each file in turn: Orbax alone lets some of them pass."""
    path, taken = sound
    n_refused, found = 0, sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size)
    for file in found:
        data = file.read_bytes()
        changed = bytearray(data)
        changed[len(data) // 2] ^= 16
        file.write_bytes(changed)
        try:
            assert_equal(session.read(path), taken)
        except errors.BadSession as error:
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
            n_refused += 1
        finally:
            file.write_bytes(data)
    assert n_refused >= 3
    assert_equal(session.read(path), taken)


def test_a_missing_part_is_named(tmp_path):
    path = tmp_path / "x.kvd"
    session.save(path, snapshot(), "folder")
    (path / "session.json").rename(path / "other.json")
    with pytest.raises(errors.BadSession, match=r"session\.json cannot be read"):
        session.read(path)


DEVICES = """
import json, sys
sys.path[:0] = sys.argv[3:]
import dataclasses
from pathlib import Path
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from snapshots import snapshot, assert_equal
from kvrt import session
from kvrt.session.orbax import folder
from kvrt.session.snapshot import KVBlock

taken = snapshot(n_cells=(300,), layers=8)
path, what = Path(sys.argv[1]), sys.argv[2]

def over(n):
    mesh = Mesh(np.array(jax.devices()[:n]), ("layers",))
    return NamedSharding(mesh, PartitionSpec("layers"))

if what == "save":
    part = taken.groups[0]
    put = lambda x: jax.device_put(x, over(8))
    blocks = [KVBlock(k=put(b.k), v=put(b.v)) for b in part.blocks]
    part = dataclasses.replace(part, blocks=blocks)
    folder.save(path, dataclasses.replace(taken, groups=(part,)))
else:
    for n in (4, 2, 1):
        found = folder.read(path, sharding=lambda x: over(n))
        assert_equal(found, taken)
        assert all(len(b.k.sharding.device_set) == n for b in found.groups[0].blocks)
print(len(jax.devices()))
"""


@pytest.mark.slow
def test_from_eight_devices_onto_one_two_and_four(tmp_path, monkeypatch):
    path = tmp_path / "x.kvd"
    for n, what in ((8, "save"), (4, "read")):
        monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={n}")
        command = [sys.executable, "-c", DEVICES, path, what, *sys.path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == n
