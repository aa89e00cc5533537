"""What is left of a damaged session: what its digests prove, to the bit, and nothing else."""

import dataclasses
import os

import numpy as np
import pytest
from snapshots import assert_equal, snapshot

from kvrt import session
from kvrt.cli.main import main
from kvrt.errors import BadSession, SaveError
from kvrt.session.change import edit
from kvrt.session.change.repair import repaired
from kvrt.session.change.sequences import with_sequence
from kvrt.session.kv_file import frame

pytestmark = pytest.mark.usefixtures("numpy_device")


def plain(**kwargs):
    """A snapshot of which each beginning is one."""
    taken = snapshot(**kwargs)
    groups = tuple(dataclasses.replace(g, lost={}) for g in taken.groups)
    return dataclasses.replace(taken, groups=groups, ga_i={})


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.fixture
def path(tmp_path):
    """A session of 900 tokens in four blocks of each of two groups."""
    session.save(tmp_path / "a.kv", plain(n_cells=(900, 900)))
    return tmp_path / "a.kv"


@pytest.mark.parametrize(("group", "block"), [(0, 1), (0, 3), (1, 2)])
def test_the_tokens_before_a_damaged_block_are_kept(path, group, block):
    old, found = session.read(path), session.read_manifest(path)
    flip(path, found.groups[group].blocks[block].offset + 400)
    with pytest.raises(BadSession, match="kvrt repair keeps what is sound, kvrt run --overwrite"):
        session.read(path)
    left = repaired(path)
    assert left.n_tokens == {0: 900} and left.n_kept == {0: 256 * block}
    assert len(left.damage) == 1 and f"block {block} of group {group}" in left.damage[0]
    assert_equal(left.snapshot, edit.cut(old, 0, 256 * block))
    session.save(path.with_name("b.kv"), left.snapshot)
    assert_equal(session.read(path.with_name("b.kv")), left.snapshot)


def test_a_sequence_without_a_damaged_block_stays_whole(tmp_path):
    path, one = tmp_path / "a.kv", plain(n_cells=(300,))
    both = with_sequence(with_sequence(None, 0, one), 40, plain(n_cells=(600,), seed=1))
    session.save(path, both)
    # The 256 cells from 512 on are of sequence 40 alone.
    flip(path, session.read_manifest(path).groups[0].blocks[2].offset + 400)
    left = repaired(path)
    assert left.n_kept[0] == 300 and 0 < left.n_kept[40] < left.n_tokens[40] == 600
    kept = edit.cut(both, 40, left.n_kept[40])
    assert_equal(left.snapshot, kept)
    assert 0 in left.snapshot.logits and 0 in left.snapshot.draws
    assert 40 not in left.snapshot.logits and 40 not in left.snapshot.draws


def test_each_sequence_has_a_policy_of_its_own(path):
    old = session.read(path)
    assert old.policies == {} and b'"policies"' not in path.read_bytes()  # as before
    shift, sinks = {"name": "ContextShift", "n_keep": 3}, {"name": "AttentionSinks", "n_sink": 2}
    both = with_sequence(None, 0, dataclasses.replace(old, policies={0: shift}))
    both = with_sequence(both, 40, dataclasses.replace(old, policies={0: sinks}))
    session.save(path, both)
    assert session.read(path).policies == {0: shift, 40: sinks}
    assert edit.cut(both, 40, 0).policies == {0: shift}
    assert edit.cut(both, 40, 300).policies == {0: shift, 40: sinks}
    with pytest.raises(SaveError, match="said of sequence 7"):
        session.save(path, dataclasses.replace(both, policies={7: shift}))


def test_a_damaged_first_page_and_bytes_behind_the_end_lose_nothing(path):
    old = session.read(path)
    for at in frame.SLOTS:
        flip(path, at + 90)  # of the digest of a slot
    with path.open("ab") as file:
        file.write(b"something else")
    with pytest.raises(BadSession, match="first page"):
        session.read(path)
    left = repaired(path)
    assert left.n_kept == left.n_tokens == {0: 900} and "first page" in left.damage[0]
    assert_equal(left.snapshot, old)


@pytest.mark.parametrize("part", ["manifest", "cells"])
def test_nothing_is_left_without_the_manifest_or_the_cells(path, part):
    found = session.read_manifest(path)
    end = found.meta.offset + found.meta.n_bytes
    flip(path, end + 100 if part == "manifest" else end - 100)
    before = path.read_bytes()
    with pytest.raises(BadSession, match=r"nothing of the session is proven.*--overwrite"):
        repaired(path)
    assert main(["repair", str(path)]) == 1
    assert path.read_bytes() == before and sorted(os.listdir(path.parent)) == [
        ".a.kv.lock",
        "a.kv",
    ]


def test_no_flipped_bit_leaves_a_token_with_other_values(tmp_path):
    path, old = tmp_path / "a.kv", plain(n_cells=(300,))
    session.save(path, old)
    kept = path.read_bytes()
    for at in np.random.default_rng(0).integers(0, len(kept), 20).tolist():
        path.write_bytes(kept)
        flip(path, at)
        try:
            left = repaired(path)
        except BadSession:
            continue
        n = left.n_kept[0]
        assert n in (0, 256, 300)
        assert_equal(left.snapshot, old if n == 300 else edit.cut(old, 0, n))


def test_repair_keeps_the_damaged_session_and_says_what_is_lost(path, capfd):
    flip(path, session.read_manifest(path).groups[1].blocks[2].offset + 400)
    damaged = path.read_bytes()
    (path.parent / "a.kv~").write_text("mine")
    assert main(["trim", str(path)]) == 1
    told = capfd.readouterr().err
    assert "kvrt repair keeps what is sound, kvrt run --overwrite replaces it" in told
    assert main(["repair", str(path), "-o", str(path.with_name("new.kv"))]) == 0
    assert path.read_bytes() == damaged
    assert main(["repair", str(path)]) == 0
    told = capfd.readouterr().err
    assert "512 of 900 tokens kept; damaged: block 2 of group 1 (cells 512 to 767)" in told
    assert f"the damaged session is kept as {path}~2" in told
    assert path.with_name("a.kv~2").read_bytes() == damaged
    assert_equal(session.read(path), session.read(path.with_name("new.kv")))
    assert main(["repair", str(path)]) == 0
    assert "sound, there is nothing to repair" in capfd.readouterr().err


def test_repair_does_not_replace_what_was_saved_meanwhile(path, capfd, monkeypatch):
    from kvrt.cli.session import copies

    def saved_meanwhile(at):
        left = repaired(at)
        session.save(at, plain(n_cells=(40,), seed=3))
        return left

    flip(path, session.read_manifest(path).groups[0].blocks[2].offset + 400)
    monkeypatch.setattr(copies, "repaired", saved_meanwhile)
    assert main(["repair", str(path)]) == 1
    assert "another process has changed it meanwhile" in capfd.readouterr().err
    assert_equal(session.read(path), plain(n_cells=(40,), seed=3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "container"),
    [
        *[(part, "file") for part in ("states", "window", "checkpoint", "both")],
        *[(part, "folder") for part in ("window", "both")],
    ],
)
def test_layers_that_cannot_go_back_end_at_a_sound_checkpoint(tmp_path, part, container):
    from test_checkpoint_parts import MODELS, OTHER, TEXT, runtime

    model, path = MODELS["recurrent, window"](), tmp_path / "x"
    at, other, fresh = (runtime(model) for _ in range(3))
    at.append(TEXT)
    session.save(path, at.snapshot(), container)
    found = session.read_manifest(path)
    places = {"window": [0], "states": [states := found.blobs.index(found.states)]}
    places |= {"checkpoint": [newest := len(found.blobs) - 2], "both": [states, newest]}
    for i in places[part]:
        if container == "file":
            flip(path, found.blobs[i].offset + found.blobs[i].n_bytes // 2)
        elif part == "window":
            data = max(path.rglob("d/*"), key=lambda p: p.stat().st_size)
            flip(data, data.stat().st_size // 2)
        else:
            flip(next(path.rglob(f"part-{i}")), found.blobs[i].n_bytes // 2)
    left = repaired(path)
    n, there = left.n_kept[0], [x.pos for x in left.snapshot.checkpoints]
    assert n == (140 if part == "both" else 150)
    lost = {150} if part in ("checkpoint", "both") else set()
    assert there == [p for p in at.checkpoints() if p not in lost]
    session.save(tmp_path / "y", left.snapshot)
    other.restore(session.read(tmp_path / "y"))
    fresh.append(TEXT[:n])
    np.testing.assert_allclose(other.append(OTHER), fresh.append(OTHER), atol=1e-5)
