"""Session files of llama.cpp that are damaged, or of another model, cache or version."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrt import MaskSpec, RecurrentSpec
from kvrt.errors import BadSession, KvrtError, SessionMismatch
from kvrt.session.snapshot import GroupPart, Snapshot
from tests.session import llama_bytes as made
from tests.session.llama_bytes import (
    PLAIN,
    SMALL,
    WINDOW,
    example,
    fingerprint,
    group,
    read,
    small,
    written,
)

TWO = made.tokens([1, 2])
WRONG = {
    "magic": (b"ggml" + small(TWO)[4:], BadSession, "begins with b'ggml'"),
    "version": (
        made.whole(TWO, "llama", version=9),
        SessionMismatch,
        "version 9 .* only 10 and 11",
    ),
    "sequence": (made.sequence(TWO, version=2), SessionMismatch, "one sequence .* only 3 and 4"),
    "arch": (made.whole(TWO, "gemma3"), SessionMismatch, "'gemma3', the model is 'llama'"),
    "arch size": (b"nsgg" + made.u32(10, 0, 1 << 31), BadSession, "limit is 64"),
    "streams": (small(TWO, streams=2), SessionMismatch, "2 streams .*-kvu"),
    "q4_0": (small(TWO, type_id=2), SessionMismatch, "KV dtype q4_0 is not supported"),
    "q8_0": (small(TWO, type_id=8), SessionMismatch, "q8_0, and a group of 32 channels is not of"),
    "type": (small(TWO, type_id=77), SessionMismatch, "type 77"),
    "wide": (small(TWO, type_id=0), SessionMismatch, "4 bytes a cell, the model's 8"),
    "layout": (small(TWO, v_flag=2), BadSession, "layout 2 of values"),
    "trailing": (small(TWO) + b"x", BadSession, "1 bytes follow"),
    "negative": (small(TWO, [(-1, [0]), (1, [0])]), BadSession, "position -1"),
    "beyond": (small(TWO, [(0, [0]), (2**31 - 1, [0])]), BadSession, "position 2147483647"),
    "twice": (
        small(TWO, [(4, [0]), (4, [0])]),
        BadSession,
        "two cells of sequence 0 at position 4",
    ),
    "no owner": (small(TWO, [(0, [0]), (1, [])]), BadSession, "cell 1 has 0 owners"),
    "owner": (small(TWO, [(0, [0]), (1, [4096])]), BadSession, "sequence 4096"),
    "owners": (small(TWO, [(0, [0]), (1, [2, 1])]), BadSession, "owners of cell 1 do not ascend"),
    "token": (small(made.tokens([1, 64])), SessionMismatch, "token 64 .* vocabulary has 64"),
    "empty": (b"", BadSession, "needs 4 bytes, 0 are left"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_in_one_line(load, what):
    content, error, message = WRONG[what]
    with pytest.raises(error, match=message) as found:
        load(content, SMALL)
    assert "\n" not in str(found.value)


def newer(**options):
    cells, rows = [(0, [0]), (1, [0])], made.rows(1, 2, 2)
    return made.section(cells, rows, rows, **{"rotations": (0, 0), **options})


def test_the_newer_versions_say_whether_rows_were_rotated(load):
    for make, whole, version in (
        (lambda *x, **v: made.whole(x[0], "llama", *x[1:], **v), True, 11),
        (made.sequence, False, 4),
    ):
        content = make(TWO, newer(), version=version)
        found = load(content, SMALL)
        assert written(found, SMALL, whole=whole, old=False) == content
        for rotations in ((64, 0), (0, 64)):
            content = make(TWO, newer(rotations=rotations), version=version)
            with pytest.raises(SessionMismatch, match=r"rotated by .*64.* to be quantized"):
                load(content, SMALL)
        with pytest.raises(KvrtError):
            load(make(TWO, newer(rotations=None), version=version), SMALL)


def test_checkpoints_of_a_server_are_passed_over(load):
    plain = made.sequence(TWO, newer(), version=4)
    assert load(plain + b"SCKP" + made.u32(1, 0), SMALL).seq_ids == (0,)
    with pytest.raises(SessionMismatch, match="version 2 of the server's checkpoints"):
        load(plain + b"SCKP" + made.u32(2, 0), SMALL)
    for rest in (b"x", b"SCKP", b"SCKQ" + made.u32(1, 0)):
        with pytest.raises(BadSession, match=f"{len(rest)} bytes follow"):
            load(plain + rest, SMALL)


def test_two_owners_in_a_file_of_one_sequence(load):
    cells, rows = [(0, [0, 1]), (1, [0])], made.rows(1, 2, 2)
    with pytest.raises(BadSession, match="3 owners of 2 cells"):
        load(made.sequence(TWO, made.section(cells, rows, rows)), SMALL)
    # The number of the one sequence is the writer's own matter.
    cells = [(0, [6]), (1, [6])]
    assert load(made.sequence(TWO, made.section(cells, rows, rows)), SMALL).seq_ids == (0,)


def test_rows_that_are_no_numbers(load):
    k, v = made.rows(1, 2, 2), made.rows(1, 2, 2)
    v[0][1, 1] = np.inf
    cells = [(0, [0]), (1, [0])]
    with pytest.raises(BadSession, match="values of layer 0 hold values that are no finite"):
        load(made.whole(TWO, "llama", made.section(cells, k, v)), SMALL)


@pytest.mark.parametrize(
    "groups, message",
    [
        ((group((0, 1, 2)),), "keys and values of 2 layers, the model has 3"),
        ((group((0, 1), heads=1),), "128 bytes a cell, the model's 64"),
        ((group((0,)), group((1,), mask=WINDOW)), "keys and values of 2 layers, the model has 1"),
        ((group((0, 1), mask=MaskSpec(kind="symmetric", size=4)),), "no cache for a symmetric"),
        ((group((0, 1), mask=MaskSpec(kind="window", size=2)),), "positions go to 2"),
    ],
)
def test_other_models_are_refused(load, groups, message):
    with pytest.raises(SessionMismatch, match=message):
        load(example(False)[0], groups)


def test_other_caches_are_refused(load):
    content = example(False)[0]
    with pytest.raises(SessionMismatch, match="use rope='write'"):
        load(content, fingerprint=fingerprint(PLAIN, rope="read"))
    with pytest.raises(SessionMismatch, match="are not those of llama"):
        states = RecurrentSpec(layers=(2,), shapes=((3,),))
        load(content, fingerprint=fingerprint(PLAIN, states))
    with pytest.raises(SessionMismatch, match="not supported for 'rwkv'"):
        load(content, arch="rwkv")
    found = load(content)
    for changed, message in (({"type_k": "q4"}, "type q4"),):
        other = Snapshot(**{**vars(found), "fingerprint": {**found.fingerprint, **changed}})
        with pytest.raises(SessionMismatch, match=message):
            written(other, whole=True)


def test_shared_positions_are_not_written(load):
    found = load(example(False)[0])
    (part,) = found.groups
    other = GroupPart(**{**vars(part), "pos": np.array([0, 1, 1], np.int32)})
    with pytest.raises(SessionMismatch, match="two cells of sequence 0 at position 1"):
        written(Snapshot(**{**vars(found), "groups": (other,)}), whole=True)


def test_paths_that_are_no_files(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadSession) as found:
            read(path)
        assert str(path) in str(found.value)


# --- damaged files -------------------------------------------------------------------------------


def refused_or_equal(load, content):
    """What is taken says nothing but what the file says."""
    try:
        found = load(content, SMALL)
    except KvrtError as error:
        assert isinstance(error, BadSession | SessionMismatch), type(error)
        assert "\n" not in str(error) and len(str(error)) < 400
        return False
    assert written(found, SMALL, whole=True) == content
    return True


FINE = small(made.tokens([7, 8, 9]), [(0, [0]), (5, [0, 3]), (2, [0])])


def test_a_file_cut_anywhere_is_refused(load):
    assert refused_or_equal(load, FINE)
    for n in range(len(FINE)):
        assert not refused_or_equal(load, FINE[:n]), n


@pytest.mark.slow
def test_a_bit_flipped_anywhere(load):
    taken = 0
    for at, bit in itertools.product(range(len(FINE)), (0, 6)):
        content = bytearray(FINE)
        content[at] ^= 1 << bit
        taken += refused_or_equal(load, bytes(content))
    # Nothing tells a flipped bit in a row, a token or a position: the format has no digest.
    assert taken < 2 * (24 + 12 + 12)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2**32 - 1, 2**24])
def test_huge_numbers_take_no_memory(load, count):
    tracemalloc.start()
    for at in range(4, len(FINE) - 4, 4):
        content = FINE[:at] + made.u32(count) + FINE[at + 4 :]
        refused_or_equal(load, content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


@settings(max_examples=50)
@given(data=st.data())
def test_files_cut_and_joined(tmp_path_factory, data):
    a, b = (data.draw(st.integers(0, len(FINE))) for _ in range(2))
    middle = data.draw(st.binary(max_size=16))
    path = tmp_path_factory.getbasetemp() / "joined.bin"

    def load(content, groups):
        path.write_bytes(content)
        return read(path, groups)

    refused_or_equal(load, FINE[:a] + middle + FINE[b:])
