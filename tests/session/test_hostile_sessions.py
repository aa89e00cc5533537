"""Sessions that were made on purpose, with digests that hold: refused before memory is taken."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from forged_sessions import MUTANTS, joined, named_often, parted
from fuzz_session import digests, sound_session
from snapshots import assert_equal, snapshot

from kvrt import errors, session
from kvrt.cellcache import insert
from kvrt.cellcache.history import TokenHistory
from kvrt.cli.flags.evaluate import RunOptions
from kvrt.cli.session.open_session import follow_sampling
from kvrt.config import GroupSpec, QueryTemperature, RopeSpec
from kvrt.session import OpenedSession, SamplingState, codec, described, manifest, owners
from kvrt.session.change import edit
from kvrt.session.fingerprint import completed
from kvrt.session.manifest import Blob, GroupEntry, Manifest

pytestmark = pytest.mark.usefixtures("numpy_device")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A session of a small model: its bytes and its digests."""
    path = tmp_path_factory.mktemp("sound") / "x.kv"
    taken = sound_session()
    session.save(path, taken)
    return path.read_bytes(), digests(taken)


def changed(data, change, seed=0):
    found = parted(data)
    change(found, np.random.default_rng(seed))
    return joined(found)


def with_group(taken, **fields):
    part = dataclasses.replace(taken.groups[0], **fields)
    return dataclasses.replace(taken, groups=(part,))


@pytest.mark.slow
def test_what_is_taken_apart_and_joined_reads_the_same(sound, tmp_path):
    data, expected = sound
    path = tmp_path / "x.kv"
    path.write_bytes(joined(parted(data)))
    assert digests(session.read(path)) == expected


@pytest.mark.parametrize("name", MUTANTS)
def test_each_contradiction_is_refused_in_one_line(sound, tmp_path, name):
    path = tmp_path / "x.kv"
    path.write_bytes(changed(sound[0], MUTANTS[name]))
    start = time.thread_time()
    with pytest.raises(errors.BadSession) as caught:
        session.read(path)
    assert time.thread_time() - start < 5  # with what Python collects in between
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text and len(text) < 600


CHILD = """
import resource, sys
from kvrt import errors, session
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
try:
    session.read(sys.argv[1])
except errors.BadSession as error:
    print("refused:", error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_small_file_takes_little_memory(tmp_path):
    """10 MB that name 2.1 GB of rows, read by a process with a limit."""
    path = tmp_path / "x.kv"
    session.save(path, snapshot(n_cells=(256,), layers=512))
    data = changed(path.read_bytes(), lambda found, rng: named_often(found, 256, rng))
    assert len(data) < 11 << 20
    path.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("refused: "), done.stderr
    assert int(done.stdout.split()[-1]) < 64 << 10  # KB


def test_blobs_that_are_alike_have_places_of_their_own(tmp_path):
    """A longer session whose new block is like an old one must not name it twice."""
    path = tmp_path / "x.kv"

    def alike(n):
        taken = snapshot(n_cells=(n,))
        for block in taken.groups[0].blocks:
            block.k[:], block.v[:] = 1, 2
        return taken

    session.save(path, alike(512))
    session.save(path, alike(768))
    found = session.read_manifest(path).groups[0].blocks
    assert len({b.offset for b in found}) == 3 and len({b.digest for b in found}) == 1
    assert_equal(session.read(path), alike(768))


def big_manifest():
    """Of 128k tokens, 64 layers in two groups, 4,096 sequences that were drawn and have rolled."""
    n, seqs, zero = 1 << 17, range(4096), "0" * 32
    blocks = tuple(Blob(offset=10**11 + i, n_bytes=10**8, digest=zero) for i in range(n // 256))
    rope = {"n_rot": 128, "freq_factors": [1.234567890123] * 64}
    layers = {"layers": list(range(32)), "n_kv_heads": 8, "head_dim": 128, "rope": rope}
    sampling = dict(
        temp=0.123456789, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.1, seed=2**32 - 1
    )
    gone = {s: ((1000, 123456),) for s in seqs}
    return Manifest(
        version="0.1.0",
        fingerprint=completed(
            {"model": {"n_vocab": 152_064, "weights": zero * 2}, "groups": [layers] * 2}
        ),
        groups=tuple(
            GroupEntry(n_cells=n, head=0, n_used=n, lost=lost, blocks=blocks) for lost in ({}, gone)
        ),
        held=None,
        states=None,
        n_marks=n,
        n_tokens=dict.fromkeys(seqs, 131072),
        exact=dict.fromkeys(seqs, 131072),
        ga_i=dict.fromkeys(seqs, 131072),
        logits=dict.fromkeys(seqs, 131071),
        draws=dict.fromkeys(seqs, SamplingState(token=151_000, n_drawn=99_999, sampling=sampling)),
        policy={"name": "ContextShift", "n_keep": 4},
        meta=blocks[0],
    )


@pytest.mark.slow
def test_the_greatest_manifest_fits():
    data = manifest.to_json(big_manifest())
    assert 1_000_000 < len(data) < manifest.MAX_BYTES / 4
    assert manifest.from_json(data).draws[4095].n_drawn == 99_999


@pytest.mark.slow
def test_four_thousand_sequences_come_back(tmp_path):
    path, n = tmp_path / "x.kv", 4096
    number = np.arange(n)
    seqs = np.zeros((n, 128), np.uint32)
    seqs[number, number // 32] = np.uint32(1) << (number % 32).astype(np.uint32)
    pieces = {s: (np.array([[7], [s % 90], [s]], np.int32),) for s in range(n)}
    taken = with_group(snapshot(n_cells=(n,)), pos=np.full(n, 7, np.int32), seqs=seqs)
    taken = dataclasses.replace(
        taken,
        history=TokenHistory(pieces=pieces, n_marks=n),
        logits={s: (7, np.full(90, s, np.float32)) for s in range(n)},
        ga_i={},
    )
    session.save(path, taken)
    found = session.read(path)
    assert found.seq_ids == tuple(range(n)) and found.logits[4095][1][0] == 4095
    np.testing.assert_array_equal(found.groups[0].seqs, seqs)


def test_a_manifest_that_nobody_could_read_is_not_written(tmp_path):
    path = tmp_path / "x.kv"
    taken = snapshot()
    session.save(path, taken)
    before = path.read_bytes()
    long = {s: SamplingState(token=1, n_drawn=1, sampling={"x" * 2000: 1.0}) for s in range(4096)}
    with pytest.raises(errors.SaveError, match="at most can be read; save fewer"):
        session.save(path, dataclasses.replace(taken, draws=long))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "number", ["1e999", "-1e999", "NaN", "Infinity", "1" * 400, "[" * 30 + "]" * 30, '"x"']
)
def test_numbers_that_are_none(number):
    small = dataclasses.replace(big_manifest(), draws={}, groups=())
    data = manifest.to_json(small)
    data = data.replace(b'"n_rot":128', b'"n_rot":128,"base":' + number.encode())
    with pytest.raises(errors.BadSession) as caught:
        described.check_fingerprint(manifest.from_json(data).fingerprint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: RopeSpec(n_rot=2, base=x),
        lambda x: RopeSpec(n_rot=2, factor=x),
        lambda x: RopeSpec(n_rot=2, freq_factors=(x,)),
        lambda x: GroupSpec(layers=(0,), n_kv_heads=1, head_dim=2, rope=None, scale=x),
        lambda x: QueryTemperature(floor_scale=1.0, attn_scale=x),
    ],
)
@pytest.mark.parametrize("x", [float("inf"), float("nan")])
def test_configurations_have_finite_numbers(make, x):
    with pytest.raises(errors.BadConfig):
        make(x)


@pytest.mark.parametrize(
    "group", [{"rope": {"n_rot": 2, "layout": "odd"}}, {"mask": {"kind": "odd", "size": 3}}]
)
def test_unknown_names_are_refused(group):
    said = {"layers": [0], "n_kv_heads": 1, "head_dim": 2, **group}
    with pytest.raises(errors.BadSession, match="does not tell the groups"):
        described.check_fingerprint({"groups": [said]})


def test_marks_beyond_int32_are_numbered_anew():
    """A history as long as int32 counts, restored behind tokens that are there."""
    top = 2**31 - 2
    held = TokenHistory(pieces={0: (np.array([[0], [5], [0]], np.int32),)}, n_marks=1)
    entries = np.array([[0, 1], [3, 4], [7, top]], np.int32)
    source = TokenHistory(pieces={0: (entries,), 1: (entries[:, :1],)}, n_marks=2**31 - 1)
    found = insert.into_history(held, source, {0: 1, 1: 2})
    assert found.n_marks == 3
    assert [x[0].tolist() for x in found.pieces.values()] == [
        [[0], [5], [0]],
        [[0, 1], [3, 4], [1, 2]],
        [[0], [3], [1]],
    ]


def test_cells_that_nobody_uses_take_no_memory():
    """A file may say 2^31 - 1 cells; cutting it makes arrays of those in use."""
    taken = sound_session()
    cut = edit.cut(with_group(taken, n_cells=2**31 - 1, head=2**31 - 1), 0, 280).groups[0]
    same = edit.cut(taken, 0, 280).groups[0]
    assert (cut.head, same.head, cut.n_cells) == (280, 280, 2**31 - 1)
    np.testing.assert_array_equal(cut.index, same.index)
    # What follows the head leaves it where it is.
    assert edit.cut(with_group(taken, head=5), 0, 280).groups[0].head == 5


def test_the_cells_alone_are_checked_as_the_whole(sound, tmp_path):
    path = tmp_path / "x.kv"
    path.write_bytes(changed(sound[0], MUTANTS["another owner"]))
    found, meta = session.read_cells(path)
    with pytest.raises(errors.BadSession, match="belongs to sequence 1, which has no token"):
        codec.cells(found, meta)


@pytest.mark.parametrize("sampling", [{"temp": -5.0}, {"top_k": 0.5}, {"seed": 2**40}])
def test_settings_of_sampling_that_none_has(sampling):
    said = dataclasses.replace(
        big_manifest(), draws={0: SamplingState(token=1, n_drawn=1, sampling=sampling)}
    )
    found = OpenedSession(
        path=Path("x.kv"), manifest=said, sha256=b"", meta={}, groups=(), history=TokenHistory()
    )
    with pytest.raises(errors.BadSession, match=r"^x\.kv: its settings of sampling: "):
        follow_sampling(RunOptions(), found)
    # What is not of sampling is nobody's business.
    said.draws[0].sampling.clear()
    said.draws[0].sampling["mirostat"] = 2
    assert follow_sampling(RunOptions(), found) == RunOptions()


def test_tokens_at_one_position_may_share_a_cell():
    """As in windowed groups after forks and moves; a position without any cell is refused."""
    entries = np.array([[0, 0, 1], [5, 6, 7], [0, 1, 2]], np.int32)
    text = TokenHistory(pieces={0: (entries,)}, n_marks=3)
    part = snapshot(n_cells=(2,)).groups[0]
    part = dataclasses.replace(part, pos=np.array([0, 1], np.int32), lost={})
    owners.check_cells("x", [part], text)
    short = dataclasses.replace(part, index=part.index[:1], pos=part.pos[:1], seqs=part.seqs[:1])
    for lost in ({}, {0: ((0, 1),)}):  # a position that is lost is not the one behind it
        with pytest.raises(errors.BadSession, match="no cell holds position 1 of sequence 0"):
            owners.check_cells("x", [dataclasses.replace(short, lost=lost)], text)
