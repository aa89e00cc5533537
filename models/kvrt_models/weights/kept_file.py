"""A file with the weights of a model as they are in memory, to be mapped by the next start.

It is a safetensors file whose tensors begin at multiples of 64 bytes, with a digest of each.
"""

import contextlib
import dataclasses
import errno
import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from kvrt.errors import BadModelFile
from kvrt.files import atomic, regular
from kvrt_models.hf.safetensors import StoredTensor, read_header

# To be raised when the same source gives other weights: another layout, or another rounding.
SCHEMA = "1"
# Arrays on other addresses are copied by JAX instead of being taken as they are.
_ALIGNMENT = 64
# Bytes of the header for a tensor beside its name, which may stand there three times.
_ENTRY_BYTES = 320
_DTYPES = {"I8": np.dtype(np.int8), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
_DTYPES |= {"BF16": np.dtype(ml_dtypes.bfloat16)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Stale(Exception):
    """A file of weights that cannot be used; the text says why."""


@dataclasses.dataclass(frozen=True)
class KeptFile:
    """A file of weights that is mapped.

    Attributes:
      path: the file.
      places: where each tensor lies.
      digests: of each tensor.
      notes: what its maker wrote beside them.
    """

    path: Path
    places: Mapping[str, StoredTensor]
    digests: Mapping[str, str]
    notes: Mapping[str, str]
    _map: mmap.mmap

    def array(self, name: str) -> np.ndarray | None:
        """A tensor as it lies in the map; None if it is damaged."""
        place = self.places[name]
        dtype = _DTYPES[place.kind]
        n = place.n_bytes // dtype.itemsize
        x = np.frombuffer(self._map, dtype, n, place.offset).reshape(place.shape)
        return x if _digest(x) == self.digests.get(name) else None


def open_kept(path: Path, of: Mapping[str, str]) -> KeptFile:
    """Maps a file of weights; the weights themselves are looked at one by one.

    Args:
      path: of the file.
      of: what its notes have to say: which source, which rule.

    Raises:
      FileNotFoundError: there is none.
      Stale: it is damaged, or of something else.
    """
    try:
        fd = regular.open_fd(path)
        try:
            mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        places, said = read_header(path)
        digests = json.loads(said.get("digests", ""))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, BadModelFile) as error:
        raise Stale("damaged") from error
    notes = {k: v for k, v in said.items() if k != "digests"}
    if notes.get("schema") != SCHEMA:
        raise Stale("written by another version of kvrt")
    if notes.get("source") != of["source"]:
        raise Stale("of another model")
    if any(notes.get(k) != v for k, v in of.items()):
        raise Stale("made by another rule")
    places = {name: p for name, p in places.items() if not name.endswith("~")}
    sound = isinstance(digests, dict) and all(p.kind in _DTYPES for p in places.values())
    if not sound or max((p.offset + p.n_bytes for p in places.values()), default=0) > len(mapped):
        raise Stale("damaged")
    return KeptFile(path, places, digests, notes, mapped)


def remove_older(path: Path, model: str) -> None:
    """Removes files of weights of what a model's file or folder held before it changed.

    One that another process has mapped stays there for it. One that cannot be removed costs room.

    Args:
      path: of the model's file of weights, which stays; older ones begin as its name does.
      model: what they note as `model`: where their source lay.
    """
    begin = path.name.rpartition("-")[0] + "-"
    for other in sorted(path.parent.glob("*" + path.suffix)):
        if other != path and other.name.startswith(begin):
            with contextlib.suppress(OSError, ValueError, BadModelFile):
                if read_header(other)[1].get("model") == model:
                    other.unlink()


class Writer:
    """Writes tensors one after the other, and the header once all are there."""

    def __init__(self, fd: int, n_bytes: int, names: list[str]):
        """Reserves the header's place.

        Args:
          fd: of a new file.
          n_bytes: that the tensors will take at least.
          names: of all tensors that may come.

        Raises:
          OSError: there is no room for so many bytes.
        """
        self._fd = fd
        self._n_header = -(-(4096 + sum(3 * len(x) + _ENTRY_BYTES for x in names)) // 64) * 64 - 8
        _reserve(fd, 8 + self._n_header + n_bytes)
        self._end = 0
        self._entries: dict[str, Any] = {}
        self._digests: dict[str, str] = {}

    def add(self, name: str, x: np.ndarray) -> None:
        """Writes a tensor.

        Raises:
          OSError: it cannot be written.
        """
        x = np.ascontiguousarray(x)
        self._put(name, _NAMES[x.dtype], x.shape, _bytes(x))
        self._digests[name] = _digest(x)
        if rest := -self._end % _ALIGNMENT:
            self._put(f"{name}~", "U8", (rest,), memoryview(bytes(rest)))

    def finish(self, notes: Mapping[str, str]) -> None:
        """Writes the header, with short texts that `KeptFile.notes` gives back.

        Raises:
          OSError: it cannot be written.
        """
        said = {"schema": SCHEMA, **notes, "digests": json.dumps(self._digests)}
        text = json.dumps({"__metadata__": said, **self._entries}).encode()
        if len(text) > self._n_header:
            raise OSError("the header outgrew its place")
        atomic.write_at(self._fd, self._n_header.to_bytes(8, "little"), 0)
        atomic.write_at(self._fd, text.ljust(self._n_header), 8)
        os.ftruncate(self._fd, 8 + self._n_header + self._end)

    def _put(self, name: str, kind: str, shape: tuple[int, ...], data: memoryview) -> None:
        atomic.write_at(self._fd, data, 8 + self._n_header + self._end)
        offsets = [self._end, self._end + len(data)]
        self._entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": offsets}
        self._end = offsets[1]


def _reserve(fd: int, n_bytes: int) -> None:
    """Takes room on the disk, where system and file system can; raises OSError if there is none."""
    if not hasattr(os, "posix_fallocate"):  # macOS has not
        return
    try:
        os.posix_fallocate(fd, 0, n_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise


def _digest(x: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(_bytes(x))


def _bytes(x: np.ndarray) -> memoryview:
    return x.reshape(-1).view(np.uint8).data
