"""Sessions of a folder: as the system describes their files, and as its index knows them."""

import contextlib
import dataclasses
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int  # not from arrays: a list of sessions needs no JAX

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


Tokens = Sequence[int] | Int[np.ndarray, " T"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A session that the index knows.

    Attributes:
      path: its file.
      fingerprint: digest of what a runtime must share to go on with it.
      n_tokens: tokens it holds.
      n_bytes: what it counts for in a budget.
      size: bytes of its file when it was added.
      mtime_ns: when the file had been changed last then.
      used_ns: when it was used last, in ns since 1970; no two are equal.
    """

    path: Path
    fingerprint: str
    n_tokens: int
    n_bytes: int
    size: int
    mtime_ns: int
    used_ns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """A session that begins with n_common tokens of a prompt."""

    entry: Entry
    n_common: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """What a session file says of itself, read by whoever knows its format."""

    fingerprint: str
    tokens: Tokens
    n_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synced:
    """Names that left the index, and those of files that are not in it; both ascending."""

    dropped: tuple[str, ...]
    unindexed: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan:
    """The entries whose files are as they were added, newest use first; names of other files.

    Of n_stale entries the file is gone or has changed.
    """

    entries: tuple[Entry, ...]
    others: tuple[str, ...]
    n_stale: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """Names that a new index holds, oldest first, and why it does not hold others."""

    added: tuple[str, ...]
    refused: Mapping[str, str]


def due(entries: Sequence[Entry], max_bytes: int) -> tuple[Entry, ...]:
    """The sessions to delete so that the others count for max_bytes at most.

    Args:
      entries: newest use first.
      max_bytes: the budget.

    Returns:
      Those used least recently, in the order to delete them.
    """
    gone, total = 0, sum(e.n_bytes for e in entries)
    while total > max_bytes:
        gone += 1
        total -= entries[-gone].n_bytes
    return tuple(reversed(entries[len(entries) - gone :]))


def is_as_added(entry: Entry, found: os.stat_result | None = None) -> bool:
    """Whether the file of an entry, whose status is `found`, is as the entry describes it."""
    found = found or status(entry.path)
    return found is not None and (found.st_size, found.st_mtime_ns) == (entry.size, entry.mtime_ns)
