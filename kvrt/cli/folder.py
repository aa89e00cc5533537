"""Sessions of a folder: what its index is told of each."""

from pathlib import Path

from kvrt.cli.head import Head, open_head
from kvrt.errors import BadSession, KvrtError
from kvrt.session import fingerprint
from kvrt.session.library import Content, Library


def content(path: Path) -> Content:
    """What a session says of itself.

    Raises:
      BadSession: it is damaged, no session, or holds no token that could be found again.
    """
    head = open_head(path)
    return of_head(head)


def of_head(head: Head) -> Content:
    """The same of a session that is open."""
    ids = head.held[1][: head.manifest.exact.get(head.seq_id)]
    if not len(ids):
        raise BadSession(f"{head.path}: it holds no tokens that a prompt could begin with")
    digest = fingerprint.digest(head.manifest.fingerprint)
    return Content(fingerprint=digest, tokens=ids, n_bytes=head.path.stat().st_size)


def take_in(library: Library) -> dict[str, str]:
    """Adds the sessions that the index does not know; returns why others are left out."""
    refused = {}
    for name in library.sync().unindexed:
        path = library.folder / name
        try:
            found = content(path)
            library.add(path, found.fingerprint, found.tokens, found.n_bytes)
        except KvrtError as error:
            refused[name] = str(error)
    return refused
