"""What the index of a folder says of sessions, and which of them a budget has no room for."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int  # not from arrays: a list of sessions needs no JAX

from kvrt.session.library import stored

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
    found = found or stored.status(entry.path)
    return found is not None and (found.st_size, found.st_mtime_ns) == (entry.size, entry.mtime_ns)
