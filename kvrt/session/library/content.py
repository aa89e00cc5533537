"""What session files say of themselves, for the index of their folder."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from kvrt.errors import BadSession, KvrtError
from kvrt.session import fingerprint, io
from kvrt.session.library import stored
from kvrt.session.library.entries import Content


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
