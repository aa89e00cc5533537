"""What tests of the library do to it."""

import contextlib
import sqlite3
from pathlib import Path

from kvrt.session.library import index

F = "f" * 64


def put(library, name, tokens, *, fingerprint=F, n_bytes=10):
    (library.folder / name).write_bytes(b"x" * n_bytes)
    library.add(Path(name), fingerprint, tokens, n_bytes)


def names(entries):
    return [e.path.name for e in entries]


def best(library, tokens, fingerprint=F):
    match = library.best(fingerprint, tokens)
    return match and (match.entry.path.name, match.n_common)


def change(library, *commands):
    """Changes the index behind the library's back."""
    with contextlib.closing(sqlite3.connect(library.folder / index.NAME)) as db, db:
        for command in commands:
            db.execute(command)


def line(error):
    text = str(error.value)
    assert "\n" not in text
    return text
