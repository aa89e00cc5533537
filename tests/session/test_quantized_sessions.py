"""Rows in codes in sessions: saved, restored and converted, their scales beside them."""

import dataclasses

import numpy as np
import pytest
from snapshots import snapshot

from kvrt import CacheConfig, MaskSpec, Runtime, errors, session
from kvrt.session import codec, kv_arrays
from kvrt.session.change import edit
from kvrt.session.kv_file import file as kv_file
from kvrt.store.codec import Quantized
from tests.session.histories import tokens
from tests.store import plaincodec
from tests.toys import ToyLm

D = 64
KINDS = ("f32", "f16", "bf16", "fp8", "int8", "q8_0", "int4", "int2")


def open_runtime(**options):
    sizes = {"n_ctx": 64, "n_seq_max": 2, "block_size": 16, "n_ubatch": 8}
    return Runtime(ToyLm(n_layers=1, head_dim=D), CacheConfig(**{**sizes, **options}))


def same(a, b):
    """Rows to the bit, and what is said of them."""
    assert a.fingerprint == b.fingerprint
    for x, y in zip(a.groups, b.groups, strict=True):
        for p, q in zip(x.blocks, y.blocks, strict=True):
            for side in "kv":
                left, right = (kv_arrays.tensors(side, getattr(s, side)) for s in (p, q))
                assert left.keys() == right.keys()
                for name in left:
                    assert np.asarray(left[name]).tobytes() == np.asarray(right[name]).tobytes()


@pytest.mark.parametrize(
    "types",
    [
        {"type_k": "int8", "type_v": "int4", "hadamard": True},
        pytest.param({"type_k": "q8_0", "type_v": "int2"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("container", ["file", pytest.param("folder", marks=pytest.mark.slow)])
def test_what_was_saved_goes_on_to_the_bit(tmp_path, types, container):
    runtime, other = open_runtime(**types), open_runtime(**types)
    runtime.append(tokens(40))
    runtime.seq_rm(0, 5, 12)
    runtime.seq_add(0, 12, None, -7)
    taken = runtime.snapshot()
    session.save(tmp_path / "x.kv", taken, container)
    found = session.read(tmp_path / "x.kv")
    same(found, taken)
    other.restore(found)
    same(other.snapshot(), taken)
    for _ in range(2):
        a, b = (np.asarray(r.append([3, 4])) for r in (runtime, other))
        np.testing.assert_array_equal(a, b)


def test_codes_scales_and_minima_are_tensors_of_the_file(tmp_path):
    runtime = open_runtime(type_k="q8_0", type_v="int4")
    runtime.append(tokens(10))
    taken = runtime.snapshot()
    block = codec.to_tensors(taken)[0]
    shapes = {name: (str(x.dtype), x.shape) for name, x in block.items()}
    assert shapes == {
        "k": ("int8", (1, 10, 2, 64)),
        "k.scale": ("float16", (1, 10, 2, 2)),
        "v": ("uint8", (1, 10, 2, 32)),
        "v.scale": ("float16", (1, 10, 2, 2)),
        "v.low": ("float16", (1, 10, 2, 2)),
    }
    session.save(tmp_path / "x.kv", taken)
    said = kv_file.read_manifest(tmp_path / "x.kv")
    assert said.fingerprint["type_k"] == "q8_0" and said.fingerprint["hadamard"] is False


@pytest.mark.parametrize("drop", ["k.scale", "v.low"])
def test_rows_without_scales_are_refused(drop):
    runtime = open_runtime(type_k="q8_0", type_v="int4")
    runtime.append(tokens(10))
    taken = runtime.snapshot()
    drafts = [dict(x) for x in codec.to_tensors(taken)]
    del drafts[0][drop]
    blob = kv_file.Blob(offset=0, n_bytes=0, digest="0" * 32)
    said = codec.manifests.from_json(codec.manifest(taken, [blob] * len(drafts)))
    with pytest.raises(errors.BadSession, match=f"'{drop}' is missing, float16"):
        codec.from_tensors(said, drafts)


@pytest.mark.slow
def test_another_type_or_rotation_is_refused_by_its_name():
    runtime = open_runtime(type_k="int8", type_v="int8", hadamard=True)
    runtime.append(tokens(10))
    taken = runtime.snapshot()
    with pytest.raises(errors.SessionMismatch, match="type_k is int8 in the session and f32 here"):
        open_runtime().restore(taken)
    plain = open_runtime(type_k="int8", type_v="int8")
    with pytest.raises(errors.SessionMismatch, match=r"hadamard is True .* and False here"):
        plain.restore(taken)
    plain.restore(taken, convert=True)
    found = plain.snapshot()
    same(found, edit.convert(taken, "int8", "int8", hadamard=False))
    # One more step of codes, and its error.
    a, b = (edit.convert(x, "f32", "f32").groups[0].blocks[0].k for x in (taken, found))
    assert 0 < np.abs(a - b).max() < 0.02 * np.abs(a).max()


# --- conversions ----------------------------------------------------------------------------------


def of_floats(n=300, dim=D):
    """A session of f32 rows of no model, as wide as codes want them."""
    made = snapshot(n_cells=(n,), layers=1)
    k, v = np.random.default_rng(3).standard_normal((2, 1, n, 2, dim)).astype(np.float32) * 3
    blocks = [
        dataclasses.replace(b, k=k[:, a : a + 256], v=v[:, a : a + 256])
        for a, b in zip(range(0, n, 256), made.groups[0].blocks, strict=True)
    ]
    said = dict(made.fingerprint)
    said["groups"] = [{**said["groups"][0], "head_dim": dim}]
    part = dataclasses.replace(made.groups[0], blocks=blocks, lost={})
    return dataclasses.replace(made, fingerprint=said, groups=(part,)), k, v


def test_any_type_to_any_other(tmp_path):
    old, k, v = of_floats(n=60)
    for a, b in zip(KINDS, (*KINDS[1:], KINDS[0]), strict=True):
        first = edit.convert(old, a, b)
        assert (first.fingerprint["type_k"], first.fingerprint["type_v"]) == (a, b)
        back = edit.convert(first, "f32", "f32")
        for name, rows_before, side in ((a, k, "k"), (b, v, "v")):
            found = np.concatenate([getattr(x, side) for x in back.groups[0].blocks], axis=1)
            if name in plaincodec.KINDS:
                np.testing.assert_array_equal(found, plaincodec.coded(rows_before, name))
        # What was decoded becomes the same codes again, whatever float type was between.
        same(edit.convert(back, a, b), first)
        same(edit.convert(edit.convert(first, b, a), b, a), edit.convert(first, b, a))
    session.save(tmp_path / "x.kv", edit.convert(old, "int2", "q8_0"))
    same(session.read(tmp_path / "x.kv"), edit.convert(old, "int2", "q8_0"))


def test_rotation_is_undone_where_rows_leave_their_codes():
    old, k, _ = of_floats()
    turned = edit.convert(old, "int8", "f16", hadamard=True)
    assert turned.fingerprint["hadamard"] is True
    back = edit.convert(turned, "f32", "f32")
    assert back.fingerprint["hadamard"] is False
    found = np.concatenate([b.k for b in back.groups[0].blocks], axis=1)
    assert 1e-4 < np.abs(found - k).max() < 0.1
    with pytest.raises(errors.BadConfig, match=r"rope='read' or .* RoPE comes last"):
        said = {**old.fingerprint, "rope": "read"}
        edit.convert(dataclasses.replace(old, fingerprint=said), "int8", "f16", hadamard=True)


def test_what_codes_cannot_hold_is_refused():
    old, _, _ = of_floats(n=10)
    block = old.groups[0].blocks[0]
    big = dataclasses.replace(block, v=block.v * np.float32(1e5))
    part = dataclasses.replace(old.groups[0], blocks=[big])
    wide = dataclasses.replace(old, groups=(part,))
    with pytest.raises(errors.UsageError, match="which int4 cannot hold; convert to bf16"):
        edit.convert(wide, "int8", "int4")
    assert isinstance(edit.convert(wide, "int8", "int8").groups[0].blocks[0].v, Quantized)
    narrow, _, _ = of_floats(n=10, dim=48)
    with pytest.raises(errors.BadConfig, match="do not fill a head of 48"):
        edit.convert(narrow, "q8_0", "f16")


def test_a_cut_takes_scales_along():
    old, _, _ = of_floats()
    coded = edit.convert(old, "int4", "q8_0")
    same(edit.cut(coded, 0, 30, 40), edit.convert(edit.cut(old, 0, 30, 40), "int4", "q8_0"))


# --- types by group -------------------------------------------------------------------------------


def two_groups(**options):
    masks = [MaskSpec(), MaskSpec(kind="window", size=8)]
    sizes = {"n_ctx": 64, "block_size": 16, "n_ubatch": 8}
    return Runtime(ToyLm(masks=masks, head_dim=D), CacheConfig(**{**sizes, **options}))


@pytest.mark.slow
def test_each_group_has_its_own_types(tmp_path):
    runtime = two_groups(type_k=("int8", "f16"), type_v=("f16", "int4"))
    runtime.append(tokens(30))
    taken = runtime.snapshot()
    assert taken.fingerprint["type_k"] == ["int8", "f16"]
    session.save(tmp_path / "x.kv", taken)
    found = session.read(tmp_path / "x.kv")
    same(found, taken)
    other = two_groups(type_k=("int8", "f16"), type_v=("f16", "int4"))
    other.restore(found)
    assert [t.id for t in other.generate(4)] == [t.id for t in runtime.generate(4)]
    with pytest.raises(errors.SessionMismatch, match="type_k is int8,f16 in the session and f32"):
        two_groups().restore(found)
    same(edit.convert(edit.convert(taken, "f32", "f32"), ("int8", "f16"), ("f16", "int4")), taken)


@pytest.mark.slow
def test_groups_of_one_shape_and_other_types_are_taken_apart():
    runtime = two_groups(type_k=("f32", "f16"), type_v=("f16", "f32"), swa_full=True)
    taken = runtime.snapshot()
    runtime.append([1, 2, 3])
    runtime.restore(taken)
    assert runtime.seq_pos_max() == -1
    runtime.append([1, 2, 3])
    kept = runtime.snapshot()
    runtime.restore(kept)
    dtypes = [str(g.blocks[0].k.dtype) for g in runtime.snapshot().groups]
    assert dtypes == ["float32", "float16"]


@pytest.mark.slow
def test_equal_types_of_all_groups_are_one():
    a, b = (two_groups(type_k=t).fingerprint for t in ("f16", ("f16", "f16")))
    assert a == b and a["type_k"] == "f16"
