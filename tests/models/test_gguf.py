"""The header parser against the gguf package's own writer and reader, and against damage."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models.gguf import ggml
from kvrt_models.gguf.file import open_gguf, read_gguf_tensor

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def write_good(path: Path, endian=gguf.GGUFEndian.LITTLE) -> dict[str, np.ndarray]:
    """A small file with every value type; returns the tensors as float32."""
    writer = gguf.GGUFWriter(path, "llama", endianess=endian)
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        getattr(writer, f"add_{kind}")(f"t.{kind}", 7)
    writer.add_float32("t.float32", 0.25)
    writer.add_float64("t.float64", 1e-300)
    writer.add_bool("t.bool", True)
    writer.add_string("t.string", "naïve ▁ 🚀\n")
    writer.add_array("t.strings", ["a", "", "▁b", "\x00"])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.5, -1.5])
    writer.add_array("t.bools", [True, False])
    rng = np.random.default_rng(0)
    exact = {
        "f32": rng.standard_normal((3, 5)).astype(np.float32),
        "f16": rng.standard_normal((2, 3, 4)).astype(np.float16),
        "one": np.array([1.5], np.float32),
    }
    for name, value in exact.items():
        writer.add_tensor(name, value)
    whole = {name: value.astype(np.float32) for name, value in exact.items()}
    for kind in (*QUANTISED, "BF16", "Q6_K"):
        qtype = gguf.GGMLQuantizationType[kind]
        wide = 256 if kind == "Q6_K" else 64
        if kind == "Q6_K":
            stored = rng.integers(0, 63, (2, 210), np.uint8)
        else:
            stored = gguf.quants.quantize(rng.standard_normal((4, wide)).astype(np.float32), qtype)
        writer.add_tensor(kind.lower(), stored, raw_dtype=qtype)
        whole[kind.lower()] = gguf.quants.dequantize(stored, qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return whole


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    return path, write_good(path)


@pytest.fixture(scope="module")
def good_path(good):
    return good[0]


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_header_equals_gguf_reader(good):
    path, _ = good
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert {k: plain(v) for k, v in ours.metadata.items()} == fields
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.ggml_type, info.offset, info.n_bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )


def test_value_types(good):
    metadata = open_gguf(good[0]).metadata
    assert type(metadata["t.uint8"]) is int and type(metadata["t.float32"]) is float
    assert metadata["t.bool"] is True and metadata["t.string"] == "naïve ▁ 🚀\n"
    assert metadata["t.strings"] == ["a", "", "▁b", "\x00"]
    assert metadata["t.ints"].dtype == np.int32 and metadata["t.bools"].dtype == np.bool_


def test_tensors_are_dequantised_and_owned(good):
    path, whole = good
    file = open_gguf(path)
    for name, want in whole.items():
        got = read_gguf_tensor(file, name)
        assert got.dtype == np.float32 and got.flags.c_contiguous and got.flags.writeable
        np.testing.assert_array_equal(got, want)
        got[...] = 0
        np.testing.assert_array_equal(read_gguf_tensor(file, name), want)


def test_type_table_equals_the_gguf_package():
    known = {t.value: (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    # The package drops old types and adds new ones; those that both know must agree.
    both = known.keys() & ggml.GGML_TYPES.keys()
    assert len(both) > 25
    assert {i: known[i] for i in both} == {i: ggml.GGML_TYPES[i] for i in both}


def test_version_2_and_an_empty_file_without_tensors(tmp_path):
    path = tmp_path / "v2.gguf"
    path.write_bytes(header(version=2))
    file = open_gguf(path)
    assert (file.version, file.metadata, file.tensors) == (2, {}, {})


def test_missing_tensor_and_changed_file(good, tmp_path):
    path = tmp_path / "copy.gguf"
    path.write_bytes(good[0].read_bytes())
    file = open_gguf(path)
    with pytest.raises(BadModelFile, match="tensor 'nope' is wanted and missing"):
        read_gguf_tensor(file, "nope")
    last = max(file.tensors.values(), key=lambda info: info.offset)
    with path.open("r+b") as raw:
        raw.truncate(last.offset + 1)
    with pytest.raises(BadModelFile, match="the file has changed since it was opened"):
        read_gguf_tensor(file, last.name)
    path.unlink()
    with pytest.raises(BadModelFile, match="cannot be read: No such file"):
        read_gguf_tensor(file, last.name)


def test_type_without_dequantisation(tmp_path):
    path = tmp_path / "i8.gguf"
    path.write_bytes(padded(header(n_tensors=1) + tensor(b"x", (4,), 24)) + bytes(4))
    with pytest.raises(UnsupportedModel, match="type I8 cannot be dequantized"):
        read_gguf_tensor(open_gguf(path), "x")


def test_values_beyond_float32(tmp_path):
    path = tmp_path / "f64.gguf"
    raw = padded(header(n_tensors=1) + tensor(b"x", (1,), 28))
    path.write_bytes(raw + struct.pack("<d", 1.5))
    np.testing.assert_array_equal(read_gguf_tensor(open_gguf(path), "x"), np.float32([1.5]))
    path.write_bytes(raw + struct.pack("<d", 1e300))
    with pytest.raises(BadModelFile, match="tensor 'x': values beyond float32"):
        read_gguf_tensor(open_gguf(path), "x")


# Damage built by hand: each case is one file and the words its message must hold.


def text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def header(version=3, n_tensors=0, n_keys=0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims, kind=0, offset=0) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % 32)


def array(kind: int, n: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, n) + items


ALIGN = b"general.alignment"
BAD = {
    "empty": (b"", "0 bytes"),
    "zip": (b"PK\x03\x04" + bytes(40), r"starts with b'PK\\x03\\x04', b'GGUF' is wanted"),
    "version 1": (header(version=1), "version is 1, only 2 and 3"),
    "version 0": (header(version=0), "version is 0"),
    "version 4": (header(version=4), "version is 4"),
    "big endian": (header(version=3 << 24), "big endian"),
    "tensor count": (header(n_tensors=2**63), "9223372036854775808 tensors are announced"),
    "key count": (header(n_keys=2**40) + bytes(99), "at most 7 are allowed"),
    "key length": (header(n_keys=1) + struct.pack("<Q", 2**63) + bytes(99), "1 to 65535"),
    "key past end": (header(n_keys=1) + struct.pack("<Q", 99) + bytes(8), "91 bytes are missing"),
    "value type": (header(n_keys=1) + key(b"k", 13, bytes(9)), "unknown value type 13"),
    "array type": (header(n_keys=1) + key(b"k", 9, array(77, 1, bytes(50))), "value type 77"),
    "duplicate key": (header(n_keys=2) + key(b"k", 0, b"1") * 2, "key 'k' stands twice"),
    "string length": (header(n_keys=1) + key(b"k", 8, struct.pack("<Q", 2**62)), "are missing"),
    "vocabulary": (header(n_keys=1) + key(b"tokenizer.x", 8, text(b"\x80")), "not UTF-8"),
    "numbers": (header(n_keys=1) + key(b"k", 9, array(5, 2**61)), "2305843009213693952 items"),
    "strings": (header(n_keys=1) + key(b"k", 9, array(8, 2**50)), "at most 0 are allowed"),
    "deep": (header(n_keys=1) + key(b"k", 9, array(9, 1, array(9, 1, bytes(20)))), "deeper than 2"),
    "scalar past end": (header(n_keys=1) + key(b"kk", 10, b"1"), "7 bytes are missing"),
    "duplicate tensor": (header(n_tensors=2) + tensor(b"t", (8,)) * 2, "tensor 't' stands twice"),
    "five dims": (header(n_tensors=1) + tensor(b"t", (1,) * 5), "has 5 dimensions"),
    "huge dims": (header(n_tensors=1) + tensor(b"t", (2**32, 2**32)), "below 2.63"),
    "unknown type": (header(n_tensors=1) + tensor(b"t", (8,), 4), "unknown ggml type 4"),
    "half block": (header(n_tensors=1) + tensor(b"t", (33,), 2), "blocks of 32"),
    "misaligned": (header(n_tensors=1) + tensor(b"t", (8,), 0, 4), "multiple of the alignment 32"),
    "alignment 12": (
        header(n_keys=1) + key(ALIGN, 4, struct.pack("<I", 12)),
        "general.alignment is 12, a power of two",
    ),
    "alignment text": (header(n_keys=1) + key(ALIGN, 8, text(b"32\n32")), r"is '32\\n32'"),
    "overlap": (
        padded(header(n_tensors=2) + tensor(b"a", (16,)) + tensor(b"b", (8,), 0, 32)) + bytes(64),
        "tensors 'a' and 'b' overlap",
    ),
    "truncated data": (
        padded(header(n_tensors=1) + tensor(b"t", (16,))) + bytes(60),
        "4 bytes are missing",
    ),
    "offset past end": (
        padded(header(n_tensors=1) + tensor(b"t", (8,), 0, 2**63)) + bytes(64),
        "bytes are missing",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_damage_is_refused_in_one_line(case, tmp_path):
    raw, words = BAD[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(BadModelFile, match=words) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_what_llama_cpp_accepts_is_accepted(tmp_path):
    keys = key(b"\xff\xfe", 0, b"1") + key(b"about", 8, text(b"caf\xe9")) + key(b"on", 7, b"\x02")
    keys += key(b"flags", 9, array(7, 3, b"\x01\x00\x05"))
    tensors = tensor(b"scalar", ()) + tensor(b"none", (4, 0), 0, 32)
    path = tmp_path / "odd.gguf"
    path.write_bytes(padded(header(n_keys=4, n_tensors=2) + keys + tensors) + bytes(64))
    file = open_gguf(path)
    flags = file.metadata.pop("flags")
    assert file.metadata == {r"\xff\xfe": 49, "about": "caf\N{REPLACEMENT CHARACTER}", "on": True}
    assert flags.dtype == bool and flags.tolist() == [True, False, True]
    assert [info.shape for info in file.tensors.values()] == [(1,), (0, 4)]


def test_arrays_of_ten_million_entries(tmp_path, monkeypatch):
    path = tmp_path / "long.gguf"
    for kind, n, size in ((0, 10**7, 1), (8, 10**7, 8), (9, 10**6, 12)):
        path.write_bytes(header(n_keys=1) + key(b"k", 9, array(kind, n)) + bytes(n * size))
        with pytest.raises(BadModelFile, match=rf"{n} items in 'k' are announced, at most \d+ are"):
            open_gguf(path)
    # Nor may they be divided among keys, or among arrays in an array.
    third = key(b"%d", 9, array(0, 1 << 22)) + bytes(1 << 22)
    path.write_bytes(header(n_keys=3) + b"".join(third.replace(b"%d", b"k%d" % i) for i in (1, 2)))
    with path.open("ab") as file:
        file.write(key(b"k3", 9, array(9, 1, array(0, 1))) + bytes(100))
    with pytest.raises(BadModelFile, match="1 items in 'k3' are announced, at most 0 are allowed"):
        open_gguf(path)
    monkeypatch.setattr("kvrt_models.gguf.file.MAX_HEADER_BYTES", 200)
    for long in (key(b"k", 8, text(bytes(300))), key(b"k", 9, array(8, 1, text(bytes(300))))):
        path.write_bytes(header(n_keys=1) + long + bytes(100))
        with pytest.raises(BadModelFile, match=r"at byte 3\d\d, a header may have 200 bytes"):
            open_gguf(path)


def test_big_endian_file_of_the_writer(tmp_path):
    path = tmp_path / "big.gguf"
    write_good(path, gguf.GGUFEndian.BIG)
    with pytest.raises(BadModelFile, match="big endian"):
        open_gguf(path)


def test_what_is_no_file(tmp_path):
    with pytest.raises(BadModelFile, match="cannot be read: No such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(BadModelFile, match="not a regular file"):
        open_gguf(tmp_path)


def test_every_truncation_is_refused(good, tmp_path):
    raw = good[0].read_bytes()
    end = max(info.offset + info.n_bytes for info in open_gguf(good[0]).tensors.values())
    path = tmp_path / "cut.gguf"
    for size in (*range(0, 400), *range(400, end, 97), end - 1):
        path.write_bytes(raw[:size])
        with pytest.raises(BadModelFile):
            open_gguf(path)


def test_long_vocabulary_is_read_in_one_pass(tmp_path):
    n = 262_144
    words = [f"▁word{i}" for i in range(n)]
    path = tmp_path / "vocab.gguf"
    items = b"".join(text(word.encode()) for word in words)
    path.write_bytes(header(n_keys=1) + key(b"words", 9, array(8, n, items)))
    assert open_gguf(path).metadata["words"] == words


@st.composite
def damaged(draw):
    """Edits of a good file: overwritten bytes, a cut, a copied or removed stretch."""
    edits = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["flip", "word", "cut", "copy", "drop"]))
        edits.append((kind, *(draw(st.integers(0, 2**16)) for _ in range(3))))
    return edits


def apply_edits(raw: bytes, edits) -> bytes:
    for kind, a, b, c in edits:
        if not raw:
            return raw
        at, other, size = a % len(raw), b % len(raw), c % 64
        if kind == "flip":
            raw = raw[:at] + bytes([c & 255]) + raw[at + 1 :]
        elif kind == "word":
            word = struct.pack("<Q", [2**64 - 1, 2**63, 2**31, c][b % 4])
            raw = raw[:at] + word + raw[at + 8 :]
        elif kind == "cut":
            raw = raw[:at]
        elif kind == "copy":
            raw = raw[:at] + raw[other : other + size] + raw[at:]
        else:
            raw = raw[:at] + raw[at + size :]
    return raw


@pytest.mark.slow
@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edits=damaged())
def test_fuzz_never_crashes_hangs_or_allocates(good_path, tmp_path, edits):
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(apply_edits(good_path.read_bytes(), edits))
    tracemalloc.start()
    start = time.process_time()
    try:
        file = open_gguf(path)
        for name in file.tensors:
            read_gguf_tensor(file, name)
    except (BadModelFile, UnsupportedModel) as error:
        assert "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - start < 2
    assert peak < 20e6
