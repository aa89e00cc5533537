"""Files that are written as a whole or not at all: locks, temporary files, what is on the disk."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from kvrt.errors import SaveError, reason

LOCK_S = 10.0
MODE = 0o600  # rows and tokens tell what the prompt was


@contextlib.contextmanager
def locked(path: Path, timeout_s: float | None = None) -> Iterator[None]:
    """Keeps other writers of a path out, of this process and of others; readers need no lock.

    The lock is a hidden file beside it, which stays.

    Raises:
      SaveError: another writer has it for longer than timeout_s, or the folder cannot be used.
    """
    timeout_s = LOCK_S if timeout_s is None else timeout_s
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=timeout_s, mode=MODE)
    with told_of(path):
        os.stat(path.parent)  # FileLock would make the folder
        try:
            lock.acquire()
        except Timeout as error:
            raise SaveError(
                f"{path}: another process has been writing it for {timeout_s:g} s; wait for it, "
                "or give another name"
            ) from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def told_of(path: Path) -> Iterator[None]:
    """Turns what the system refuses into one line about a file that is written."""
    try:
        yield
    except OSError as error:
        why = reason(error)
        raise SaveError(
            f"{path}: cannot be written: {why}; nothing is half written, make room or give another "
            "name"
        ) from error


def replace(path: Path, write: Callable[[int], None]) -> None:
    """Writes a file beside `path` and puts it in its place once it has reached the disk.

    Args:
      path: what is replaced; call it under `locked`.
      write: gets the descriptor of the new, empty file.
    """
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        # Of a writer that was killed: the lock says that none is at work.
        left.unlink(missing_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, MODE)
    try:
        try:
            write(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of the data at an offset."""
    left = memoryview(data)
    while left:
        n = os.pwrite(fd, left, offset)
        left, offset = left[n:], offset + n


def read_at(fd: int, n: int, offset: int) -> bytes:
    """Reads n bytes from an offset; fewer where the file ends."""
    parts = []
    while n > 0:
        part = os.pread(fd, min(n, 1 << 30), offset)
        if not part:
            break
        parts.append(part)
        n, offset = n - len(part), offset + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, where a system can say so."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
