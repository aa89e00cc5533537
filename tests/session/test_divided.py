"""Snapshots that stay on the devices of a mesh: their pieces, and the folders that hold them.

More devices and more processes: tests/program/test_mesh.py and tests/session/test_writers.py.
"""

import dataclasses
import json

import numpy as np
import pytest
from snapshots import assert_equal

from kvrt import CacheConfig, Runtime, errors, session
from kvrt.program.mesh import MeshSpec
from kvrt.session import divided, expected, manifest
from kvrt.session.divided import Division, divided_groups
from kvrt.session.orbax import folder, rows
from kvrt.session.snapshot import KVBlock
from tests.toys import ToyLm


@pytest.fixture(scope="module")
def taken():
    """A snapshot as the one device of a mesh holds it, and the same on the host."""
    config = CacheConfig(n_ctx=320, n_seq_max=2, n_ubatch=64)
    runtime = Runtime(ToyLm(n_layers=1), config, mesh=MeshSpec())
    runtime.append([i % 32 for i in range(290)])
    runtime.append([7, 8, 9], 1)
    runtime.seq_rm(0, 10, 14)
    return runtime.snapshot(divided=True), runtime.snapshot()


@pytest.fixture(scope="module")
def sound(taken, tmp_path_factory):
    path = tmp_path_factory.mktemp("divided") / "x.kvd"
    session.save(path, taken[0], "folder")
    return path


def test_pieces_are_put_together_as_a_plain_copy_would():
    """Cells 0 to 599 of 6 heads, in parts of the cells and of the heads, one of them empty."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, 600, 6, 4)) for _ in "kv")
    parts_of = Division(cells=(300, 0, 44, 256), n_heads=3, writers=(0,) * 12)
    found = []
    for start, n in ((0, 256), (256, 44), (300, 44), (344, 256)):
        for head in (0, 2, 4):
            at = np.s_[:, start : start + n, head : head + 2]
            found.append(KVBlock(k=k[at], v=v[at]))
    assert [(x.start, x.n, x.head) for x in divided.pieces(parts_of)[::3]] == [
        (0, 256, 0),
        (256, 44, 0),
        (300, 44, 0),
        (344, 256, 0),
    ]
    assert parts_of.n_pieces == len(divided.pieces(parts_of)) == len(found)
    whole = divided.joined_pieces(parts_of, found)
    assert [x.k.shape[1] for x in whole] == [256, 256, 88]
    for side, want in (("k", k), ("v", v)):
        got = np.concatenate([getattr(x, side) for x in whole], axis=1)
        np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_a_folder_holds_what_the_devices_had_and_a_file_too(taken, sound, tmp_path):
    divided, plain = taken
    found = session.read_manifest(sound)
    assert found.groups[0].division == Division(cells=(289,), n_heads=1, writers=(0,))
    assert [p.name for p in sound.glob("rows-*/process-*")] == ["process-0"]
    assert_equal(session.read(sound), plain)
    assert_equal(session.read(session.open_session(sound)), plain)
    session.save(tmp_path / "x.kv", divided)
    assert_equal(session.read(tmp_path / "x.kv"), plain)
    assert session.read_manifest(tmp_path / "x.kv").groups[0].division is None
    # One process holds it all, so that it can be written in the background.
    session.start_save(tmp_path / "y.kvd", divided, "folder").result()
    assert_equal(session.read(tmp_path / "y.kvd"), plain)


def test_without_a_mesh_there_is_nothing_to_divide():
    runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=64, n_ubatch=64))
    assert divided_groups(runtime.snapshot(divided=True)) == ()


@pytest.mark.slow
def test_every_damaged_file_is_refused_or_reads_the_same(taken, sound):
    files = [p for p in sorted(sound.rglob("*")) if p.is_file() and p.stat().st_size]
    # The greatest file of each folder: index, cells, Orbax's manifests and arrays.
    greatest = {p.parent: p for p in sorted(files, key=lambda p: p.stat().st_size)}
    n_refused = 0
    for file in greatest.values():
        data = file.read_bytes()
        changed = bytearray(data)
        changed[len(data) // 2] ^= 16
        file.write_bytes(changed)
        try:
            assert_equal(session.read(sound), taken[1])
        except errors.BadSession as error:
            assert str(error).startswith(f"{sound}: ") and "\n" not in str(error)
            n_refused += 1
        finally:
            file.write_bytes(data)
    assert n_refused >= 3


@pytest.mark.slow
def test_a_save_that_fails_leaves_the_older_session(taken, sound, tmp_path, monkeypatch):
    def refuse(path, tree):
        path.mkdir()
        raise ValueError("no room [os_error_code='28']")

    path = tmp_path / "x.kvd"
    session.save(path, taken[0], "folder")
    with monkeypatch.context() as patch:
        patch.setattr(rows.write, "write_own_shards", refuse)
        with pytest.raises(errors.SaveError, match="no space left on device; nothing is half"):
            session.save(path, taken[0])
        with pytest.raises(errors.SaveError):
            session.save(tmp_path / "new.kvd", taken[0], "folder")
    assert not (tmp_path / "new.kvd").exists()
    assert len(list(path.iterdir())) == 2
    assert_equal(session.read(path), taken[1])

    # Stopped between the shards and the index: what was there is still the session.
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_replace_index", stop)
        with pytest.raises(KeyboardInterrupt):
            session.save(path, taken[0])
    assert_equal(session.read(path), taken[1])
    assert len(list(path.iterdir())) == 2


def test_rows_without_the_shards_of_a_process_are_refused(sound, tmp_path):
    with pytest.raises(errors.SaveError, match="process 3 does not see the folder"):
        rows.write_own(tmp_path / "rows", (), 3)
    own = next(sound.glob("rows-*/process-0"))
    own.rename(own.with_name("process-1"))
    with pytest.raises(errors.BadSession, match="keys and values cannot be read: "):
        session.read(sound)
    own.with_name("process-1").rename(own)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"cells": [200, 88]}, "writers is"),
        ({"cells": [290]}, "2 blocks for the 289 cells of group 0"),
        ({"cells": [100, 189], "writers": [0, 0]}, None),
        ({"cells": [1] * 289, "writers": [0] * 289}, "2 blocks for the 289 cells"),
        ({"n_heads": 0, "writers": []}, "n_heads is 0"),
        ({"n_heads": 4, "writers": [0] * 4}, "2 blocks for the 289 cells"),
        ({"n_heads": 3, "writers": [0] * 3}, "2 blocks for the 289 cells"),
        ({"cells": [], "writers": []}, r"cells is \[\]; a list of 1 to"),
        ({"cells": [289], "writers": [-1]}, r"writers\[0\] is -1"),
        ({"cells": "all"}, 'cells is "all"'),
        ({"cells": [289, 0], "writers": [0, 70000]}, r"writers\[1\] is 70000"),
    ],
)
def test_a_manifest_with_another_division_is_refused(sound, fields, told):
    said = json.loads(manifest.to_json(session.read_manifest(sound)))
    said["groups"][0]["division"] |= fields
    data = json.dumps(said).encode()
    if told is None:  # as many blocks, of other sizes
        told = "bytes for block 0 of group 0"
    with pytest.raises(errors.BadSession, match=told):
        expected.check_manifest(manifest.from_json(data))


def test_heads_that_the_parts_do_not_divide_are_refused(sound):
    found = session.read_manifest(sound)
    (group,) = found.groups
    parts_of = Division(cells=(289,), n_heads=3, writers=(0,) * 3)
    group = dataclasses.replace(group, division=parts_of, blocks=group.blocks[:1] * 6)
    with pytest.raises(errors.BadSession, match="3 parts of the kv heads of group 0"):
        expected.check_manifest(dataclasses.replace(found, groups=(group,)))
