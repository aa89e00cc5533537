"""The `.kv` file: it holds what was saved, and whatever is done to it, it never says otherwise."""

import dataclasses
import os
import stat
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from fuzz_session import mutated
from hypothesis import HealthCheck, given, settings
from snapshots import assert_equal, snapshot

from kvrt import errors, session
from kvrt.session.kv_file import frame

pytestmark = pytest.mark.usefixtures("numpy_device")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A small session with everything in it: bytes, and what they hold."""
    path = tmp_path_factory.mktemp("sound") / "x.kv"
    taken = snapshot(n_cells=(300, 7), states=True, seed=1)
    session.save(path, taken)
    return path.read_bytes(), taken


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    n_cells=st.lists(st.sampled_from([0, 1, 255, 256, 257, 600]), max_size=3),
    dtype=st.sampled_from(["float32", "float16", "uint16"]),
    states=st.booleans(),
    seed=st.integers(0, 9),
)
def test_what_is_read_is_what_was_saved(tmp_path_factory, n_cells, dtype, states, seed):
    path = tmp_path_factory.mktemp("kv") / "x.kv"
    taken = snapshot(n_cells=n_cells, dtype=dtype, states=states, seed=seed)
    done = session.save(path, taken)
    assert done.n_bytes == done.n_written == path.stat().st_size
    assert_equal(session.read(path), taken)
    assert session.read_manifest(path).n_tokens == {
        s: sum(p.shape[1] for p in pieces) for s, pieces in taken.history.pieces.items()
    }


def test_only_the_owner_can_read_it(tmp_path):
    session.save(tmp_path / "x.kv", snapshot())
    assert stat.S_IMODE((tmp_path / "x.kv").stat().st_mode) == 0o600


def test_bytes_are_those_of_the_arithmetic(tmp_path):
    """Rows of used cells, 16 bytes and a mask word a cell, and 12 bytes a token: within 2 %."""
    taken = snapshot(n_cells=(2000,), layers=8, dtype="float16")
    done = session.save(tmp_path / "x.kv", taken)
    rows = 2 * 8 * 2 * 4 * 2  # K and V, layers, heads, channels, bytes
    assert done.n_bytes == pytest.approx(2000 * (rows + 8 + 4 + 12), rel=0.02)


# --- a longer session ----------------------------------------------------------------------------


def test_a_longer_session_appends(tmp_path):
    path = tmp_path / "x.kv"
    short, long = (snapshot(n_cells=(n,), layers=4) for n in (1024, 1200))
    first, then = session.save(path, short), session.save(path, long)
    assert then.n_written < 0.4 * first.n_written
    assert_equal(session.read(path), long)
    again = session.save(path, long)
    assert again.n_written < 0.05 * first.n_written
    assert_equal(session.read(path), long)


def test_other_content_is_written_anew(tmp_path):
    path = tmp_path / "x.kv"
    for seed in range(5):
        taken = snapshot(n_cells=(700,), seed=seed)
        done = session.save(path, taken)
        assert done.n_bytes == done.n_written == path.stat().st_size
        assert_equal(session.read(path), taken)


def test_many_appends_do_not_let_the_file_grow_for_ever(tmp_path):
    path = tmp_path / "x.kv"
    for n in range(600, 760, 8):
        done = session.save(path, snapshot(n_cells=(n,)))
    fresh = session.save(tmp_path / "y.kv", snapshot(n_cells=(752,)))
    assert done.n_bytes < 2.5 * fresh.n_bytes


def test_blocks_that_were_damaged_on_disk_are_not_kept(tmp_path):
    path = tmp_path / "x.kv"
    session.save(path, snapshot(n_cells=(1024,)))
    data = bytearray(path.read_bytes())
    data[frame.PAGE + 999] ^= 4
    path.write_bytes(data)
    long = snapshot(n_cells=(1200,))
    session.save(path, long)
    assert_equal(session.read(path), long)


def test_a_file_that_is_no_session_stays_as_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("dear diary")
    with pytest.raises(errors.SaveError, match="is no session and stays as it is"):
        session.save(tmp_path / "notes.txt", snapshot())
    assert (tmp_path / "notes.txt").read_text() == "dear diary"


def test_a_session_that_a_reader_would_refuse_replaces_none(tmp_path):
    """Written anew, and behind an older session of the same beginning."""
    path, short = tmp_path / "x.kv", snapshot(n_cells=(1024,))
    session.save(path, short)
    data = path.read_bytes()
    for n in (1200, 40):
        wrong = snapshot(n_cells=(n,), seed=n == 40)
        wrong = dataclasses.replace(wrong, history=dataclasses.replace(wrong.history, n_marks=5))
        with pytest.raises(errors.SaveError, match=r"x\.kv: what .* cannot be read again: .* mark"):
            session.save(path, wrong)
        assert path.read_bytes() == data
    assert {x.name for x in tmp_path.iterdir()} - {".x.kv.lock"} == {"x.kv"}


def test_more_than_2_to_the_31_sampled_tokens_are_saved(tmp_path):
    taken = snapshot()
    draws = {0: dataclasses.replace(taken.draws[0], n_drawn=2**40)}
    session.save(tmp_path / "x.kv", dataclasses.replace(taken, draws=draws))
    assert session.read(tmp_path / "x.kv").draws == draws


# --- damage --------------------------------------------------------------------------------------


def refused_or_equal(path, data, taken):
    """Whether it was refused; reading takes little work either way.

    A second's at most, or five where Python collected what thousands of tests have left.
    """
    path.write_bytes(data)
    start = time.thread_time()  # not the wall's: other tests may hold the cores and the disk
    try:
        found = session.read(path)
    except errors.BadSession as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        found = None
    assert time.thread_time() - start < 5
    if found is None:
        return True
    assert_equal(found, taken)
    return False


def fuzz(sound, path, max_examples):
    data, taken = sound
    refused = []

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 3))
    def run(seed, n):
        rng, changed = np.random.default_rng(seed), data
        for _ in range(n):
            changed = mutated(changed, rng)
        refused.append(refused_or_equal(path, changed, taken))

    run()
    return refused


@pytest.mark.slow
def test_mutated_files_are_refused_or_the_same(sound, tmp_path):
    refused = fuzz(sound, tmp_path / "x.kv", 300)
    assert sum(refused) > 0.5 * len(refused)


@pytest.mark.slow
def test_many_mutated_files(sound, tmp_path, budget):
    n = budget(600, 2000)
    refused = fuzz(sound, tmp_path / "x.kv", n)
    assert len(refused) >= n and sum(refused) > 0.5 * len(refused)


def test_every_length_but_its_own_is_refused(sound, tmp_path):
    data, taken = sound
    rng = np.random.default_rng(0)
    cuts = {0, 1, 511, 4095, 4096, len(data) - 1, *rng.integers(0, len(data), 60).tolist()}
    for n in cuts:
        assert refused_or_equal(tmp_path / "x.kv", data[:n], taken), n
    for n in (1, 100, 5000):
        assert refused_or_equal(tmp_path / "x.kv", data + bytes(n), taken), n


def test_a_flipped_bit_in_rows_is_told_by_its_block(sound, tmp_path):
    data, _ = sound
    path = tmp_path / "x.kv"
    changed = bytearray(data)
    changed[frame.PAGE + 500] ^= 8
    path.write_bytes(changed)
    with pytest.raises(errors.BadSession, match=r"block 0 of group 0 \(cells 0 to 255\)"):
        session.read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"", "has 0 bytes, a session at least 4096"),
        (lambda d: b"GGUF" * 2000, "it is no session of kvrt's"),
        (lambda d: d[:-1], "it is truncated"),
        (lambda d: d + b"x", "1 bytes behind its end"),
        (lambda d: frame.page(newer(d)) + d[frame.PAGE :], "the manifest at .* lies outside"),
    ],
)
def test_what_is_wrong_is_said(sound, tmp_path, change, message):
    path = tmp_path / "x.kv"
    path.write_bytes(change(sound[0]))
    with pytest.raises(errors.BadSession, match=message):
        session.read(path)


def newer(data):
    found = frame.newest_frame(data[: frame.PAGE], len(data))
    return frame.Frame(
        generation=2,
        offset=2**62,
        n_bytes=2**62,
        sha256=found.sha256,
        end=len(data),
        limit=len(data),
    )


@pytest.mark.parametrize("newest", [0, 1])
def test_the_newer_of_two_slots_is_read(newest):
    old = frame.of_manifest(b"old", frame.PAGE, generation=1)
    new = frame.of_manifest(b"newer", old.end, generation=2)
    page = bytearray(frame.page(old))
    slot = frame.slot(new)
    page[frame.SLOTS[newest] : frame.SLOTS[newest] + len(slot)] = slot
    assert frame.newest_frame(bytes(page), new.end) == new


def test_a_newer_format_is_refused_by_its_number(sound, tmp_path, monkeypatch):
    path = tmp_path / "x.kv"
    path.write_bytes(sound[0])
    monkeypatch.setattr(frame, "VERSION", 0)
    with pytest.raises(errors.BadSession, match="format version 1, 0 is known; update kvrt"):
        session.read(path)


@pytest.mark.parametrize("kind", ["folder", "missing"])
def test_what_is_no_file_is_refused(tmp_path, kind):
    path = tmp_path / "x.kv"
    if kind == "folder":
        path.mkdir()
    with pytest.raises(errors.BadSession, match="cannot be read"):
        session.read(path)


def test_a_reader_keeps_its_session_while_another_is_written(tmp_path):
    path = tmp_path / "x.kv"
    old = snapshot(n_cells=(600,))
    session.save(path, old)
    fd = os.open(path, os.O_RDONLY)
    session.save(path, snapshot(n_cells=(600,), seed=5))
    assert os.fstat(fd).st_nlink == 0
    os.close(fd)
