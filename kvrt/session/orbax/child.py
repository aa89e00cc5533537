"""Reads arrays of an Orbax checkpoint: the process that `kvrt.session.orbax.folder` starts.

A checkpoint may be hostile: its metadata can name chunks of any size, and a chunk can unpack to
any size, where TensorStore aborts the process it runs in. So this process has limits, imports
nothing of kvrt, compares the metadata of each array with what is wanted before it reads one, and
writes the arrays' bytes to standard output, one behind the other. What is wrong is one line on
standard error.

Request, as JSON on standard input: {"path": str, "arrays": [[name, shape, dtype], ...]}.
"""

import contextlib
import json
import sys
from typing import Any

import numpy as np

# What the interpreter and TensorStore's threads reserve, and the parts of an array on their way.
MEMORY_BYTES, MEMORY_TIMES = 3 << 30, 4
CPU_S, BYTES_A_SECOND = 60, 20 << 20
_MAX_METADATA_BYTES = 1 << 16


def main() -> int:
    """Answers one request."""
    request = json.load(sys.stdin)
    wanted = [(name, tuple(shape), np.dtype(dtype)) for name, shape, dtype in request["arrays"]]
    sizes = [int(np.prod(shape, dtype=object)) * dtype.itemsize for _, shape, dtype in wanted]
    _limit(max(sizes, default=0), sum(sizes))
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


def _copy(path: str, wanted: list[tuple[str, tuple[int, ...], np.dtype]]) -> None:
    import tensorstore as ts

    few = {"limit": 2}
    context = ts.Context({"file_io_concurrency": few, "data_copy_concurrency": few})
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/"}}
    store = ts.KvStore.open(base, context=context).result()
    for name, shape, dtype in wanted:
        _check(name, store.read(f"{name}/.zarray").result().value, shape, dtype)
    for name, shape, dtype in wanted:
        spec = {"driver": "zarr", "kvstore": {**base, "path": f"{name}/"}}
        found = ts.open(spec, open=True, read=True, context=context).result()
        if found.shape != shape or found.dtype.numpy_dtype != dtype:
            raise ValueError(f"{name} became another array")
        out = np.ascontiguousarray(found.read().result())
        sys.stdout.buffer.write(out.reshape(-1).view(np.uint8).data)
    sys.stdout.buffer.flush()


def _check(name: str, data: bytes, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Compares the metadata of an array with what is wanted of it.

    Raises:
      ValueError: it is missing, or says something else.
    """
    if not 0 < len(data) <= _MAX_METADATA_BYTES:
        raise ValueError(f"array {name} has {len(data)} bytes of metadata")
    said = json.loads(data)
    if not isinstance(said, dict):
        raise ValueError(f"array {name} has no metadata")
    chunks, compressor = said.get("chunks"), said.get("compressor")
    plain = {
        "zarr_format": 2,
        "shape": list(shape),
        "dtype": dtype.str,
        "order": "C",
        "filters": None,
    }
    for key, value in plain.items():
        if said.get(key) != value:
            raise ValueError(f"array {name} has {key} {_short(said.get(key))}, {value} is wanted")
    sizes = chunks if isinstance(chunks, list) and len(chunks) == len(shape) else [0] * len(shape)
    if not all(type(c) is int and 0 < c <= n for c, n in zip(sizes, shape, strict=True)):
        raise ValueError(f"array {name} has chunks {_short(chunks)}, {list(shape)} at most")
    if compressor is not None and (
        not isinstance(compressor, dict) or compressor.get("id") != "zstd"
    ):
        raise ValueError(f"array {name} is compressed by {_short(compressor)}, zstd is wanted")


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


if __name__ == "__main__":
    sys.exit(main())
