"""Files that kvrt wrote before its fingerprints had all fields are read, and mean what they did."""

import functools
import json
import os
import shutil
from pathlib import Path

import pytest
from samples import LONG, PLAIN, SAMPLES, foreign, next_tokens, said, serve

from kvrt import session

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


@pytest.fixture
def older_library(tmp_path):
    """The folder of sessions, whose files are as old as their index says."""
    folder = shutil.copytree(BEFORE / "library", tmp_path / "library")
    for name, mtime_ns in expected()["library"].items():
        os.utime(folder / name, ns=(mtime_ns, mtime_ns))
    return folder
