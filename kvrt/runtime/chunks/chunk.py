"""A text that was computed alone, in memory and as a session file.

A chunk's file is a plain session: one sequence from position 0 on, computed in one go, whose first
tokens are the lead. Whatever made such a session, its keys and values are those of the chunk, since
no token sees a later one; nothing else has to be said in it.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvrt import session
from kvrt.arrays import Int32
from kvrt.cellcache import history
from kvrt.errors import UsageError
from kvrt.session import OpenedSession, Saved
from kvrt.session.snapshot import Snapshot


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedChunk:
    """A text that was computed alone, behind a lead.

    Attributes:
      snapshot: whose only sequence it is, with nothing else in it.
      n_lead: tokens at its beginning that stay away unless it is the first chunk, such as BOS.
    """

    snapshot: Snapshot
    n_lead: int = 0

    @property
    def seq_id(self) -> int:
        """The sequence of the snapshot."""
        return self.snapshot.seq_ids[0]

    @property
    def tokens(self) -> Int32[np.ndarray, " n"]:
        """Its tokens, the lead first."""
        return history.tokens(self.snapshot.history, self.seq_id)

    def save(self, path: str | Path) -> Saved:
        """Writes it as a session, whole or not at all.

        Raises:
          SaveError: it cannot be written, or the path holds something that is no session.
        """
        return session.save(path, self.snapshot)

    @classmethod
    def load(cls, session: str | Path | OpenedSession, lead: Sequence[int] = ()) -> "CachedChunk":
        """A session as a chunk.

        Args:
          session: its path, or what was opened.
          lead: what its tokens begin with, and at least one more follows.

        Raises:
          BadSession: it is damaged, or no session.
          UsageError: it is no text that was computed alone behind this lead.
        """
        return _load(session, lead)


class StoredChunk:
    """A chunk whose keys and values are still in its session; `Runtime.blend` reads them.

    It does so on a worker, while it computes. From then on they stay in memory.

    Attributes:
      n_lead: as of a `CachedChunk`.
      tokens: its tokens, the lead first.
      load_s: that reading took; 0 before.
    """

    def __init__(self, session: str | Path | OpenedSession, lead: Sequence[int] = ()):
        """Reads all but keys and values; arguments and errors as of `CachedChunk.load`."""
        self._opened, self._lead = _opened(session), tuple(lead)
        self._read: CachedChunk | None = None
        self.n_lead, self.load_s = len(self._lead), 0.0
        self.tokens = tokens_of(self._opened, self._lead)

    @property
    def is_read(self) -> bool:
        """Whether its keys and values are in memory."""
        return self._read is not None

    def read(self) -> CachedChunk:
        """The chunk; the same one each time.

        Raises:
          BadSession: its keys and values are damaged.
        """
        if self._read is None:
            start = time.perf_counter()
            self._read = CachedChunk.load(self._opened, self._lead)
            self.load_s = time.perf_counter() - start
        return self._read


def _opened(found: str | Path | OpenedSession) -> OpenedSession:
    return found if isinstance(found, OpenedSession) else session.open_session(found)


def _load(found: str | Path | OpenedSession, lead: Sequence[int]) -> CachedChunk:
    opened = _opened(found)
    tokens_of(opened, lead)
    # Where it was in blocks, and how its text went on, are nothing that a blend asks for.
    snapshot = dataclasses.replace(
        session.read(opened),
        in_blocks=(),
        draws={},
        logits={},
        checkpoints=(),
        policy=None,
        policies={},
    )
    return CachedChunk(snapshot=snapshot, n_lead=len(lead))


def tokens_of(opened: OpenedSession, lead: Sequence[int]) -> Int32[np.ndarray, " n"]:
    """Tokens of a session that is a chunk, the lead first; no keys and values are read.

    Raises:
      UsageError: it is none; the message says why.
    """
    why = _unfit(opened, lead)
    if why:
        raise UsageError(f"{opened.path}: {why}")
    return opened.held[1]


def _unfit(opened: OpenedSession, lead: Sequence[int]) -> str:
    """Why a session is no chunk, and what to do; "" of one that is."""
    if len(opened.seq_ids) != 1:
        return f"holds {len(opened.seq_ids)} sequences, and a chunk is one; save it alone"
    (seq_id,), (pos, ids) = opened.seq_ids, opened.held
    whole = not any(group.lost.get(seq_id) for group in opened.groups)
    if not whole or not np.array_equal(pos, np.arange(len(pos))):
        return (
            "lacks keys and values of tokens that were dropped or left a window; read the text "
            "anew, with --swa_full where layers have windows"
        )
    n_exact = opened.history.exact.get(seq_id)
    if n_exact is not None and n_exact < len(ids):
        return (
            f"behind its first {n_exact} tokens it was moved or blended, or sampled by sparse "
            "reads, so it was not computed alone; read the text anew"
        )
    if ids[: len(lead)].tolist() != list(lead):
        return (
            f"begins with token {ids[0]} and not with the lead {list(lead)}, so that its first "
            "token has become a sink of its own; make it with kvrt prefill --as_chunk"
        )
    if len(ids) == len(lead):
        return "holds the lead alone; give a chunk with at least one token of text"
    return ""
