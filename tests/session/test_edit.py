"""Sessions cut and converted without a model."""

import dataclasses

import numpy as np
import pytest
from histories import MODELS, open_runtime, plain, tokens
from snapshots import assert_equal, snapshot

from kvrt import errors, session
from kvrt.session.change import edit
from kvrt.session.snapshot import BLOCK_CELLS

pytestmark = pytest.mark.usefixtures("numpy_device")


@pytest.mark.parametrize("n_cells", [(40,), (600, 300)])
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_a_cut_keeps_the_rows_before_it(tmp_path, n_cells, dtype):
    old = without_lost(snapshot(n_cells=n_cells, dtype=dtype))
    new = edit.cut(old, 0, 30)
    session.save(tmp_path / "a.kv", new)
    assert_equal(session.read(tmp_path / "a.kv"), new)
    assert new.history.pieces[0][0].shape[1] == 30 and not new.logits and not new.draws
    for g, h in zip(old.groups, new.groups, strict=True):
        assert h.pos.tolist() == list(range(30)) and len(h.blocks) == 1
        np.testing.assert_array_equal(h.blocks[0].k, g.blocks[0].k[:, :30])
        np.testing.assert_array_equal(h.blocks[0].v, g.blocks[0].v[:, :30])


def test_a_cut_in_the_middle_joins_blocks():
    old = without_lost(snapshot(n_cells=(700,)))
    new = edit.cut(old, 0, 300, 400)
    part = new.groups[0]
    assert [b.k.shape[1] for b in part.blocks] == [BLOCK_CELLS, BLOCK_CELLS, 88]
    k = np.concatenate([b.k for b in old.groups[0].blocks], axis=1)
    left = [*range(300), *range(400, 700)]
    np.testing.assert_array_equal(np.concatenate([b.k for b in part.blocks], axis=1), k[:, left])
    assert part.blocks[0] is old.groups[0].blocks[0]
    assert new.history.exact == {0: 300}


def without_lost(s):
    groups = tuple(dataclasses.replace(g, lost={}) for g in s.groups)
    return dataclasses.replace(s, groups=groups, ga_i={})


@pytest.mark.parametrize("rope", ["write", pytest.param("read", marks=pytest.mark.slow)])
def test_a_cut_is_what_a_runtime_would_do(rope, tmp_path):
    runtime = open_runtime(MODELS["full, window"](), rope=rope)
    plain(runtime)
    end = runtime.seq_pos_max() + 1
    at = end - 1
    taken = runtime.snapshot()
    runtime.seq_rm(0, at)
    wanted = runtime.snapshot()
    assert_equal(edit.cut(taken, 0, at), dataclasses.replace(wanted, logits={}))
    assert positions_of(taken, tmp_path) == open_rest(runtime, taken)


def open_rest(runtime, taken):
    runtime.restore(taken)
    return runtime.resume_positions()


def positions_of(taken, folder):
    session.save(folder / "taken.kv", taken)
    return edit.resume_positions(session.read_manifest(folder / "taken.kv"), 0)


def test_what_was_dropped_cannot_be_cut_back_to():
    runtime = open_runtime(MODELS["window"]())
    runtime.append(tokens(200, 1))
    taken = runtime.snapshot()
    assert taken.groups[0].lost
    with pytest.raises(errors.CannotRewind):
        edit.cut(taken, 0, 3)


def test_states_that_are_gone_cannot_be_cut_back_to(tmp_path):
    old = snapshot(n_cells=(), states=True)
    with pytest.raises(errors.CannotRewind):
        edit.cut(old, 0, 1)
    assert positions_of(old, tmp_path).gaps == ((1, 8),)


def test_a_sequence_that_is_not_held():
    with pytest.raises(errors.BadSequence, match="found"):
        edit.cut(snapshot(), 3, 0)


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
def test_rows_of_another_type(tmp_path, kind):
    old = snapshot(n_cells=(300,))
    new = edit.convert(old, kind, kind)
    session.save(tmp_path / "a.kv", new)
    found = session.read(tmp_path / "a.kv")
    assert found.fingerprint["type_k"] == found.fingerprint["type_v"] == kind
    back = edit.convert(found, "f32", "f32")
    eps = {"bf16": 2**-8, "f16": 2**-11, "f32": 0}[kind]
    for a, b in zip(old.groups[0].blocks, back.groups[0].blocks, strict=True):
        np.testing.assert_allclose(a.k, b.k, rtol=eps)
        np.testing.assert_allclose(a.v, b.v, rtol=eps)
    assert_equal(edit.convert(back, kind, kind), found)


def test_a_value_that_does_not_fit_is_refused():
    old = snapshot()
    block = old.groups[0].blocks[0]
    k = block.k.copy()
    k[0, 0, 0, 0] = 1e6
    part = dataclasses.replace(old.groups[0], blocks=[dataclasses.replace(block, k=k)])
    big = dataclasses.replace(old, groups=(part,))
    with pytest.raises(errors.UsageError, match="up to 1e"):
        edit.convert(big, "f16", "f16")
    assert edit.convert(big, "bf16", "bf16").fingerprint["type_k"] == "bf16"
