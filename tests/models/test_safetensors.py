"""Hugging Face folders: single file, shards, and what is refused."""

import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvrt.errors import BadModelFile
from models.safetensors import INDEX, SINGLE, open_folder, read_tensor

RNG = np.random.default_rng(0)
VALUES = RNG.standard_normal((3, 4)).astype(np.float32)
TENSORS = {
    "f32": VALUES,
    "f16": VALUES.astype(np.float16),
    "f64": VALUES.astype(np.float64) * 1.5,
    "bf16": VALUES.astype(ml_dtypes.bfloat16),
}


def write(path, config="{}", **shards) -> None:
    """A folder with one file a shard, and an index when there are several."""
    if config is not None:
        (path / "config.json").write_text(config)
    for name, tensors in shards.items():
        save_file(tensors, path / f"{name}.safetensors")


def write_index(path, places) -> None:
    (path / INDEX).write_text(json.dumps({"weight_map": places}))


def test_single_file(tmp_path):
    write(tmp_path, '{"model_type": "llama"}', model=TENSORS)
    folder = open_folder(tmp_path)
    assert folder.config == {"model_type": "llama"}
    assert folder.tensors == dict.fromkeys(TENSORS, tmp_path / SINGLE)
    for name, value in TENSORS.items():
        got = read_tensor(folder, name)
        np.testing.assert_array_equal(got, value.astype(np.float32))
        assert got.dtype == np.float32 and got.flags.c_contiguous and got.flags.writeable
        got[...] = 0
        assert read_tensor(folder, name).any()


def test_shards(tmp_path):
    write(tmp_path, a={"x": VALUES}, b={"y": VALUES + 1, "z": VALUES + 2})
    write_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"})
    folder = open_folder(str(tmp_path))
    assert list(folder.tensors) == ["x", "y", "z"]
    np.testing.assert_array_equal(read_tensor(folder, "z"), VALUES + 2)


def test_missing_parts(tmp_path):
    with pytest.raises(BadModelFile, match="not a folder"):
        open_folder(tmp_path / "none")
    with pytest.raises(BadModelFile, match=r"config\.json: cannot be read: No such file"):
        open_folder(tmp_path)
    write(tmp_path)
    with pytest.raises(BadModelFile, match=r"no model\.safetensors and no model\.safetensors\."):
        open_folder(tmp_path)
    write(tmp_path, model=TENSORS)
    with pytest.raises(BadModelFile, match="tensor 'head' is wanted and missing"):
        read_tensor(open_folder(tmp_path), "head")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("", "not JSON"),
        ('{"a": ', "not JSON"),
        ("[1]", "holds no JSON object"),
        ("[" * 10**6, "not JSON"),
        ("\udcff", "not UTF-8 at byte 0"),
    ],
)
def test_bad_config(tmp_path, config, words):
    write(tmp_path, None, model=TENSORS)
    (tmp_path / "config.json").write_bytes(config.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadModelFile, match=words) as caught:
        open_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_config_beyond_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("models.json_file.MAX_BYTES", 10)
    write(tmp_path, '{"a": 1, "b": 2}', model=TENSORS)
    with pytest.raises(BadModelFile, match=r"config\.json: 16 bytes, 10 are allowed"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (None, "no weight_map"),
        ([1], "no weight_map"),
        ({"x": 3}, "no weight_map"),
        ({"x": "c.safetensors"}, r"c\.safetensors: missing, model\.safetensors\.index\.json names"),
        ({"x": "a.safetensors", "y": "a.safetensors"}, "tensor 'y' is missing, model"),
        ({"x": "../a.safetensors"}, r"'\.\./a\.safetensors' is not a file name inside"),
        ({"x": "/etc/passwd"}, "is not a file name inside"),
        ({"x": "sub/a.safetensors"}, "is not a file name inside"),
        ({"x": "..\\a.safetensors"}, "is not a file name inside"),
        ({"x": ".."}, "is not a file name inside"),
        ({"x": ""}, "is not a file name inside"),
        ({"x": "config.json"}, "cannot be read: Error while deserializing header"),
    ],
)
def test_bad_index(tmp_path, places, words):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, a={"x": VALUES})
    write(tmp_path, a={"x": VALUES})
    write_index(folder, places)
    with pytest.raises(BadModelFile, match=words) as caught:
        open_folder(folder)
    assert "\n" not in str(caught.value)


def test_tensors_that_are_no_floats(tmp_path):
    write(tmp_path, model={"q": np.arange(3, dtype=np.int8)})
    with pytest.raises(BadModelFile, match="tensor 'q' has type I8, one of F64, F32, F16, BF16"):
        read_tensor(open_folder(tmp_path), "q")


def test_values_beyond_float32(tmp_path):
    write(tmp_path, model={"big": np.array([1e300])})
    with pytest.raises(BadModelFile, match="tensor 'big' has values beyond float32"):
        read_tensor(open_folder(tmp_path), "big")


def test_file_that_vanishes(tmp_path):
    write(tmp_path, model=TENSORS)
    folder = open_folder(tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(BadModelFile, match="cannot be read: No such file"):
        read_tensor(folder, "f32")


def test_every_truncation_is_refused(tmp_path):
    write(tmp_path, model=TENSORS)
    raw = (tmp_path / SINGLE).read_bytes()
    for size in range(0, len(raw), 7):
        (tmp_path / SINGLE).write_bytes(raw[:size])
        with pytest.raises(BadModelFile, match="cannot be read"):
            open_folder(tmp_path)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 400), word=st.binary(min_size=1, max_size=9))
def test_fuzz_reads_or_refuses(tmp_path, at, word):
    write(tmp_path, model=TENSORS)
    raw = bytearray((tmp_path / SINGLE).read_bytes())
    raw[at : at + len(word)] = word
    (tmp_path / SINGLE).write_bytes(raw)
    tracemalloc.start()
    try:
        folder = open_folder(tmp_path)
        for name in folder.tensors:
            read_tensor(folder, name)
    except BadModelFile as error:
        assert "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 20e6
