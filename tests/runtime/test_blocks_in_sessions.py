"""Sequences that lie in blocks do so again after a session, wherever their cells come to lie."""

import dataclasses
import json

import numpy as np
import pytest

from kvrt import CacheConfig, ContextShift, MaskSpec, Runtime, session
from kvrt.errors import BadSequence, BadSession, CacheFull
from kvrt.session import codec
from kvrt.session import manifest as manifests
from kvrt.session.change import edit
from kvrt.session.manifest import Blob
from tests.toys import HybridLm, ToyLm

pytestmark = pytest.mark.usefixtures("numpy_device")

TEXT = [(7 * i + i // 5) % 32 for i in range(80)]
MASKS = [MaskSpec(), MaskSpec(kind="window", size=12)]


def build(model=None, policy=None, **change):
    sizes = {"n_ctx": 96, "block_size": 8, "n_ubatch": 16, "n_seq_max": 3, **change}
    return Runtime(model or ToyLm(n_layers=2, masks=MASKS), CacheConfig(**sizes), policy=policy)


def begun(at):
    """Two sequences between each other's tokens, of which the first lies in blocks."""
    at.append(TEXT[40:43], 1)
    at.append(TEXT[:21], 0)
    at.append(TEXT[43:50], 1)
    at.to_blocks(0)
    return at


def reread(at, tmp_path):
    session.save(tmp_path / "a.kv", at.snapshot())
    return session.read(tmp_path / "a.kv")


def goes_on(at, seq=0):
    return [np.asarray(at.append(TEXT[i : i + 1], seq)[0]) for i in range(50, 62)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "recurrent"])
def test_placement_survives_a_session(name, tmp_path):
    model = {"window": None, "recurrent": HybridLm()}[name]
    at, other = begun(build(model)), build(model)
    taken, tables = reread(at, tmp_path), at.table(0)
    assert taken.in_blocks == (0,)
    other.restore(taken)
    assert other.table(0) == tables and other.table(1) == (None,) * len(tables)
    # To the bit, for every cell is where it was.
    np.testing.assert_array_equal(goes_on(other), goes_on(at))
    assert other.table(0) == at.table(0)


@pytest.mark.slow
def test_other_sizes_place_it_anew(tmp_path):
    at = begun(build())
    taken = reread(at, tmp_path)
    wanted = goes_on(at)
    for sizes in ({"n_ctx": 128}, {"block_size": 16, "n_ctx": 128}, {"block_size": 4}):
        other = build(**sizes)
        other.restore(taken)
        size = other.config.block_size
        assert len(other.table(0)[0]) == -(-21 // size) and -1 not in other.table(0)[0]
        np.testing.assert_allclose(goes_on(other), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_it_comes_as_another_sequence_beside_others(tmp_path):
    at = begun(build())
    taken = reread(at, tmp_path)
    wanted = goes_on(at)
    other = build()
    other.append(TEXT[60:75], 1)
    other.restore(taken, {0: 2})
    assert other.table(2)[0] is not None and other.table(1)[0] is None
    np.testing.assert_allclose(goes_on(other, 2), wanted, atol=1e-5, rtol=1e-5)
    # The one in cells stays there.
    other.restore(taken, {1: 0})
    assert other.table(0)[0] is None


@pytest.mark.slow
def test_where_positions_move_it_comes_in_cells(tmp_path):
    taken = reread(begun(build()), tmp_path)
    other = build(policy=ContextShift(n_keep=4))
    other.restore(taken)
    assert other.table(0) == (None, None)
    other.append(TEXT, 0)


def test_too_few_empty_blocks_leave_everything_as_it_was(tmp_path):
    taken = reread(begun(build()), tmp_path)
    other = build(block_size=16, n_ctx=48)
    other.append([5, 6, 7], 2)
    before = other.snapshot()
    with pytest.raises(CacheFull, match="in blocks: 2 empty blocks of 16 cells are needed, 1 of 3"):
        other.restore(taken, {0: 0})
    after = other.snapshot()
    assert other.table(0) == (None, None) and after.seq_ids == before.seq_ids
    np.testing.assert_array_equal(before.groups[0].index, after.groups[0].index)


def test_an_empty_sequence_in_blocks_and_one_too_many():
    at = build()
    at.to_blocks(2)
    at.append(TEXT[:3], 0)
    taken = at.snapshot()
    other = build()
    other.restore(taken)
    other.append(TEXT[:9], 2)
    assert other.table(2)[0] is not None
    with pytest.raises(BadSequence, match="sequence 2 does not exist here, ids are 0 to 1"):
        build(n_seq_max=2).restore(taken)


def test_a_cut_keeps_it_and_a_session_without_it_says_nothing(tmp_path):
    taken = begun(build()).snapshot()
    assert edit.cut(taken, 0, 9).in_blocks == (0,) and edit.cut(taken, 0, 0).in_blocks == ()
    at = build()
    at.append(TEXT[:9])
    said = manifest_of(at.snapshot())
    assert "in_blocks" not in said and "in_blocks" in manifest_of(taken)


def manifest_of(taken):
    n = len(codec.to_tensors(taken))
    return json.loads(codec.manifest(taken, [Blob(offset=0, n_bytes=1, digest="0" * 32)] * n))


@pytest.mark.parametrize("found", [[1, 0], [0, 0], [4096], [-1], ["0"], 3, [True]])
def test_a_file_that_says_nonsense_is_refused(found):
    said = manifest_of(dataclasses.replace(begun(build()).snapshot(), logits={}))
    said["in_blocks"] = found
    with pytest.raises(BadSession, match=r"in_blocks(\[\d\])? is "):
        manifests.from_json(json.dumps(said).encode())
