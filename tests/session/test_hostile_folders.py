"""Sessions in folders that were made on purpose: refused in one line, whatever they unpack to."""

import hashlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorstore as ts
from snapshots import assert_equal, snapshot

from kvrt import session
from kvrt.session.orbax import folder

CHILD = """
import resource, sys
from kvrt import errors, session
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
for path in sys.argv[1:]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        session.read(path)
        print("read")
    except errors.BadSession as error:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "x.kvd"
    taken = snapshot(n_cells=(300, 7), states=True)
    session.save(path, taken, "folder")
    return path, taken


def rows(path):
    return next(path.glob("rows-*"))


def arrays(path):
    base = {"driver": "file", "path": f"{rows(path)}/"}
    return ts.KvStore.open({"driver": "ocdbt", "base": base}).result()


def in_metadata(**fields):
    def change(path):
        store = arrays(path)
        said = json.loads(store.read("0.k/.zarray").result().value)
        store.write("0.k/.zarray", json.dumps(said | fields).encode()).result()

    return change


def bomb(path):
    """Rows whose 50 KB unpack to 13 GB: a compressed part of zeros, two hundred times over."""
    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}}
    spec["metadata"] = {"compressor": {"id": "zstd", "level": 1}}
    zeros = ts.open(
        spec,
        create=True,
        dtype=ts.uint8,
        shape=[1 << 26],
        chunk_layout=ts.ChunkLayout(chunk_shape=[1 << 26]),
    ).result()
    zeros.write(np.ones(1 << 26, np.uint8)).result()
    arrays(path).write("0.k/0.0.0.0", zeros.kvstore.read("0").result().value * 200).result()


def said(path, change):
    """Changes the manifest of a folder, with a digest that holds."""
    head, _, body = (path / folder.FOLDER_INDEX).read_bytes().partition(b"\n")
    values = json.loads(body)
    change(values)
    body = json.dumps(values).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    (path / folder.FOLDER_INDEX).write_bytes(head[: -len(digest)] + digest + b"\n" + body)


def wide_heads(values):
    """Everything of the manifest agrees; the checkpoint alone holds less."""
    group = values["groups"][0]
    values["fingerprint"]["groups"][0]["n_kv_heads"] = 2 << 20
    for i, block in enumerate(group["blocks"]):
        n = min(256, group["n_used"] - 256 * i)
        block["n_bytes"] = 2 * 2 * n * (2 << 20) * 4 * 4


HOSTILE = {
    "huge shape": in_metadata(shape=[2, 2**40, 2, 4]),
    "huge chunks": in_metadata(chunks=[2, 2**40, 2, 4]),
    "huge shape and chunks": in_metadata(shape=[2**20] * 4, chunks=[2**20] * 4),
    "empty chunks": in_metadata(chunks=[2, 0, 2, 4]),
    "no chunks": in_metadata(chunks=None),
    "another dtype": in_metadata(dtype="<f8"),
    "a dtype of fields": in_metadata(dtype=[["a", "<f4"], ["b", "<f4", [2**30]]]),
    "a filter": in_metadata(filters=[{"id": "delta"}]),
    "another codec": in_metadata(compressor={"id": "blosc", "cname": "lz4"}),
    "the other order": in_metadata(order="F"),
    "long metadata": in_metadata(attributes="x" * (1 << 20)),
    "no metadata": lambda path: arrays(path).write("0.k/.zarray", None).result(),
    "a bomb": bomb,
    "wide heads": lambda path: said(path, wide_heads),
    "many tokens": lambda path: said(path, lambda x: x["n_tokens"].update({"0": 2**31 - 1})),
    "many cells": lambda path: said(path, lambda x: x["groups"][0].update(n_used=2**20)),
    "a link": lambda path: (rows(path) / "d" / "x").symlink_to("/dev/zero"),
    "a pipe": lambda path: os.mkfifo(rows(path) / "d" / "x"),
    "no tree": lambda path: (rows(path) / "manifest.ocdbt").write_bytes(b"x" * 100),
    "nothing": lambda path: shutil.rmtree(rows(path)),
    "a short part": lambda path: os.truncate(max(rows(path).glob("part-*")), 100),
}
SAID = {
    "huge chunks": "array 0.k has chunks [2, 1099511627776, 2, 4], [2, 256, 2, 4] at most",
    "huge shape": "array 0.k has shape [2, 1099511627776, 2, 4], [2, 256, 2, 4] is wanted",
    "a bomb": "keys and values cannot be read",
    "wide heads": "64 times as many at most",
    "a pipe": "is no plain file",
}
FEW = ["huge chunks", "a bomb", "wide heads", "many tokens", "a pipe", "a short part"]


@pytest.mark.parametrize("names", [FEW, pytest.param(list(HOSTILE), marks=pytest.mark.slow)])
def test_hostile_folders_are_refused_by_a_process_that_lives(sound, tmp_path, names):
    """All of them in one process under a limit: none ends it, and none takes memory in it."""
    paths = {}
    for name in names:
        change = HOSTILE[name]
        paths[name] = tmp_path / f"{name.replace(' ', '-')}.kvd"
        shutil.copytree(sound[0], paths[name])
        change(paths[name])
    command = [sys.executable, "-c", CHILD, *paths.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and not done.stderr.count("Traceback"), done.stderr
    assert len(lines) == len(paths)
    for (name, path), line in zip(paths.items(), lines, strict=True):
        n_kb, _, text = line.partition(" ")
        assert text.startswith(f"{path}: "), (name, line)
        assert int(n_kb) < 64 << 10, (name, line)
        assert SAID.get(name, "damaged") in line, (name, line)


@pytest.mark.slow
def test_hostile_folders_are_repaired_within_memory(sound, tmp_path):
    """What a manifest claims and no file holds takes no memory."""
    code = CHILD.replace("session.read(path)", "repaired(path)").replace(
        "import errors, session", "import errors; from kvrt.session.change.repair import repaired"
    )
    paths = [tmp_path / name.replace(" ", "-") for name in ("wide heads", "many cells", "a bomb")]
    for path in paths:
        shutil.copytree(sound[0], path)
        HOSTILE[path.name.replace("-", " ")](path)
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=240
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 3, done.stderr
    assert "64 times as many at most" in lines[0] and lines[2] == "read"


@pytest.mark.slow
def test_a_folder_that_was_refused_can_be_written_again(sound, tmp_path):
    path = tmp_path / "x.kvd"
    shutil.copytree(sound[0], path)
    in_metadata(shape=[2, 2**40, 2, 4])(path)
    session.save(path, sound[1])
    assert_equal(session.read(path), sound[1])
