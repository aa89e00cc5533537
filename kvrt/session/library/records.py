"""Records of the index: a session, and the chain of digests over its blocks of tokens."""

import hashlib
import os
import sqlite3
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int32  # not from arrays: a list of sessions needs no JAX

from kvrt.config import MAX_POS
from kvrt.errors import UsageError
from kvrt.session.library.entries import Content, Tokens

BLOCK = 256  # tokens that one digest of a chain stands for
MAX_INT = 2**62  # no count or time of ours comes near


def insert(
    db: sqlite3.Connection, name: str, content: Content, status: os.stat_result, used_ns: int
) -> None:
    """One session with the chain of its blocks, in place of what had its name."""
    ids = as_int32(content.tokens)
    if not len(ids) or not 0 <= content.n_bytes < MAX_INT or not content.fingerprint:
        raise UsageError(
            f"{name} has {len(ids)} tokens, {content.n_bytes} bytes and the fingerprint "
            f"{content.fingerprint!r}; an entry needs tokens, a size and a fingerprint"
        )
    forget(db, name)
    db.execute(
        "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            name,
            content.fingerprint,
            ids.astype("<i4").tobytes(),
            len(ids),
            content.n_bytes,
            status.st_size,
            status.st_mtime_ns,
            used_ns,
        ),
    )
    digests = ((digest, name) for digest in chain(content.fingerprint, ids))
    db.executemany("INSERT INTO blocks VALUES (?, ?)", digests)


def not_taken(db: sqlite3.Connection, used_ns: int) -> int:
    """A time of use, or the first after it that no session has."""
    if not 0 <= used_ns < MAX_INT:
        raise UsageError(f"a session used at {used_ns} ns since 1970; give a time from then to now")
    later = db.execute("SELECT used_ns FROM sessions WHERE used_ns >= ?", (used_ns,))
    taken = {x for (x,) in later}
    while used_ns in taken:
        used_ns += 1
    return used_ns


def forget(db: sqlite3.Connection, name: str) -> None:
    """Takes a session out of the index."""
    db.execute("DELETE FROM sessions WHERE name = ?", (name,))
    db.execute("DELETE FROM blocks WHERE name = ?", (name,))


def as_int32(tokens: Tokens) -> Int32[np.ndarray, " T"]:
    """The tokens as int32.

    Raises:
      UsageError: one is negative or beyond 2^31 - 1.
    """
    ids = np.asarray(tokens, np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() <= MAX_POS:
        raise UsageError(f"token ids from {ids.min()} to {ids.max()}; they are 0 to {MAX_POS}")
    return ids.astype(np.int32)


def chain(fingerprint: str, ids: np.ndarray) -> Iterator[bytes]:
    """A digest of the fingerprint, then one of each full block and the digest before it."""
    digest = hashlib.sha256(b"kvrt blocks 1\0" + fingerprint.encode()).digest()
    yield digest
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        block = ids[start : start + BLOCK].astype("<i4").tobytes()
        digest = hashlib.sha256(digest + block).digest()
        yield digest
