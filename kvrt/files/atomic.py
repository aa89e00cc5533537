"""Files that are written as a whole or not at all: locks, temporary files, what is on the disk."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from kvrt.errors import SaveError, UsageError, reason
from kvrt.files import regular

LOCK_S = 10.0
MODE = 0o600  # tokens, keys and values tell what the prompt was


@contextlib.contextmanager
def locked(path: Path, timeout_s: float | None = None) -> Iterator[None]:
    """Keeps other writers of a path out, of this process and of others; readers need no lock.

    The lock is a hidden file beside it, which stays.

    Raises:
      SaveError: another writer has it for longer than timeout_s, or the folder cannot be used.
    """
    timeout_s = LOCK_S if timeout_s is None else timeout_s
    lock = _lock(path, timeout_s)
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


def remove(path: Path, is_unchanged: Callable[[], bool]) -> bool:
    """Deletes a file or a folder, and the file of its lock, unless a writer has it.

    Args:
      path: what is deleted; a folder takes the name of a temporary first, so that no part of it
        stands there alone.
      is_unchanged: asked under the lock.

    Returns:
      False if a writer has the lock, or it has changed: then it stays.

    Raises:
      OSError: the system refuses.
    """
    lock = _lock(path, 0)
    try:
        lock.acquire()
    except Timeout:
        return False
    try:
        if not is_unchanged():
            return False
        if path.is_dir():
            sweep(path)
            hidden = temporary(path)
            path.rename(hidden)
            shutil.rmtree(hidden)
        else:
            path.unlink()
        # A process that waits for it opens it anew. Windows removes no file that is open.
        with contextlib.suppress(OSError):
            Path(lock.lock_file).unlink()
    finally:
        lock.release()
    return True


def _lock(path: Path, timeout_s: float) -> BaseFileLock:
    return FileLock(path.with_name(f".{path.name}.lock"), timeout=timeout_s, mode=MODE)


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


def replace(path: Path, write: Callable[[int], None], *, mode: int = MODE) -> None:
    """Writes a file beside `path` and puts it in its place once it has reached the disk.

    Args:
      path: what is replaced; call it under `locked`.
      write: gets the descriptor of the new, empty file.
      mode: its permissions, before the umask.
    """
    sweep(path)
    new = temporary(path)
    fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)
    try:
        try:
            write(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def backup_names(path: Path) -> Iterator[Path]:
    """The names book.kv~, book.kv~2, book.kv~3, ... for what was at a path."""
    yield path.with_name(f"{path.name}~")
    for n in range(2, 1 << 31):
        yield path.with_name(f"{path.name}~{n}")


def temporary(path: Path) -> Path:
    """Where this process writes what takes the place of `path` later: hidden, beside it."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def sweep(path: Path, end: str = ".tmp") -> None:
    """Removes the temporaries of a path that killed writers left; call it under `locked`.

    The lock says that no writer of this path is at work. Names are compared literally and whole:
    `.book.kv.12.tmp` is none of `book`'s, and a bracket is a bracket.
    """
    begin = f".{path.name}."
    with os.scandir(path.parent) as entries:
        left = [e for e in entries if e.name.startswith(begin) and e.name.endswith(end)]
    for entry in left:
        process = entry.name[len(begin) : -len(end)]
        if not (process.isascii() and process.isdigit()):
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.is_file(follow_symlinks=False):
            os.unlink(entry.path)


def check_writable(path: Path, label: str = "") -> None:
    """Refuses a place at which `replace` would fail, before there is anything to save.

    Permissions do not tell: some folders, /proc for one, take no files from anybody.

    Args:
      path: that is to be written.
      label: of it in messages, the path if not given.

    Raises:
      UsageError: there is no such folder.
      SaveError: no file can be made in it, or what is there cannot be written.
    """
    label = label or str(path)
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        raise UsageError(f"{label}: there is no folder {folder}; make it, or give another name")
    try:
        # Of a name of its own: no lock keeps others out, and numbers of processes come again.
        fd, probe = tempfile.mkstemp(".tmp", f".{path.name}.", folder)
        os.close(fd)
        os.unlink(probe)
    except OSError as error:
        raise SaveError(
            f"{label}: no file can be made in {folder}: {reason(error)}; give another name"
        ) from error
    if not path.exists() or path.is_dir():
        return
    try:
        os.close(regular.open_fd(path, os.O_RDWR))
    except OSError as error:
        raise SaveError(
            f"{label}: cannot be written: {reason(error)}; give another name"
        ) from error


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


def sync_tree(folder: Path) -> None:
    """Waits until a folder, and all files and folders in it, are on the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
            continue
        fd = os.open(path, os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk, where a system can say so."""
    if os.name == "nt":
        return  # Windows opens no folders; NTFS keeps its names in a journal.
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
