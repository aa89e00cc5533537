"""The files of a folder of sessions as the system describes them."""

import contextlib
import os
import stat
import time
from pathlib import Path

from kvrt.session.library import index


def names(folder: Path) -> list[str]:
    """Names of what can be sessions: plain files, not hidden, not the index."""
    return [e.name for e in os.scandir(folder) if index.is_name(e.name) and status(Path(e.path))]


def status(path: Path) -> os.stat_result | None:
    """Of a plain file; None for all else, links too."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


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
