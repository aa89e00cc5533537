"""What a session file says of itself, for the index of its folder."""

from pathlib import Path

from kvrt.errors import BadSession
from kvrt.session import fingerprint, io
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
    return Content(fingerprint=digest, tokens=ids, n_bytes=path.stat().st_size)
