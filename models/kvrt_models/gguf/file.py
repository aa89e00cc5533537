"""Reads GGUF model files: a bounded header parser, and tensors as float32 on demand.

A count, length or offset is compared with what the rest of the file can hold before anything is
allocated for it, so a damaged or hostile file costs no more than reading its bytes once.

Source: the GGUF specification in ggml's `docs/gguf.md`; versions 2 and 3, little endian.
"""

import dataclasses
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt.files import regular
from kvrt_models.gguf import ggml
from kvrt_models.header import brief

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ITEMS = 1 << 22
MAX_ITEMS_IN_ALL = 1 << 23
MAX_HEADER_BYTES = 1 << 28
MAX_NESTED_ARRAYS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_DIMS = 4
MAX_DEPTH = 2
DEFAULT_ALIGNMENT = 32

# The smallest key: name, type, one byte. The smallest tensor entry: name, one size, type, offset.
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_HEADER_BYTES = 4 + 4 + 8 + 8

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
# Value type -> NumPy dtype of the scalars; strings and arrays are read by code.
_SCALARS = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Where one tensor lies in the file.

    Attributes:
      name: the tensor's name.
      shape: in NumPy order, slowest axis first (ggml writes the fastest first).
      ggml_type: name of the storage type, as in `ggml.GGML_TYPES`.
      offset: first byte, counted from the start of the file.
      n_bytes: bytes in the file.
      path: of the file.
    """

    name: str
    shape: tuple[int, ...]
    ggml_type: str
    offset: int
    n_bytes: int
    path: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """A checked header.

    Attributes:
      path: the file; of a model in several parts the first.
      parts: all files that hold tensors.
      version: 2 or 3.
      metadata: key -> int, float, bool, str, list[str], one-dimensional NumPy array (number and
        bool arrays), or list of those (nested arrays).
      tensors: name -> where it lies, in the order of the file.
    """

    path: Path
    parts: tuple[Path, ...]
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Parses header and metadata of a GGUF file; no tensor is read.

    Raises:
      BadModelFile: not a GGUF file, or one that is truncated, damaged or of an unknown version.
    """
    path = Path(path)
    try:
        with regular.open_file(path) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            if n_bytes < _HEADER_BYTES:
                raise BadModelFile(
                    f"{path}: not a GGUF file: it has {n_bytes} bytes and a GGUF header takes at "
                    f"least {_HEADER_BYTES}; fetch the file again"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                return _Parser(path, buffer, n_bytes).parse()
    except OSError as error:
        raise BadModelFile(f"{path}: cannot be read: {error.strerror or error}") from error


def read_gguf_tensor(file: GGUFFile, name: str, rows: slice | None = None) -> np.ndarray:
    """One tensor as float32 in C order, dequantized, in memory of its own.

    Args:
      file: that holds it.
      name: of the tensor.
      rows: some of it, `[n, I]`, counted over all axes but the last; None is all, in its shape.

    Raises:
      BadModelFile: no tensor of that name, or the file has changed since it was opened.
      UnsupportedModel: a storage type that cannot be dequantized.
    """
    info, data, shape = _read(file, name, rows)
    try:
        return ggml.to_float32(data, info.ggml_type, shape)
    except (BadModelFile, UnsupportedModel) as error:
        raise type(error)(f"{info.path}: tensor {brief(name)}: {error}") from error


def read_gguf_blocks(file: GGUFFile, name: str, rows: slice) -> np.ndarray:
    """Rows of a tensor of Q8_0 as the file has them: `ggml.Q8_0[n, I / 32]`.

    Raises:
      BadModelFile: no tensor of that name, or the file has changed since it was opened.
    """
    _, data, shape = _read(file, name, rows)
    return data.view(ggml.Q8_0).reshape(shape[0], -1)


def _read(
    file: GGUFFile, name: str, rows: slice | None
) -> tuple[TensorInfo, np.ndarray, tuple[int, ...]]:
    """A tensor, bytes of it, and their shape as numbers."""
    info = file.tensors.get(name)
    if info is None:
        raise BadModelFile(f"{file.path}: tensor {name!r} is wanted and missing; take another file")
    shape, offset, n_bytes = info.shape, info.offset, info.n_bytes
    if rows is not None:
        # Blocks of values never reach over the end of a row.
        row_bytes = n_bytes // math.prod(shape[:-1])
        n = rows.stop - rows.start
        shape, offset, n_bytes = (n, shape[-1]), offset + rows.start * row_bytes, n * row_bytes
    try:
        with regular.open_file(info.path) as raw:
            raw.seek(offset)
            data = np.fromfile(raw, np.uint8, n_bytes)
    except OSError as error:
        raise BadModelFile(f"{info.path}: cannot be read: {error.strerror or error}") from error
    if data.size != n_bytes:
        raise BadModelFile(
            f"{info.path}: {n_bytes} bytes of tensor {name!r} are wanted, {data.size} could be "
            f"read: the file has changed since it was opened; open it again"
        )
    return info, data, shape


class _Parser:
    """Walks the header; `pos` never passes `most`, what a header may have of the file's `end`."""

    def __init__(self, path: Path, buffer: mmap.mmap, end: int) -> None:
        self.path = path
        self.buffer = buffer
        self.pos = 0
        self.end = end
        self.most = min(end, MAX_HEADER_BYTES)
        self.n_items = 0

    def parse(self) -> GGUFFile:
        """The whole header: fixed part, metadata, tensor table."""
        version, n_tensors, n_keys = self._fixed_part()
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = self._name("a metadata key")
            if key in metadata:
                self._fail(f"key {brief(key)} stands twice; every key may stand once")
            kind = self._u32("the type of a value")
            metadata[key] = self._value(kind, key, depth=0)
        entries = self._tensor_table(n_tensors)
        tensors = self._place(entries, self._alignment(metadata))
        parts = (self.path,)
        return GGUFFile(
            path=self.path, parts=parts, version=version, metadata=metadata, tensors=tensors
        )

    def _fixed_part(self) -> tuple[int, int, int]:
        magic = self._take(4, "the magic number")
        if magic != MAGIC:
            raise BadModelFile(
                f"{self.path}: not a GGUF file: it starts with {magic!r}, {MAGIC!r} is wanted; "
                f"give a .gguf file"
            )
        version = self._u32("the version")
        if version & 0xFFFF == 0 and version:
            self._fail("it is big endian, only little endian is read")
        if version not in VERSIONS:
            self._fail(f"its version is {version}, only 2 and 3 are read")
        n_tensors, n_keys = self._u64("the tensor count"), self._u64("the key count")
        self._limit("tensors", n_tensors, MAX_TENSORS, _MIN_TENSOR_BYTES)
        self._limit("metadata keys", n_keys, MAX_KEYS, _MIN_KEY_BYTES)
        return version, n_tensors, n_keys

    def _tensor_table(self, n_tensors: int) -> list[TensorInfo]:
        """Tensor entries with offsets as they stand: relative to the start of the data."""
        seen: set[str] = set()
        entries = []
        for _ in range(n_tensors):
            name = self._name("a tensor name")
            if name in seen:
                self._fail(f"tensor {brief(name)} stands twice; every tensor may stand once")
            seen.add(name)
            entries.append(self._tensor_entry(name))
        return entries

    def _tensor_entry(self, name: str) -> TensorInfo:
        n_dims = self._u32("a dimension count")
        if n_dims > MAX_DIMS:
            self._fail(f"tensor {brief(name)} has {n_dims} dimensions, {MAX_DIMS} are allowed")
        dims = [self._u64("a dimension") for _ in range(n_dims)] or [1]
        type_id = self._u32("a tensor type")
        offset = self._u64("a tensor offset")
        if type_id not in ggml.GGML_TYPES:
            self._fail(f"tensor {brief(name)} has the unknown ggml type {type_id}")
        kind, n_values, block_bytes = ggml.GGML_TYPES[type_id]
        total = math.prod(dims)
        if max(total, *dims) >= 1 << 63:
            self._fail(
                f"tensor {brief(name)} has the sizes {dims}: their product must stay below 2^63"
            )
        if dims[0] % n_values:
            self._fail(
                f"tensor {brief(name)} has rows of {dims[0]} values; {kind} is stored in "
                f"blocks of {n_values}"
            )
        return TensorInfo(
            name=name,
            shape=tuple(reversed(dims)),
            ggml_type=kind,
            offset=offset,
            n_bytes=total // n_values * block_bytes,
            path=self.path,
        )

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or value < 1 or value & (value - 1) or value >= 1 << 31:
            self._fail(f"general.alignment is {brief(value)}, a power of two is wanted")
        return value

    def _place(self, entries: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """Tensors with absolute offsets, after the checks that need the start of the data."""
        start = -(-self.pos // alignment) * alignment
        for info in entries:
            if info.offset % alignment:
                self._fail(
                    f"tensor {brief(info.name)} lies at {info.offset}, which is not a "
                    f"multiple of the alignment {alignment}"
                )
        placed = [dataclasses.replace(info, offset=start + info.offset) for info in entries]
        previous_end, previous = 0, ""
        for info in sorted(placed, key=lambda info: info.offset):
            if info.offset < previous_end:
                self._fail(f"tensors {brief(previous)} and {brief(info.name)} overlap")
            previous_end, previous = info.offset + info.n_bytes, info.name
        if previous_end > self.end:
            raise BadModelFile(
                f"{self.path}: truncated: tensor {brief(previous)} ends at byte {previous_end} and "
                f"the file at {self.end}, {previous_end - self.end} bytes are missing; "
                f"fetch the file again"
            )
        return {info.name: info for info in placed}

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self._numbers(kind, 1, key)[0].item()
        if kind == _STRING:
            return self._strings(1, key)[0]
        if kind == _ARRAY:
            return self._array(key, depth + 1)
        self._fail(f"key {brief(key)} has the unknown value type {kind}, 0 to 12 are known")

    def _array(self, key: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self._fail(f"key {brief(key)} nests arrays deeper than {MAX_DEPTH}")
        inner, n = self._u32("the type of an array"), self._u64("the length of an array")
        # An array inside an array takes at least its type and its length.
        most, least_bytes = MAX_NESTED_ARRAYS, _U32.size + _U64.size
        if inner in _SCALARS or inner == _STRING:
            most, least_bytes = MAX_ITEMS, _SCALARS[inner].itemsize if inner in _SCALARS else 8
        most = min(most, MAX_ITEMS_IN_ALL - self.n_items)
        self._limit(f"items in {brief(key)}", n, most, least_bytes)
        self.n_items += n
        if inner in _SCALARS:
            return self._numbers(inner, n, key)
        if inner == _STRING:
            return self._strings(n, key)
        return [self._value(inner, key, depth) for _ in range(n)]

    def _numbers(self, kind: int, n: int, key: str) -> np.ndarray:
        """The next n numbers or bools, `[n]`, copied out of the file."""
        dtype = _SCALARS[kind]
        raw = np.frombuffer(self._take(n * dtype.itemsize, f"the value of {brief(key)}"), dtype)
        return raw != 0 if kind == _BOOL else raw

    def _strings(self, n: int, key: str) -> list[str]:
        """The next n strings; the loop that reads vocabularies, 0.3 microseconds a string."""
        buffer, pos, end = self.buffer, self.pos, self.most
        unpack = _U64.unpack_from
        # A description in another encoding harms nothing; a vocabulary would be another.
        errors = "strict" if key.startswith("tokenizer.") else "replace"
        out = []
        try:
            for _ in range(n):
                start = pos + 8
                if start > end:
                    self._cut_short(f"a string of {brief(key)}", start)
                pos = start + unpack(buffer, pos)[0]
                if pos > end:
                    self._cut_short(f"a string of {brief(key)}", pos)
                out.append(buffer[start:pos].decode(errors=errors))
        except UnicodeDecodeError as error:
            self._fail(f"a string of {brief(key)} is not UTF-8: {error.reason}")
        self.pos = pos
        return out

    def _name(self, what: str) -> str:
        size = self._u64(what)
        if not 0 < size <= MAX_KEY_BYTES:
            self._fail(f"{what} has {size} bytes, 1 to {MAX_KEY_BYTES} are allowed")
        return self._take(size, what).decode(errors="backslashreplace")

    def _u32(self, what: str) -> int:
        return _U32.unpack(self._take(4, what))[0]

    def _u64(self, what: str) -> int:
        return _U64.unpack(self._take(8, what))[0]

    def _take(self, n: int, what: str) -> bytes:
        stop = self.pos + n
        if stop > self.most:
            self._cut_short(what, stop)
        taken = self.buffer[self.pos : stop]
        self.pos = stop
        return taken

    def _limit(self, what: str, n: int, most: int, least_bytes: int) -> None:
        """Refuses n things of at least `least_bytes` each that the limit or the file forbids."""
        most = min(most, (self.end - self.pos) // least_bytes)
        if n > most:
            self._fail(
                f"{n} {what} are announced, at most {most} are allowed in the "
                f"{self.end - self.pos} bytes that follow"
            )

    def _cut_short(self, what: str, stop: int) -> NoReturn:
        if stop <= self.end:
            self._fail(
                f"{what} would end at byte {stop}, a header may have {MAX_HEADER_BYTES} bytes"
            )
        raise BadModelFile(
            f"{self.path}: truncated or damaged: {what} would end at byte {stop}, the file ends at "
            f"{self.end}, {stop - self.end} bytes are missing; fetch the file again"
        )

    def _fail(self, message: str) -> NoReturn:
        raise BadModelFile(
            f"{self.path}: damaged GGUF header before byte {self.pos}: {message}; "
            f"fetch or convert the file again"
        )
