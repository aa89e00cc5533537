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
from kvrt_models.hf.safetensors import INDEX, SINGLE, open_hf_folder, read_folder_tensor

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
    folder = open_hf_folder(tmp_path)
    assert folder.config == {"model_type": "llama"}
    assert folder.tensors == dict.fromkeys(TENSORS, tmp_path / SINGLE)
    for name, value in TENSORS.items():
        got = read_folder_tensor(folder, name)
        np.testing.assert_array_equal(got, value.astype(np.float32))
        assert got.dtype == np.float32 and got.flags.c_contiguous and got.flags.writeable
        got[...] = 0
        assert read_folder_tensor(folder, name).any()


def test_shards(tmp_path):
    write(tmp_path, a={"x": VALUES}, b={"y": VALUES + 1, "z": VALUES + 2})
    write_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"})
    folder = open_hf_folder(str(tmp_path))
    assert list(folder.tensors) == ["x", "y", "z"]
    np.testing.assert_array_equal(read_folder_tensor(folder, "z"), VALUES + 2)


def test_missing_parts(tmp_path):
    with pytest.raises(BadModelFile, match="not a folder"):
        open_hf_folder(tmp_path / "none")
    with pytest.raises(BadModelFile, match=r"config\.json: cannot be read: No such file"):
        open_hf_folder(tmp_path)
    write(tmp_path)
    with pytest.raises(BadModelFile, match=r"no model\.safetensors and no model\.safetensors\."):
        open_hf_folder(tmp_path)
    write(tmp_path, model=TENSORS)
    with pytest.raises(BadModelFile, match="tensor 'head' is wanted and missing"):
        read_folder_tensor(open_hf_folder(tmp_path), "head")


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
        open_hf_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_config_beyond_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("kvrt_models.hf.json_file.MAX_BYTES", 10)
    write(tmp_path, '{"a": 1, "b": 2}', model=TENSORS)
    with pytest.raises(BadModelFile, match=r"config\.json: 16 bytes, 10 are allowed"):
        open_hf_folder(tmp_path)


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
        ({"x": "a" * 300}, "shard 'aaaa.*' is no file name of at most 255 printable bytes"),
        ({"x": "é" * 200}, "is no file name of at most 255 printable bytes"),
        ({"x": "a\0b"}, r"shard 'a\\x00b' is no file name"),
        ({"x": "a\n"}, r"shard 'a\\n' is no file name"),
        ({"x" * i: f"{i}.safetensors" for i in range(5000)}, "5000 shards, 4096 are allowed"),
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
        open_hf_folder(folder)
    assert "\n" not in str(caught.value)


def raw_file(path, header, data=b"") -> None:
    """A single file whose header is as it is given."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + data)


def entry(*shape, kind="F32", end=0) -> dict:
    return {"dtype": kind, "shape": shape, "data_offsets": [0, end]}


BAD_HEADERS = {
    "many tensors": ({f"{i}": entry(0) for i in range(70_000)}, "70000 tensors, 65536 are allowed"),
    "long header": (b"{}" + b" " * (1 << 24), "its header would have 16777218 bytes, 16777216 are"),
    "no header": (b"", "cannot be read"),
    "many axes": ({"a": entry(*[1] * 1000, end=4)}, "'a' has 1000 axes of up to 1 values, 8 axes"),
    "long axis": ({"a": entry(0, 2**62)}, r"'a' has 2 axes of up to 4611686018427387904 values"),
    "twice": (
        b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
        b'"a":{"dtype":"F16","shape":[0],"data_offsets":[0,0]}}',
        "key 'a' stands twice",
    ),
    "type in a list": ({"a": entry(0) | {"dtype": ["F32"]}}, "cannot be read: Error while deser"),
    "list": (b"[" * 10**6, "cannot be read: Error while deserializing header"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_headers(tmp_path, case):
    header, words = BAD_HEADERS[case]
    write(tmp_path)
    raw_file(tmp_path, header, bytes(4) if case == "many axes" else b"")
    with pytest.raises(BadModelFile, match=words) as caught:
        open_hf_folder(tmp_path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_the_header_is_read_once_and_the_file_may_shrink_meanwhile(tmp_path, monkeypatch):
    write(tmp_path, model=TENSORS)
    folder = open_hf_folder(tmp_path)
    monkeypatch.setattr("kvrt_models.hf.safetensors.parse_json", None)
    np.testing.assert_array_equal(read_folder_tensor(folder, "f32"), VALUES)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:-1])
    with pytest.raises(BadModelFile, match="the file has changed since it was opened"):
        for name in TENSORS:
            read_folder_tensor(folder, name)


def test_tensors_that_are_no_floats(tmp_path):
    write(tmp_path, model={"q": np.arange(3, dtype=np.int8)})
    with pytest.raises(BadModelFile, match="tensor 'q' has type I8, one of F64, F32, F16, BF16"):
        read_folder_tensor(open_hf_folder(tmp_path), "q")


def test_values_beyond_float32(tmp_path):
    write(tmp_path, model={"big": np.array([1e300])})
    with pytest.raises(BadModelFile, match="tensor 'big' has values beyond float32"):
        read_folder_tensor(open_hf_folder(tmp_path), "big")


def test_file_that_vanishes(tmp_path):
    write(tmp_path, model=TENSORS)
    folder = open_hf_folder(tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(BadModelFile, match="cannot be read: No such file"):
        read_folder_tensor(folder, "f32")


def test_every_truncation_is_refused(tmp_path):
    write(tmp_path, model=TENSORS)
    raw = (tmp_path / SINGLE).read_bytes()
    for size in range(0, len(raw), 7):
        (tmp_path / SINGLE).write_bytes(raw[:size])
        with pytest.raises(BadModelFile, match="cannot be read"):
            open_hf_folder(tmp_path)


@pytest.mark.slow
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
        folder = open_hf_folder(tmp_path)
        for name in folder.tensors:
            read_folder_tensor(folder, name)
    except BadModelFile as error:
        assert "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 20e6
