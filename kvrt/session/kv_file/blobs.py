"""Blobs: safetensors inside a session, written without a copy and read within limits."""

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import safetensors
import xxhash
from safetensors import numpy as library

from kvrt.arrays import AnyArray
from kvrt.errors import DAMAGED, BadSession
from kvrt.files import atomic
from kvrt.session.manifest import Blob

Tensors = Mapping[str, AnyArray]

# Three arrays a group and two a sequence, at most: cells, tokens, logits.
MAX_HEADER_BYTES, MAX_TENSORS, MAX_BLOB_BYTES = 1 << 22, 1 << 15, 1 << 36
_KINDS = {
    "float32": "F32",
    "float16": "F16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int8": "I8",
    "uint8": "U8",
}


def blob_digest(tensors: Tensors) -> tuple[int, str]:
    """Bytes of a blob and their xxh3-128, hexadecimal."""
    n, hashed = 0, xxhash.xxh3_128()
    for part in _bytes(tensors):
        hashed.update(part)
        n += len(part)
    return n, hashed.hexdigest()


def write_blob(fd: int, tensors: Tensors, offset: int) -> None:
    """Writes a blob at an offset."""
    for part in _bytes(tensors):
        atomic.write_at(fd, part, offset)
        offset += len(part)


def holds(fd: int, blob: Blob) -> bool:
    """Whether a file holds a blob, by its digest."""
    return _digest(atomic.read_at(fd, blob.n_bytes, blob.offset)) == blob.digest


def read_blob(fd: int, blob: Blob, name: str) -> Tensors:
    """The tensors of a blob.

    Raises:
      BadSession: its digest differs, or it holds no tensors.
    """
    data = atomic.read_at(fd, blob.n_bytes, blob.offset)
    where = f"{name}, bytes {blob.offset} to {blob.offset + blob.n_bytes},"
    if _digest(data) != blob.digest:
        raise BadSession(f"{where} has another xxh3-128 than it was written with; {DAMAGED}")
    n_header = int.from_bytes(data[:8], "little")
    if n_header > MAX_HEADER_BYTES:
        raise BadSession(f"{where} has a header of {n_header} bytes, {MAX_HEADER_BYTES} at most")
    try:
        found = library.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise BadSession(f"{where} holds no tensors: {why}; {DAMAGED}") from error
    if len(found) > MAX_TENSORS:
        raise BadSession(f"{where} holds {len(found)} tensors, {MAX_TENSORS} at most")
    return found


def check_places(found: Sequence[Blob], start: int, end: int) -> None:
    """Refuses blobs that overlap, are named twice, or lie outside [start, end).

    So no more memory is taken for all of them than the file has bytes.

    Raises:
      BadSession: one does.
    """
    for blob in sorted(found, key=lambda b: b.offset):
        if blob.offset < start or blob.n_bytes > min(end - blob.offset, MAX_BLOB_BYTES):
            raise BadSession(
                f"a blob at {blob.offset} of {blob.n_bytes} bytes is named twice, or overlaps "
                f"another one or the end at {end}; {DAMAGED}"
            )
        start = blob.offset + blob.n_bytes


def _bytes(tensors: Tensors) -> Iterator[bytes | memoryview]:
    """A safetensors file: the length of its header, the header, the arrays in order.

    By hand, for the library would copy every array twice.
    """
    header, at = {}, 0
    arrays = {name: np.asarray(x) for name, x in tensors.items()}
    for name, x in arrays.items():
        span = [at, at + x.nbytes]
        header[name] = {"dtype": _KINDS[x.dtype.name], "shape": x.shape, "data_offsets": span}
        at += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for x in arrays.values():
        if x.nbytes:
            yield np.ascontiguousarray(x).reshape(-1).view(np.uint8).data


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)
