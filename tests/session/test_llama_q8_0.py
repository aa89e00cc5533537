"""Rows of q8_0 in session files of llama.cpp: bytes as they stand, and what is said of rotation."""

import dataclasses

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from kvrt.errors import BadSession, SessionMismatch
from kvrt.session import kv_arrays
from kvrt.session.change import edit
from kvrt.session.interop.llama_format import Q8_0
from kvrt.store import codec
from tests.session import llama_bytes as made
from tests.session.llama_bytes import group, read, written

IDS = made.tokens([1, 5, 9])
CELLS = [(0, [0]), (1, [0]), (2, [0])]
NARROW, WIDE = (group((0, 1), heads=3, dim=32),), (group((0, 1), heads=2, dim=64),)


decoded = jax.jit(codec.decode, static_argnums=1)


def layers(width, seed):
    """Rows of two layers as numbers, and as llama.cpp's bytes."""
    x = np.random.default_rng(seed).standard_normal((2, 3, width)).astype(np.float32)
    return x, [quants.quantize(layer, GGMLQuantizationType.Q8_0) for layer in x]


def content(groups, *, rotations=None):
    width = groups[0].n_kv_heads * groups[0].head_dim
    k, v = layers(width, 1), layers(width, 2)
    section = made.section(CELLS, k[1], v[1], type_id=8, rotations=rotations)
    version = 10 if rotations is None else 11
    return made.whole(IDS, "llama", section, version=version), k[0], v[0]


@pytest.fixture
def load(tmp_path):
    def at(data, groups, **options):
        (tmp_path / "session.bin").write_bytes(data)
        return read(tmp_path / "session.bin", groups, **options)

    return at


@pytest.mark.parametrize(
    ("groups", "rotations", "turned"),
    [(NARROW, None, False), (NARROW, (0, 0), False), (WIDE, (0, 0), False), (WIDE, (64, 64), True)],
)
def test_a_file_is_read_and_written_to_the_byte(load, groups, rotations, turned):
    data, k, v = content(groups, rotations=rotations)
    found = load(data, groups)
    assert found.fingerprint["type_k"] == found.fingerprint["type_v"] == "q8_0"
    assert found.fingerprint.get("hadamard", False) == turned
    (block,) = found.groups[0].blocks
    for rows, wanted in ((block.k, k), (block.v, v)):
        assert isinstance(rows, codec.Quantized) and rows.data.dtype == np.int8
        back = np.asarray(decoded(rows, -1)).reshape(wanted.shape)
        assert np.abs(back - wanted).max() < 0.02
    assert written(found, groups, whole=True, old=rotations is None) == data


def test_an_older_file_does_not_say_whether_rows_were_rotated(load):
    data, _, _ = content(WIDE)
    with pytest.raises(SessionMismatch, match="does not say whether q8_0 was rotated"):
        load(data, WIDE)
    for turned in (False, True):
        found = load(data, WIDE, hadamard=turned)
        assert found.fingerprint.get("hadamard", False) == turned
        with pytest.raises(SessionMismatch, match=r"before 0\.6 do not say whether"):
            written(found, WIDE, whole=True, old=True)


def test_rotations_that_are_not_known_are_refused(load):
    for rotations in ((32, 64), (64, 0), (128, 64)):
        with pytest.raises(SessionMismatch, match=r"rotated by .* to be quantized, .*64, 64"):
            load(content(WIDE, rotations=rotations)[0], WIDE)
    data, _, _ = content(NARROW, rotations=(0, 0))
    turned = edit.convert(load(data, NARROW), "q8_0", "q8_0", hadamard=True)
    with pytest.raises(SessionMismatch, match="a multiple of 64; convert them without rotation"):
        written(turned, NARROW, whole=True, old=False)


@pytest.mark.parametrize("rotations", [(0, 0), (64, 64)])
def test_keys_in_another_order_are_coded_anew(load, rotations):
    """A model of Hugging Face's has the channels of a key in another order."""
    data, _, _ = content(WIDE, rotations=rotations)
    neox = (group((0, 1), heads=2, dim=64, layout="neox"),)
    found, plain = load(data, neox), load(data, WIDE)
    order = np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2)])
    a, b = (edit.convert(x, "f32", "f32").groups[0].blocks[0] for x in (found, plain))
    np.testing.assert_allclose(a.k, b.k[..., order], atol=0.03)
    assert a.v.tobytes() == b.v.tobytes()
    again = edit.convert(load(written(found, neox, whole=True, old=False), WIDE), "f32", "f32")
    np.testing.assert_allclose(again.groups[0].blocks[0].k, b.k, atol=0.05)


def test_what_other_files_cannot_hold(load):
    found = load(content(NARROW)[0], NARROW)
    coded = edit.convert(found, "int4", "q8_0")
    with pytest.raises(
        SessionMismatch, match=r"type int4 cannot be written for llama\.cpp; convert"
    ):
        written(coded, NARROW, whole=True)
    said = {**found.fingerprint, "type_k": ["q8_0", "f16"]}
    with pytest.raises(SessionMismatch, match="type q8_0,f16 cannot be written"):
        written(dataclasses.replace(found, fingerprint=said), NARROW, whole=True)


def test_damage(load):
    data, _, _ = content(NARROW)
    at = len(data) - 34 * 3 * 3  # the first group of the last layer
    spoilt = bytearray(data)
    spoilt[at : at + 2] = np.float16(np.nan).tobytes()
    with pytest.raises(BadSession, match="no finite numbers"):
        load(bytes(spoilt), NARROW)
    with pytest.raises(BadSession):
        load(data[:-1], NARROW)
    odd = (group((0,), heads=2, dim=16),)
    section = made.section(CELLS, [layers(32, 1)[1][0]], [layers(32, 2)[1][0]], type_id=8)
    with pytest.raises(SessionMismatch, match="a group of 32 channels is not of one head and cell"):
        load(made.whole(IDS, "llama", section), odd)


def test_groups_of_llama_cpp_are_those_of_a_store():
    x = np.random.default_rng(0).standard_normal((4, 2, 64)).astype(np.float32)
    coded = jax.jit(lambda x: codec.encode(x, codec.zeros("q8_0", (1, 1, 1, 64), 3), -1))(x)
    packed = kv_arrays.to_q8_0(kv_arrays.on_host(coded), Q8_0)
    wanted = quants.quantize(x.reshape(4, -1), GGMLQuantizationType.Q8_0)
    assert packed.tobytes() == wanted.tobytes()
