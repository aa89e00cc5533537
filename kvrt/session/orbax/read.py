"""Arrays of an Orbax checkpoint, read by a process with limits: see `child`."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvrt.errors import DAMAGED, BadSession, reason
from kvrt.session.expected import ArraySpec

# Arrays of real models are pressed by a tenth; what takes far less room on the disk than in memory
# is no session. Small ones may be of any kind.
_MOST_TIMES, _SMALL_BYTES = 64, 64 << 20
_WALL_S, _BYTES_A_SECOND = 600.0, 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """What is read of one array of a checkpoint.

    Attributes:
      spec: shape and dtype of what is read.
      name: of the array.
      folder: of the checkpoint, below the path; "" is the path itself.
      start: where the region begins, by axis.
      whole: shape of the array.
      chunk: the greatest chunk that it may be kept in.
    """

    spec: ArraySpec
    name: str
    folder: str
    start: tuple[int, ...]
    whole: tuple[int, ...]
    chunk: tuple[int, ...]

    def said(self) -> dict[str, Any]:
        """As `child` is asked for it."""
        return {
            "folder": self.folder,
            "name": self.name,
            "shape": self.whole,
            "dtype": self.spec.dtype,
            "chunk": self.chunk,
            "region": [(a, a + n) for a, n in zip(self.start, self.spec.shape, strict=True)],
        }


def whole_array(name: str, spec: ArraySpec) -> Region:
    """All of an array."""
    start = (0,) * len(spec.shape)
    return Region(spec=spec, name=name, folder="", start=start, whole=spec.shape, chunk=spec.shape)


def read_checkpoint(path: Path, wanted: Sequence[Region]) -> list[np.ndarray]:
    """Arrays, or regions of them, in the order in which they are wanted.

    Args:
      path: folder of the checkpoint, or of several.
      wanted: what is read of every array; at most so much memory is taken for them.

    Raises:
      BadSession: an array is missing, has other metadata or cannot be read, or a file of the folder
        is no plain file; this process is never in danger.
    """
    n_bytes = sum(x.spec.n_bytes for x in wanted)
    check_size(path, n_bytes)
    arrays = [x.said() for x in wanted]
    request = json.dumps({"path": str(path.absolute()), "arrays": arrays})
    # -P keeps this folder's modules from hiding the library's.
    command = [sys.executable, "-P", str(Path(__file__).with_name("child.py"))]
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said
        )
        timer = threading.Timer(_WALL_S + n_bytes / _BYTES_A_SECOND, child.kill)
        timer.start()
        try:
            found = _exchange(child, request.encode(), [x.spec for x in wanted])
        finally:
            timer.cancel()
            child.kill()
            child.wait()
        if found is None:
            said.seek(0)
            raise _refused(child.returncode, said.read(1 << 12))
        return found


def check_size(path: Path, n_bytes: int) -> None:
    """Refuses more bytes than the files of a folder can hold, before memory is taken for them.

    Raises:
      BadSession: they are too many, or a file is no plain file.
    """
    n_files = _file_bytes(path)
    if n_bytes > max(_SMALL_BYTES, _MOST_TIMES * n_files):
        raise BadSession(
            f"arrays of {n_bytes:,} bytes are wanted from {n_files:,} bytes of files, "
            f"{_MOST_TIMES} times as many at most; {DAMAGED}"
        )


def _exchange(
    child: "subprocess.Popen[bytes]", request: bytes, wanted: Sequence[ArraySpec]
) -> list[np.ndarray] | None:
    """Sends the request and takes the arrays; None if they do not come whole."""
    assert child.stdin is not None and child.stdout is not None
    found = []
    with child.stdout as out:
        try:
            with child.stdin as to:
                to.write(request)
        except BrokenPipeError:
            pass  # It says why on its standard error.
        for x in wanted:
            found.append(np.empty(x.shape, x.dtype))
            if not _fill(out.fileno(), found[-1]):
                child.wait()
                return None
        return found if not out.read(1) and child.wait() == 0 else None


def _fill(fd: int, array: np.ndarray) -> bool:
    left = memoryview(array.reshape(-1).view(np.uint8).data)
    while left:
        n = os.readv(fd, [left])
        if not n:
            return False
        left = left[n:]
    return True


def _file_bytes(path: Path) -> int:
    """Bytes of all files below a folder.

    Raises:
      BadSession: one is a link, a pipe or a device, or the folder cannot be read.
    """
    total, left = 0, [path]
    try:
        while left:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        left.append(Path(entry.path))
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
                    else:
                        raise BadSession(f"{entry.name} is no plain file; {DAMAGED}")
    except OSError as error:
        why = reason(error)
        raise BadSession(f"keys and values cannot be read: {why}; {DAMAGED}") from error
    return total


def _refused(code: int, said: bytes) -> BadSession:
    """Why no arrays came: the child's own line, or what ended it."""
    if code == 1 and said:
        why = " ".join(said.decode(errors="replace").split())[:200]
    else:
        why = f"reading them takes more memory or time than they need (status {code})"
    return _unreadable(why)


def _unreadable(why: str) -> BadSession:
    return BadSession(f"keys and values cannot be read: {why}; {DAMAGED}")
