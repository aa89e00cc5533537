"""What a save may replace, and where the former session stays."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from snapshots import snapshot

from kvrt import session
from kvrt.cellcache.history import TokenHistory
from kvrt.errors import BadSession, SaveError
from kvrt.files import atomic
from kvrt.session.change import replace
from kvrt.session.change.replace import Change

KEEPS, EDITS, LOSES = Change
A = list(range(1000, 2200))


@pytest.mark.parametrize(
    ("n_held", "n_lost", "found"),
    [
        (0, 0, KEEPS),
        (1242, 0, KEEPS),
        (1242, 1, EDITS),
        (64, 64, EDITS),  # all of a short one
        (65, 65, LOSES),
        (1242, 64, EDITS),
        (1242, 124, EDITS),  # not more than a tenth
        (1242, 125, LOSES),
        (1240, 124, EDITS),
        (1240, 125, LOSES),
        (649, 65, LOSES),
        (650, 65, EDITS),
        (1242, 1241, LOSES),
    ],
)
def test_what_a_loss_is(n_held, n_lost, found):
    assert replace.judge(n_held, n_lost) is found


@pytest.mark.parametrize(
    ("held", "new", "n"),
    [
        ([], A[:5], 0),
        (A, A, 0),
        (A, [*A, 1, 2], 0),
        (A, A[:1100], 100),
        (A, [7], 1200),
        (A, [*A[:1150], 1, 2, 3], 50),  # another question
        (A, [*A[:500], *range(40), *A[500:]], 0),  # an insertion
        (A, [*A[:500], 5, *A[501:]], 1),  # a word in the middle
        (A, [*A[:500], *A[600:]], 100),
        (A, [*A[600:], *A[:500]], 600),  # order counts
        (A, [*A[:10], *A[600:630]], 1190),  # a coincidence of 30 is none
        ([*A[:4], *A[700:]], A, 0),  # what an earlier context shift left
    ],
)
def test_what_is_lost(held, new, n):
    assert replace.n_lost(held, new) == n


def taken(ids):
    """A snapshot with these tokens."""
    n = len(ids)
    text = TokenHistory(pieces={0: (np.array([range(n), ids, range(n)], np.int32),)}, n_marks=n)
    held = snapshot(n_cells=(n,))
    model = {**held.fingerprint["model"], "n_vocab": 10_000}
    fingerprint = {**held.fingerprint, "model": model}
    return dataclasses.replace(held, history=text, logits={}, fingerprint=fingerprint)


def saved(path, ids, container="file"):
    session.save(path, taken(ids), container)
    return path


def ids_of(path):
    return replace.read_held(path).ids.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("container", ["file", "folder"])
def test_the_former_session_is_kept_whatever_is_saved_next(tmp_path, container):
    path = saved(tmp_path / "a.kv", range(600), container)
    kept = replace.keep_former(path)
    assert kept.name == "a.kv~" and ids_of(kept) == ids_of(path) == list(range(600))
    # Longer: a file would grow in its place, and its other name with it.
    done = session.save(path, taken(range(605)))
    assert done.n_written == done.n_bytes
    assert len(ids_of(path)) == 605 and session.read(kept).history.pieces[0][0].shape[1] == 600
    # A small change may have the name.
    assert replace.keep_former(path) == kept and len(ids_of(kept)) == 605
    session.save(path, taken(range(9)))
    session.save(path, taken(range(30)))
    assert len(ids_of(kept)) == 605
    assert {p.name for p in tmp_path.iterdir() if p.suffix != ".lock"} == {"a.kv", "a.kv~"}


def test_a_backup_that_holds_much_more_stays(tmp_path):
    path = saved(tmp_path / "a.kv", range(200))
    assert replace.keep_former(path).name == "a.kv~"
    session.save(path, taken([5]))
    assert replace.keep_former(path).name == "a.kv~2"
    assert (len(ids_of(tmp_path / "a.kv~")), ids_of(tmp_path / "a.kv~2")) == (200, [5])


@pytest.mark.parametrize("kind", ["note", "link", "folder", "damaged"])
def test_a_name_that_is_no_backup_stays(tmp_path, kind):
    path, other = saved(tmp_path / "a.kv", range(9)), tmp_path / "a.kv~"
    if kind == "note":
        other.write_text("mine")
    elif kind == "link":
        other.symlink_to(path)
    elif kind == "folder":
        other.mkdir()
    else:
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        other.write_bytes(data)
    before = os.lstat(other)
    assert replace.keep_former(path).name == "a.kv~2"
    assert os.lstat(other) == before


def test_without_second_names_a_copy_is_kept(tmp_path, monkeypatch):
    def refused(*names):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    path = saved(tmp_path / "a.kv", range(9))
    kept = replace.keep_former(path)
    assert kept.read_bytes() == path.read_bytes() and kept.stat().st_mode == path.stat().st_mode


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_a_backup_left_that_failed_stops_no_other(tmp_path, monkeypatch, kind):
    path = saved(tmp_path / "a.kv", range(9))

    def stopped(*_, **__):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stopped)
        patch.setattr(Path, "unlink", stopped)  # the disk is gone for it as well
        with pytest.raises(OSError, match="Input/output error"):
            replace.keep_former(path)
    left = atomic.temporary(tmp_path / "a.kv~")
    assert left.samefile(path)
    if kind == "folder":  # of a backup of a folder session
        left.unlink()
        left.mkdir()
        (left / "part-0").write_bytes(b"x")
    atomic.check_writable(path)
    assert replace.keep_former(path).name == "a.kv~"
    assert not left.exists() and ids_of(tmp_path / "a.kv~") == list(range(9))


def test_a_probe_of_a_folder_is_not_stopped_by_what_another_left(tmp_path):
    path = tmp_path / "a.kv"
    atomic.temporary(path).write_bytes(b"of a killed process with this number")
    atomic.check_writable(path)
    assert [p.name for p in tmp_path.iterdir()] == [atomic.temporary(path).name]


def test_what_is_no_session_is_not_kept(tmp_path):
    path = tmp_path / "a.kv"
    path.write_text("notes")
    with pytest.raises(BadSession):
        replace.keep_former(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.kv"]


def test_a_free_name(tmp_path):
    path = tmp_path / "a.kv"
    (tmp_path / "a-2.kv").symlink_to("nowhere")
    assert replace.free_name(path).name == "a-3.kv"
    replace.refuse_existing(path)
    with pytest.raises(SaveError, match="is there already"):
        replace.refuse_existing(tmp_path / "a-2.kv")


def test_before_is_asked_under_the_lock_and_may_refuse(tmp_path):
    for container in ("file", "folder"):
        path = saved(tmp_path / container, range(9), container)
        seen = []

        def before(at, seen=seen):
            seen.append(at)
            raise SaveError("no")

        with pytest.raises(SaveError, match="no"):
            session.save(path, taken(range(8)), container, before=before)
        assert seen == [path] and ids_of(path) == list(range(9))
