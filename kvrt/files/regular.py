"""Opens files that have to be files: a pipe would wait for its other end, a device for anything."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def check(path: str | os.PathLike[str]) -> None:
    """Refuses what is no regular file, or a link to none, without opening it.

    Raises:
      OSError: it is something else, or not there; `strerror` says what, for the middle of a line.
    """
    _check(os.stat(path).st_mode, path)


def open_fd(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Opens a regular file, and never waits; returns its descriptor.

    Args:
      path: of the file; with os.O_CREAT in the flags it need not be there.
      flags: of `os.open`.
      mode: of a file that is made.

    Raises:
      OSError: as `check`, or it cannot be opened.
    """
    try:
        check(path)  # Opening a device can change it.
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    # It may have become a pipe since; Windows has none that stand in a folder.
    fd = os.open(path, flags if os.name == "nt" else flags | os.O_NONBLOCK, mode)
    try:
        _check(os.fstat(fd).st_mode, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file to read its bytes.

    Raises:
      OSError: as `open_fd`.
    """
    return os.fdopen(open_fd(path), "rb")


def file_version(status: os.stat_result) -> list[int]:
    """Device, inode, size and both times of change in ns: another list is another content.

    No program sets the second time, as `cp -p` and `rsync -t` do the first; on Windows it is that
    of creation.
    """
    times = [status.st_mtime_ns, status.st_ctime_ns]
    return [status.st_dev, status.st_ino, status.st_size, *times]


def check_model(path: Path) -> Path:
    """A path that names a model: a file, or a folder of nothing but files and folders.

    Raises:
      OSError: it is something else, or holds it; `strerror` names what.
    """
    if not path.is_dir():
        check(path)
        return path
    for inner in sorted(path.iterdir()):
        if inner.exists() and not inner.is_dir():
            check(inner)
    return path


def _check(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))
