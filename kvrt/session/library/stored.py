"""The files of a folder of sessions as the system describes them."""

import contextlib
import os
import stat
import time
from pathlib import Path

from kvrt.session.library import index

# Of a session in a folder: it names what the folder holds, and each save replaces it.
FOLDER_INDEX = "session.json"


def names(folder: Path) -> list[str]:
    """Names that can be sessions: plain files and folder sessions, not hidden, not the index."""
    return [e.name for e in os.scandir(folder) if index.is_name(e.name) and status(Path(e.path))]


def status(path: Path) -> os.stat_result | None:
    """Of a plain file, or of the file that a save of a folder session replaces; None for others.

    Links are others.
    """
    try:
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode):
            found = (path / FOLDER_INDEX).lstat()
    except (FileNotFoundError, PermissionError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def is_same(a: os.stat_result, b: os.stat_result) -> bool:
    """Whether two statuses are of the same save."""
    return (a.st_size, a.st_mtime_ns, a.st_ino) == (b.st_size, b.st_mtime_ns, b.st_ino)


def bytes_on_disk(path: Path) -> int:
    """Bytes of a session; of a folder session those of all its files."""
    if path.is_dir():
        return sum(x.stat().st_size for x in path.rglob("*") if x.is_file())
    return path.stat().st_size


def last_use_ns(found: os.stat_result) -> int:
    """When a file was read or changed last, in ns since 1970; a time in the future counts as now.

    Take the status before the file is read: reading changes what it says.
    """
    return min(max(found.st_atime_ns, found.st_mtime_ns, 0), time.time_ns())


def keep_atime(fd: int) -> None:
    """Makes reads through a descriptor leave the file's time of access alone, on Linux.

    A list of sessions is no use of them, and `prune` would take it for one.
    """
    flag: int = getattr(os, "O_NOATIME", 0)
    if flag:
        import fcntl  # where there is the flag

        # Only a file's owner may ask for it; others change the time by reading.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | flag)
