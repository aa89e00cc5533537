"""The index file of a folder of sessions: an SQLite database that is checked before it is used.

Two locks: SQLite's own on the file for every transaction, and one on the folder. Readers share that
of the folder; a writer has it alone, so that writers take turns where SQLite's would overtake each
other, and a damaged index is replaced while no process has it open.
"""

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvrt.errors import BadSession, KvrtError, UsageError
from kvrt.files import atomic, locks

NAME = "index.sqlite3"
# 1 had digests of fingerprints that left out defaults.
VERSION, OLDER = 2, (1,)
WAIT_S = 30.0  # for other processes, then an error
_JOURNAL = "-journal"
_COMPANIONS = tuple(f"{NAME}{end}" for end in (_JOURNAL, "-wal", "-shm"))
_KIND = 0x6B767274  # "kvrt", SQLite's field for what an application's file is
_TABLES = (
    "CREATE TABLE sessions (name TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, "
    "tokens BLOB NOT NULL, n_tokens INTEGER NOT NULL, n_bytes INTEGER NOT NULL, "
    "size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, used_ns INTEGER NOT NULL)",
    "CREATE TABLE blocks (digest BLOB NOT NULL, name TEXT NOT NULL, "
    "PRIMARY KEY (digest, name)) WITHOUT ROWID",
    "CREATE INDEX blocks_of ON blocks (name)",
)
_T = TypeVar("_T")
# What SQLite says of a file that is not, or no longer, a database of ours.
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


class OlderIndex(BadSession):
    """The index is of a version that this kvrt makes into its own, see `Library`."""


def is_name(name: str) -> bool:
    """Whether it can name a session: in the folder itself, not hidden, not the index."""
    if not name or name.startswith(".") or name == NAME or name in _COMPANIONS:
        return False
    return not any(c in "/\\" or not c.isprintable() for c in name)


def library_folder(folder: Path) -> Path:
    """The folder without links in its path, made with mode 0700 if it is missing.

    Raises:
      UsageError: it cannot be made, or is no folder.
      BadSession: the index is a link.
    """
    folder = Path(folder)
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
        folder = folder.resolve(strict=True)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory")
    except OSError as e:
        raise UsageError(
            f"{folder} cannot be a folder of sessions: {e.strerror}; name one that can be written"
        ) from e
    _is_there(folder)
    return folder


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """The index, as it is at one moment; one that is not there reads as empty and is not made.

    Raises:
      BadSession: it is damaged, of another version or not of kvrt.
      KvrtError: it cannot be opened, or others have it for too long.
    """
    with _transaction(folder) as db:
        _check_tables(folder, db)
        yield db


@contextlib.contextmanager
def writing(folder: Path, *, make: bool = False) -> Iterator[sqlite3.Connection]:
    """The index to change; all changes are made, or none after an error.

    Args:
      folder: of the index.
      make: makes a missing index, with mode 0600; without it an empty one stands in for it, which
        is thrown away.

    Raises:
      BadSession: as in `reading`.
      KvrtError: as in `reading`, or it cannot be written.
    """
    with _transaction(folder, writes=True, make=make) as db:
        _check_tables(folder, db)
        yield db


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[sqlite3.Connection]:
    """A new index, which takes the place of the one there is; after an error that one stays.

    One without sessions is not put where none is.

    Raises:
      KvrtError: it cannot be written, or others have the old one for too long.
    """
    with _locked(folder, shared=False), _explained(folder), _replacement(folder) as db:
        yield db


@contextlib.contextmanager
def renewing(
    folder: Path, read: Callable[[sqlite3.Connection], _T]
) -> Iterator[tuple[sqlite3.Connection, _T] | None]:
    """A new index in place of one of an older version; None if another process was quicker.

    Args:
      folder: of the index.
      read: gets the older index, whose tables are those of today; the result is given on.

    Raises:
      BadSession: the older index is damaged.
      KvrtError: as in `replacing`.
    """
    with _locked(folder, shared=False), _explained(folder):
        with contextlib.closing(_connect(folder / NAME)) as older:
            older.execute("BEGIN")
            try:
                _check_tables(folder, older)
            except OlderIndex:
                _check_tables(folder, older, older=True)
                found = read(older)
            else:
                yield None
                return
        with _replacement(folder) as db:
            yield db, found


@contextlib.contextmanager
def _replacement(folder: Path) -> Iterator[sqlite3.Connection]:
    temporary = _temporary(folder)
    try:
        with contextlib.closing(_connect(temporary)) as db:
            db.execute("BEGIN IMMEDIATE")
            _create(db)
            yield db
            is_empty = not db.execute("SELECT 1 FROM sessions").fetchone()
            db.execute("COMMIT")
        if is_empty and not _is_there(folder):
            return
        # A journal that an interrupted change left belongs to the old index alone.
        for name in _COMPANIONS:
            (folder / name).unlink(missing_ok=True)
        os.replace(temporary, folder / NAME)
    finally:
        for end in ("", _JOURNAL):
            temporary.with_name(temporary.name + end).unlink(missing_ok=True)


def check_pages(folder: Path, db: sqlite3.Connection) -> None:
    """Reads the whole index once.

    Raises:
      BadSession: SQLite finds its pages damaged.
    """
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise damaged(folder, " ".join(str(found).split()))


def damaged(folder: Path, what: str) -> BadSession:
    """The error that says so."""
    return BadSession(
        f"{folder / NAME} is damaged ({what}); the sessions beside it are not touched, rebuild the "
        "index from them"
    )


def _is_there(folder: Path) -> bool:
    for name in (NAME, *_COMPANIONS):  # SQLite opens all of them, and waits for a pipe.
        path = folder / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise BadSession(f"{path} is a link or no file, an index must be a file; remove it")
    return (folder / NAME).exists()


@contextlib.contextmanager
def _transaction(
    folder: Path, *, writes: bool = False, make: bool = False
) -> Iterator[sqlite3.Connection]:
    with _locked(folder, shared=not writes), _explained(folder):
        is_new = not _is_there(folder) or not (folder / NAME).stat().st_size
        with contextlib.closing(_open(folder, is_new=is_new, make=make)) as db:
            db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            # Another process may have been quicker.
            if is_new and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
                _create(db)
            yield db
            # Without it, after an error, closing takes everything back.
            db.execute("COMMIT")


def _open(folder: Path, *, is_new: bool, make: bool) -> sqlite3.Connection:
    if is_new and not make:
        return sqlite3.connect(":memory:", isolation_level=None)
    if is_new:
        # Never opened again outside SQLite: closing it would give SQLite's locks away.
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        try:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(folder / NAME, flags, 0o600))
        except OSError as e:
            raise KvrtError(
                f"{folder / NAME} cannot be made: {e.strerror}; look at the permissions of the "
                "folder and the room on its disk"
            ) from e
    return _connect(folder / NAME)


def _connect(path: Path) -> sqlite3.Connection:
    uri = f"{path.as_uri()}?mode=rw"
    db = sqlite3.connect(uri, uri=True, timeout=WAIT_S, isolation_level=None)
    db.execute("PRAGMA trusted_schema = OFF")
    db.execute("PRAGMA cell_size_check = ON")
    # SQLite's own default, which a build can change: a change is on the disk when it is done.
    db.execute("PRAGMA synchronous = FULL")
    return db


def _temporary(folder: Path) -> Path:
    """An empty file of mode 0600; those of rebuilds that were killed go."""
    path = atomic.temporary(folder / NAME)
    try:
        for end in (".tmp", f".tmp{_JOURNAL}"):
            atomic.sweep(folder / NAME, end)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, atomic.MODE))
    except OSError as e:
        raise KvrtError(
            f"a new index cannot be written in {folder}: {e.strerror}; look at its permissions and "
            "the room on its disk"
        ) from e
    return path


def _create(db: sqlite3.Connection) -> None:
    db.execute(f"PRAGMA application_id = {_KIND}")
    db.execute(f"PRAGMA user_version = {VERSION}")
    for table in _TABLES:
        db.execute(table)


def _check_tables(folder: Path, db: sqlite3.Connection, *, older: bool = False) -> None:
    (kind,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if kind == _KIND and version in OLDER and not older:
        raise OlderIndex(f"{folder / NAME} is of version {version}; rebuild the index")
    if kind == _KIND and version not in (VERSION, *OLDER):
        raise BadSession(
            f"{folder / NAME} is of version {version}, this kvrt reads {VERSION}; use the kvrt "
            "that wrote it, or rebuild the index"
        )
    found = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_master") if sql is not None}
    # Anything else, a trigger for one, is not of our making.
    if kind != _KIND or found != set(_TABLES):
        raise damaged(folder, "its tables are not those of an index")


@contextlib.contextmanager
def _locked(folder: Path, *, shared: bool) -> Iterator[None]:
    """A lock on the folder."""
    with contextlib.ExitStack() as stack:
        try:
            lock = locks.locked_folder(folder, NAME, shared=shared, timeout_s=WAIT_S)
            stack.enter_context(lock)
        except TimeoutError:
            raise _busy(folder) from None
        except OSError as e:
            raise KvrtError(
                f"{folder} cannot be locked: {e.strerror}; is it still there, on a disk that can?"
            ) from e
        yield


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """SQLite's errors as ours, one line each."""
    try:
        yield
    except sqlite3.Error as e:
        code = getattr(e, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise _busy(folder) from e
        if code in _DAMAGE:
            raise damaged(folder, str(e)) from e
        raise KvrtError(
            f"{folder / NAME} cannot be used: {e}; look at its permissions and the room on its disk"
        ) from e


def _busy(folder: Path) -> KvrtError:
    return KvrtError(
        f"{folder / NAME} was in use by others for {WAIT_S:g} s; try again when they are done"
    )
