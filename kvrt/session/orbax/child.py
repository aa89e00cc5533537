"""Reads arrays of an Orbax checkpoint: the process that `kvrt.session.orbax.folder` starts.

A checkpoint may be hostile: its metadata can name chunks of any size, and a chunk can unpack to
any size, where TensorStore aborts the process it runs in. So this process has limits, imports
nothing of kvrt, compares the metadata of each array with what is wanted before it reads one, and
writes the arrays' bytes to standard output, one behind the other. What is wrong is one line on
standard error.

Request, as JSON on standard input: {"path": str, "arrays": [{...}, ...]}, of each array
`folder` below the path and `name`, its `shape` and `dtype`, its `chunk` at most, and the `region`
of it that is wanted, a start and an end by axis.
"""

import contextlib
import dataclasses
import json
import sys
from typing import Any

import numpy as np

# What the interpreter and TensorStore's threads reserve, and the parts of an array on their way.
MEMORY_BYTES, MEMORY_TIMES = 3 << 30, 4
CPU_S, BYTES_A_SECOND = 60, 20 << 20
_MAX_METADATA_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What is read of an array."""

    folder: str
    name: str
    shape: list[int]
    dtype: str
    chunk: list[int]
    region: list[list[int]]

    @property
    def n_bytes(self) -> int:
        """Bytes of the region."""
        sizes = [stop - start for start, stop in self.region]
        return int(np.prod(sizes, dtype=object)) * np.dtype(self.dtype).itemsize

    @property
    def n_most(self) -> int:
        """Bytes of the region or of a chunk, which is read whole."""
        n_chunk = int(np.prod(self.chunk, dtype=object)) * np.dtype(self.dtype).itemsize
        return max(self.n_bytes, n_chunk)


def main() -> int:
    """Answers one request."""
    request = json.load(sys.stdin)
    wanted = [_Wanted(**x) for x in request["arrays"]]
    _limit(max((x.n_most for x in wanted), default=0), sum(x.n_bytes for x in wanted))
    try:
        _copy(request["path"], wanted)
    except (ValueError, KeyError, TypeError, OSError, MemoryError) as error:
        print(" ".join(str(error).split())[:300] or type(error).__name__, file=sys.stderr)
        return 1
    return 0


def _limit(greatest: int, total: int) -> None:
    """Bounds memory and processor time where the system can."""
    try:
        import resource
    except ImportError:  # Windows: nothing bounds it there but the comparison of metadata.
        return
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, MEMORY_BYTES + MEMORY_TIMES * greatest),
        (resource.RLIMIT_CPU, CPU_S + total // BYTES_A_SECOND),
    ):
        # A system may refuse a limit, macOS does for memory, or have a lower one already.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (most, most))


def _copy(path: str, wanted: list[_Wanted]) -> None:
    import tensorstore as ts

    few = {"limit": 2}
    context = ts.Context({"file_io_concurrency": few, "data_copy_concurrency": few})
    bases, stores = {}, {}
    for folder in dict.fromkeys(x.folder for x in wanted):
        at = f"{path}/{folder}/" if folder else f"{path}/"
        bases[folder] = {"driver": "ocdbt", "base": {"driver": "file", "path": at}}
        stores[folder] = ts.KvStore.open(bases[folder], context=context).result()
    for x in wanted:
        _check(x, stores[x.folder].read(f"{x.name}/.zarray").result().value)
    for x in wanted:
        spec = {"driver": "zarr", "kvstore": {**bases[x.folder], "path": f"{x.name}/"}}
        found = ts.open(spec, open=True, read=True, context=context).result()
        if list(found.shape) != x.shape or found.dtype.numpy_dtype != np.dtype(x.dtype):
            raise ValueError(f"{x.name} became another array")
        part = found[tuple(slice(start, stop) for start, stop in x.region)]
        out = np.ascontiguousarray(part.read().result())
        sys.stdout.buffer.write(out.reshape(-1).view(np.uint8).data)
    sys.stdout.buffer.flush()


def _check(wanted: _Wanted, data: bytes) -> None:
    """Compares the metadata of an array with what is wanted of it.

    Raises:
      ValueError: it is missing, or says something else.
    """
    name = wanted.name
    if not 0 < len(data) <= _MAX_METADATA_BYTES:
        raise ValueError(f"array {name} has {len(data)} bytes of metadata")
    said = json.loads(data)
    if not isinstance(said, dict):
        raise ValueError(f"array {name} has no metadata")
    chunks, compressor = said.get("chunks"), said.get("compressor")
    plain = {
        "zarr_format": 2,
        "shape": wanted.shape,
        "dtype": np.dtype(wanted.dtype).str,
        "order": "C",
        "filters": None,
    }
    for key, value in plain.items():
        if said.get(key) != value:
            raise ValueError(f"array {name} has {key} {_short(said.get(key))}, {value} is wanted")
    most = wanted.chunk
    sizes = chunks if isinstance(chunks, list) and len(chunks) == len(most) else [0] * len(most)
    if not all(type(c) is int and 0 < c <= n for c, n in zip(sizes, most, strict=True)):
        raise ValueError(f"array {name} has chunks {_short(chunks)}, {most} at most")
    if compressor is not None and (
        not isinstance(compressor, dict) or compressor.get("id") != "zstd"
    ):
        raise ValueError(f"array {name} is compressed by {_short(compressor)}, zstd is wanted")


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


if __name__ == "__main__":
    sys.exit(main())
