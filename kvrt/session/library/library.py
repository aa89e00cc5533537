"""A folder of sessions, and an index that finds the one to go on with.

The index only points: what it says is compared with the files before it is believed, and whoever
loads a session checks the session. Chains of digests over blocks of tokens find candidates, their
tokens decide.
"""

import contextlib
import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32  # not from arrays: a list of sessions needs no JAX

from kvrt.config import MAX_POS
from kvrt.errors import BadSession, KvrtError, UsageError
from kvrt.files import atomic
from kvrt.reuse.diff import common_prefix
from kvrt.reuse.tree import RadixTree
from kvrt.session import fingerprint, io
from kvrt.session.library import index, stored
from kvrt.session.library.stored import (
    Content,
    Entry,
    Match,
    Rebuilt,
    Scan,
    Synced,
    Tokens,
    is_as_added,
)


def content_of(path: Path) -> Content:
    """Fingerprint, tokens and size of a session; its time of access stays, where the system can.

    Raises:
      BadSession: it is damaged, no session, or holds no token that could be found again.
    """
    opened = io.open_session(path, is_use=False)
    # Keys and values after a hole or a move are not those that these tokens would give.
    ids = opened.held[1][: opened.manifest.exact.get(opened.seq_id)]
    if not len(ids):
        raise BadSession(f"{path}: it holds no tokens that a prompt could begin with")
    digest = fingerprint.digest(opened.manifest.fingerprint)
    return Content(fingerprint=digest, tokens=ids, n_bytes=stored.bytes_on_disk(path))


class Read(NamedTuple):
    """The status of a file before it was read, and its content, or why it has none."""

    status: os.stat_result
    content: Content | KvrtError | OSError


def read_files(
    folder: Path, read_tokens: Callable[[Path], Content], known: Mapping[str, Read]
) -> dict[str, Read]:
    """All sessions of a folder by name; those that are as they are known are not read again."""
    out = {}
    for name in stored.names(folder):
        path, earlier = folder / name, known.get(name)
        status = stored.status(path)
        if status is None:
            continue  # It has gone meanwhile.
        if earlier and stored.is_same(earlier.status, status):
            out[name] = earlier
            continue
        try:
            out[name] = Read(status, read_tokens(path))
        except (KvrtError, OSError) as error:
            out[name] = Read(status, error)
    return out


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


_SILENT_S = 1.0  # what takes longer is told
_COLUMNS = "name, fingerprint, n_tokens, n_bytes, size, mtime_ns, used_ns, length(tokens)"


class Library:
    """Session files of one folder. It holds nothing but the path, so threads may share it.

    The index is made, with mode 0600, when the first session is added: whoever only looks at a
    folder leaves it as it is. Several processes may use a folder at once: each call is one
    transaction. Every method raises `BadSession` for a damaged index, and `KvrtError` for one that
    cannot be reached or written.
    """

    def __init__(self, folder: Path, *, tell: Callable[[str], None] | None = None):
        """Makes the folder with mode 0700 where it is missing.

        Args:
          folder: of the sessions.
          tell: called with a line if making an older index into one of today takes long.

        Raises:
          UsageError: it cannot be made, or is no folder.
        """
        self.folder = index.library_folder(folder)
        self._tell = tell

    def check_writable(self) -> None:
        """Refuses a folder that no session can be added to.

        Raises:
          UsageError: it cannot be written.
        """
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise UsageError(f"{self.folder}: the folder cannot be written; give another one")

    def add(
        self,
        path: Path,
        fingerprint_digest: str,
        tokens: Tokens,
        n_bytes: int,
        used_ns: int | None = None,
    ) -> None:
        """Takes a file of the folder into the index, or what it has become.

        Args:
          path: a file in the folder itself; a name alone will do.
          fingerprint_digest: `fingerprint.digest` of the session.
          tokens: that the session holds, by position.
          n_bytes: what it counts for in a budget.
          used_ns: when it was used last, in ns since 1970; None for just now.

        Raises:
          UsageError: it is no file of the folder, or has no tokens or a negative size or time.
        """
        name = self._name(path)
        found = stored.status(self.folder / name)
        if found is None:
            raise UsageError(f"{name} is no file in {self.folder}; save it before it is added")
        content = Content(fingerprint=fingerprint_digest, tokens=tokens, n_bytes=n_bytes)
        with self._writing(make=True) as db:
            used_ns = self._now(db) if used_ns is None else not_taken(db, used_ns)
            insert(db, name, content, found, used_ns)

    def best(self, fingerprint_digest: str, tokens: Tokens) -> Match | None:
        """The session that begins with most of the tokens; None if none does with any.

        Of equal ones it is the shortest, then the one used last. Files that are gone or have
        changed do not count.
        """
        ids = as_int32(tokens)
        with self._reading() as db:
            for depth, digest in reversed(list(enumerate(chain(fingerprint_digest, ids)))):
                found = self._candidates(db, digest, ids, (depth + 1) * BLOCK)
                found.sort(key=lambda m: (-m.n_common, m.entry.n_tokens, -m.entry.used_ns))
                for match in found:
                    e = match.entry
                    if match.n_common and e.fingerprint == fingerprint_digest and is_as_added(e):
                        return match
        return None

    def take_in(self, entries: Sequence[Entry], contents: Mapping[str, Content]) -> None:
        """Adds sessions that the index does not know, and drops what `sync` drops.

        What another process has added or written since the files were looked at stays as it is.

        Args:
          entries: newest use first.
          contents: of those that may be unknown, by name.
        """
        with self._writing(make=bool(contents)) as db:
            self._drop_stale(db)
            known = {e.path.name for e in self._entries(db)}
            # Oldest first: of equal times of use the index counts the one added later as newer.
            for entry in reversed(entries):
                name, now = entry.path.name, stored.status(entry.path)
                if name in contents and name not in known and now and is_as_added(entry, now):
                    insert(db, name, contents[name], now, not_taken(db, entry.used_ns))

    def touch(self, path: Path) -> bool:
        """Notes that a session was used; False if the index does not know it."""
        name = self._name(path)
        with self._writing() as db:
            change = "UPDATE sessions SET used_ns = ? WHERE name = ?"
            return bool(db.execute(change, (self._now(db), name)).rowcount)

    def entries(self) -> tuple[Entry, ...]:
        """All sessions, newest use first."""
        with self._reading() as db:
            return tuple(self._entries(db))

    def tree(self, fingerprint_digest: str) -> RadixTree:
        """The token histories of all sessions of one fingerprint by prefix, named by their files.

        It shows what is shared and which histories no other one continues; `best` finds the same
        session without reading all of them.
        """
        found = RadixTree()
        with self._reading() as db:
            rows = db.execute(
                "SELECT name, tokens FROM sessions WHERE fingerprint = ? ORDER BY used_ns",
                (fingerprint_digest,),
            )
            for name, blob in rows:
                if not (isinstance(name, str) and index.is_name(name) and isinstance(blob, bytes)):
                    raise index.damaged(self.folder, f"the entry {str(name)[:80]!r} is impossible")
                found.insert(self.folder / name, np.frombuffer(blob, "<i4").astype(np.int32))
        return found

    def scan(self) -> Scan:
        """What the index says of files that are as they were added; nothing is written."""
        with self._reading() as db:
            index.check_pages(self.folder, db)
            known = self._entries(db)
        entries = tuple(e for e in known if is_as_added(e))
        n_stale = len(known) - len(entries)
        return Scan(entries=entries, others=self._others(entries), n_stale=n_stale)

    def sync(self) -> Synced:
        """Drops what the index says of files that are gone or have changed; no file is touched.

        A changed file is one that is not indexed, until it is added again.
        """
        with self._writing() as db:
            index.check_pages(self.folder, db)
            dropped = self._drop_stale(db)
            entries = self._entries(db)
        return Synced(dropped=dropped, unindexed=self._others(entries))

    def _others(self, entries: Sequence[Entry]) -> tuple[str, ...]:
        known = {e.path.name for e in entries}
        return tuple(sorted(name for name in stored.names(self.folder) if name not in known))

    def prune(self, max_bytes: int) -> tuple[Entry, ...]:
        """Deletes the sessions used least recently until the others count for max_bytes at most.

        Those that are not indexed are neither counted nor deleted. Each is looked at again under
        its own lock: one that is being saved, or was saved meanwhile, stays, and is counted.

        Returns:
          What was deleted, in this order.

        Raises:
          UsageError: max_bytes is negative.
          KvrtError: one cannot be deleted; the message names those before it, which are gone.
        """
        if max_bytes < 0:
            raise UsageError(f"a budget of {max_bytes} bytes; it must be at least 0")
        removed = []
        # Files go before the index forgets them: what a kill leaves behind, `sync` finds.
        with self._writing() as db:
            index.check_pages(self.folder, db)
            self._drop_stale(db)
            entries = self._entries(db)
            n_bytes = sum(e.n_bytes for e in entries)
            for entry in reversed(entries):
                if n_bytes > max_bytes and _delete(entry, removed):
                    forget(db, entry.path.name)
                    removed.append(entry)
                    n_bytes -= entry.n_bytes
        return tuple(removed)

    def rebuild(self, read_tokens: Callable[[Path], Content] = content_of) -> Rebuilt:
        """Writes a new index of all sessions of the folder in place of the one there is.

        The order of last use becomes that of the files' last reads and changes. The sessions are
        read before other processes have to wait; one that was saved meanwhile is read again. Where
        there is neither a session nor an index, none is made.

        Args:
          read_tokens: reads a session file; one that it refuses is left out.
        """
        before = read_files(self.folder, read_tokens, {})
        added, refused = [], {}
        with index.replacing(self.folder) as db:
            now = read_files(self.folder, read_tokens, before)
            for name in sorted(now, key=lambda x: (stored.last_use_ns(now[x].status), x)):
                status, content = now[name]
                try:
                    if isinstance(content, Exception):
                        raise content
                    used_ns = not_taken(db, stored.last_use_ns(status))
                    insert(db, name, content, status, used_ns)
                except (KvrtError, OSError) as e:
                    refused[name] = str(e)
                else:
                    added.append(name)
        return Rebuilt(added=tuple(added), refused=refused)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """The index, as it is at one moment; an older one is made into one of today first."""
        with contextlib.ExitStack() as stack:
            try:
                db = stack.enter_context(index.reading(self.folder))
            except index.OlderIndex:
                self._renew()
                db = stack.enter_context(index.reading(self.folder))
            yield db

    @contextlib.contextmanager
    def _writing(self, *, make: bool = False) -> Iterator[sqlite3.Connection]:
        """The index to change, likewise."""
        with contextlib.ExitStack() as stack:
            try:
                db = stack.enter_context(index.writing(self.folder, make=make))
            except index.OlderIndex:
                self._renew()
                db = stack.enter_context(index.writing(self.folder, make=make))
            yield db

    def _renew(self) -> None:
        """Writes the entries of an older index anew from their files; times of use stay.

        Files that are gone, have changed or cannot be read are left out, as `sync` would do it.
        """
        start, tell = time.monotonic(), self._tell

        def unchanged(db: sqlite3.Connection) -> list[Entry]:
            return [e for e in self._entries(db) if is_as_added(e)]

        with index.renewing(self.folder, unchanged) as found:
            db, known = found or (None, [])
            for entry in reversed(known):
                if tell is not None and time.monotonic() - start > _SILENT_S:
                    tell(
                        f"{self.folder}: its index is of an older kvrt and is rebuilt once, from "
                        f"{len(known):,} sessions"
                    )
                    tell = None
                status = stored.status(entry.path)
                with contextlib.suppress(KvrtError, OSError):
                    if db is not None and status is not None:
                        content = content_of(entry.path)
                        insert(db, entry.path.name, content, status, entry.used_ns)

    def _name(self, path: Path) -> str:
        """The name of a file of the folder."""
        path = Path(path)
        inside = path.parent == Path() or path.parent.resolve() == self.folder
        if not inside or not index.is_name(path.name):
            raise UsageError(
                f"{str(path)!r} is no session of {self.folder}; name a file in this folder that is "
                "neither hidden nor the index"
            )
        return path.name

    def _candidates(
        self, db: sqlite3.Connection, digest: bytes, ids: np.ndarray, n: int
    ) -> list[Match]:
        """Sessions with a block of this digest, compared by their first n tokens."""
        rows = db.execute(
            f"SELECT {_COLUMNS}, substr(tokens, 1, ?) FROM sessions JOIN blocks USING (name) "
            "WHERE digest = ?",
            (4 * n, digest),
        )
        out = []
        for *row, blob in rows:
            entry = self._entry(row)
            if not isinstance(blob, bytes):
                raise index.damaged(self.folder, f"the tokens of {entry.path.name} are text")
            held = np.frombuffer(blob, "<i4").astype(np.int32)
            out.append(Match(entry=entry, n_common=common_prefix(held, ids)))
        return out

    def _entries(self, db: sqlite3.Connection) -> list[Entry]:
        rows = db.execute(f"SELECT {_COLUMNS} FROM sessions ORDER BY used_ns DESC")
        return [self._entry(row) for row in rows]

    def _entry(self, row: Sequence[Any]) -> Entry:
        """A row that says nothing impossible; above all, no name that leads elsewhere."""
        name, fingerprint, *numbers, n_token_bytes = row
        sound = isinstance(name, str) and index.is_name(name) and isinstance(fingerprint, str)
        # A file may have been changed before 1970, by its own account.
        sound = sound and all(isinstance(x, int) and abs(x) < MAX_INT for x in numbers)
        sound = sound and all(x >= 0 for x in (*numbers[:3], numbers[4]))
        if not sound or n_token_bytes != 4 * numbers[0]:
            raise index.damaged(self.folder, f"the entry {str(name)[:80]!r} is impossible")
        n_tokens, n_bytes, size, mtime_ns, used_ns = numbers
        return Entry(
            path=self.folder / name,
            fingerprint=fingerprint,
            n_tokens=n_tokens,
            n_bytes=n_bytes,
            size=size,
            mtime_ns=mtime_ns,
            used_ns=used_ns,
        )

    def _drop_stale(self, db: sqlite3.Connection) -> tuple[str, ...]:
        names = sorted(e.path.name for e in self._entries(db) if not is_as_added(e))
        for name in names:
            forget(db, name)
        return tuple(names)

    def _now(self, db: sqlite3.Connection) -> int:
        """The time, later than every use so far, also where a clock was put back."""
        (last,) = db.execute("SELECT max(used_ns) FROM sessions").fetchone()
        if last is not None and not (isinstance(last, int) and 0 <= last < MAX_INT):
            raise index.damaged(self.folder, f"a session was used at {str(last)[:40]!r}")
        return max(time.time_ns(), 0 if last is None else last + 1)


def _delete(entry: Entry, before: Sequence[Entry]) -> bool:
    """Deletes a session that is still as its entry says; False where it is not."""
    try:
        return atomic.remove(entry.path, lambda: is_as_added(entry))
    except OSError as e:
        gone = f"; deleted before it: {', '.join(x.path.name for x in before)}" if before else ""
        raise KvrtError(
            f"{entry.path} cannot be deleted: {e.strerror}; delete it by hand or raise the "
            f"budget{gone}"
        ) from e
