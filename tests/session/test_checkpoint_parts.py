"""Context checkpoints in sessions: worth as much after a restart, in files and folders."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from kvrt import CacheConfig, MaskSpec, Runtime, session
from kvrt.errors import BadSession
from kvrt.session import manifest as manifests
from kvrt.session.change import edit
from tests.toys import HybridLm, ToyLm

pytestmark = pytest.mark.usefixtures("numpy_device")

WINDOW = MaskSpec(kind="window", size=12)
TEXT = [(7 * i + i // 5) % 32 for i in range(150)]
OTHER = [(5 * i + 3) % 32 for i in range(40)]
MODELS = {
    "window": lambda: ToyLm(n_vocab=32, n_layers=2, masks=[MaskSpec(), WINDOW]),
    "recurrent, window": lambda: HybridLm(mask=WINDOW),
}


def runtime(model, **change):
    config = {"n_ctx": 208, "block_size": 8, "n_ubatch": 16, "n_seq_max": 2}
    config |= {"n_checkpoints": 32, "checkpoint_interval": 20, **change}
    return Runtime(model, CacheConfig(**config))


@pytest.mark.slow
@pytest.mark.parametrize("container", ["file", "folder"])
@pytest.mark.parametrize("name", MODELS)
def test_a_session_resumes_at_its_checkpoints_as_what_saved_it(name, container, tmp_path):
    model = MODELS[name]()
    at, other, fresh = runtime(model), runtime(model), runtime(model)
    at.append(TEXT)
    at.seq_cp(0, 1)
    session.save(tmp_path / "x", at.snapshot(), container)
    other.restore(session.read(tmp_path / "x"), {0: 0})
    assert other.checkpoints() == at.checkpoints() and other.checkpoints(1) == ()
    other.seq_rm(0, 80)
    fresh.append(TEXT[:80])
    np.testing.assert_array_equal(other.append(OTHER), fresh.append(OTHER))
    # Where there are more cells those of a window come to lie elsewhere, in another order of sums.
    wider = runtime(model, n_seq_max=6, n_ctx=256)
    wider.restore(session.read(tmp_path / "x"))
    wider.append(TEXT[:30], 2)
    wider.seq_rm(0, 80)
    fresh.clear()
    fresh.append(TEXT[:80])
    np.testing.assert_allclose(wider.append(OTHER), fresh.append(OTHER), atol=1e-5)
    both = runtime(model, n_checkpoints=2)
    both.restore(session.read(tmp_path / "x"))
    assert both.checkpoints(1) == both.checkpoints() == (40, 150)
    assert both.stats().n_checkpoints == 2
    none = runtime(model, n_checkpoints=0, checkpoint_interval=None)
    none.restore(session.read(tmp_path / "x"))
    assert none.checkpoints() == () and none.seq_pos_max() == 149


@pytest.mark.slow
def test_a_file_without_them_names_none_and_is_read(tmp_path):
    model = MODELS["window"]()
    at = runtime(model, n_checkpoints=0, checkpoint_interval=None)
    at.append(TEXT[:50])
    session.save(tmp_path / "x", at.snapshot())
    found = session.read_manifest(tmp_path / "x")
    assert found.checkpoints == () and b"checkpoints" not in manifests.to_json(found)
    assert at.fingerprint == runtime(model).fingerprint
    runtime(model).restore(session.read(tmp_path / "x"))


def test_a_cut_leaves_those_before_it_and_a_conversion_none():
    at = runtime(MODELS["window"]())
    at.append(TEXT)
    taken = at.snapshot()
    cut = edit.cut(taken, 0, 145)
    assert [x.pos for x in cut.checkpoints] == [20, 40, 60, 80, 100, 120, 140]
    assert edit.convert(taken, "f16", "f16").checkpoints == ()


@pytest.mark.slow
def test_a_snapshot_shares_no_memory_with_what_goes_on():
    model = MODELS["recurrent, window"]()
    at = runtime(model)
    at.append(TEXT[:60])
    taken = at.snapshot()
    before = [np.asarray(x).copy() for x in leaves(taken)]
    at.clear()
    at.append(OTHER)
    at.scrub()
    for a, b in zip(before, leaves(taken), strict=True):
        np.testing.assert_array_equal(a, b)


def leaves(taken):
    return jax.tree.leaves(
        [(x.state, [(b.k, b.v) for t in x.tails if t for b in t.blocks]) for x in taken.checkpoints]
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.update(pos=0), "the checkpoint at position 0"),
        (lambda c: c.update(pos=151), "sequence 0 ends before it"),
        (lambda c: c.update(seq_ids=[]), "of 0 sequences"),
        (lambda c: c.update(seq_ids=[3]), "sequence 3 ends before it"),
        (lambda c: c.update(tails=[None]), "with 1 groups of cells"),
        (lambda c: c["tails"][1].update(n_used=3), "bytes for the checkpoint at position 20"),
        (
            lambda c: c["tails"][1].update(n_cells=12, head=0),
            "cells of group 1 are out of order or range",
        ),
        (lambda c: c.update(tails=3), "a list of at most"),
        (lambda c: c.update(pos=21), "group 1 are not those that the next token sees"),
        (lambda c: c["tails"][1].update(lost=[]), "group 1 are not those that the next token"),
        (lambda c: c["tails"][1].update(lost=[[0, 10]]), "group 1 are not those that the next"),
        (lambda c: c["blob"].update(digest="0"), "32 hexadecimal digits"),
    ],
)
def test_what_contradicts_itself_is_refused(change, message, tmp_path):
    at = runtime(MODELS["window"]())
    at.append(TEXT)
    session.save(tmp_path / "x", at.snapshot())
    whole = session.read(tmp_path / "x")
    found = session.read_manifest(tmp_path / "x")
    said = json.loads(manifests.to_json(found))
    change(said["checkpoints"][0])
    with pytest.raises(BadSession) as error:
        read_as(said, whole)
    assert message in str(error.value) and "\n" not in str(error.value)


def read_as(said, whole):
    """A snapshot's tensors under another manifest."""
    from kvrt.session import codec, expected

    found = manifests.from_json(json.dumps(said).encode())
    expected.check_manifest(found)
    codec.from_tensors(found, codec.to_tensors(whole))


@pytest.mark.slow
def test_a_checkpoint_of_a_cache_that_kept_all_is_left_out_where_windows_roll():
    model = MODELS["recurrent, window"]()
    at, rolls = runtime(model, swa_full=True), runtime(model)
    at.append(TEXT)
    assert at.checkpoints() and all(t is None for t in at.snapshot().checkpoints[0].tails)
    taken = dataclasses.replace(at.snapshot(), logits={})
    rolls.restore(taken)
    assert rolls.checkpoints() == ()
    rolls.seq_rm(0)
    rolls.append(OTHER)
