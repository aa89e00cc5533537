"""What a save may replace: the tokens that would be lost, and where the former session stays.

A session is work: a prompt that was read, and an answer that exists nowhere else. Whoever saves
over one asks here first, under the lock of its name (`before` of `session.save`).
"""

import dataclasses
import enum
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int  # not from arrays: a session is compared without JAX

from kvrt.cellcache import history as texts
from kvrt.cellcache.history import TokenHistory
from kvrt.errors import BadSession, SaveError
from kvrt.files import atomic
from kvrt.reuse.diff import common_prefix, runs
from kvrt.session import codec
from kvrt.session.fingerprint import Fingerprint, digest
from kvrt.session.kv_file import file as kv_file
from kvrt.session.orbax import folder
from kvrt.session.snapshot import Snapshot

MAX_TOKENS = 64  # losing more than these
MAX_SHARE = 10  # and more than one in so many is refused
_LEAST_RUN = 32  # tokens in common behind the first difference that are no coincidence

Ids = Sequence[int] | Int[np.ndarray, " _"]


class Change(enum.Enum):
    """What new tokens do to those that a session holds."""

    KEEPS = "all held tokens are in it"
    EDITS = "few are not: the former session is kept"
    LOSES = "many are not: refused"


def judge(n_held: int, n_lost: int) -> Change:
    """What losing n_lost of n_held tokens is: more than 64 and more than a tenth is a loss."""
    if n_lost == 0:
        return Change.KEEPS
    if n_lost > MAX_TOKENS and n_lost * MAX_SHARE > n_held:
        return Change.LOSES
    return Change.EDITS


def n_lost(held: Ids, new: Ids) -> int:
    """SessionTokens tokens that are not among the new ones in the same order.

    The common beginning is, and common runs of at least 32 tokens behind the first difference:
    after an insertion nothing is lost, and of a text without its middle nothing that is left.
    """
    a, b = np.asarray(held, np.int32), np.asarray(new, np.int32)
    same = common_prefix(a, b)
    return len(a) - same - sum(run.n for run in runs(a[same:], b[same:], _LEAST_RUN))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionTokens:
    """The tokens of a session.

    Attributes:
      fingerprint: of the model and cache that it belongs to.
      ids: tokens of its first sequence, or of the one that is to be written.
      n_more: tokens of its other sequences, where these would go.
    """

    fingerprint: Fingerprint
    ids: Int[np.ndarray, " T"]
    n_more: int = 0

    @property
    def n(self) -> int:
        """Tokens of all sequences."""
        return len(self.ids) + self.n_more

    def n_lost(self, new: Ids) -> int:
        """Tokens that are not in a new history of one sequence."""
        return n_lost(self.ids, new) + self.n_more

    def is_alike(self, other: "SessionTokens") -> bool:
        """Whether both are of one model and cache."""
        return digest(self.fingerprint) == digest(other.fingerprint)

    def is_same(self, other: "SessionTokens") -> bool:
        """Whether both are the same tokens of one model and cache."""
        same = self.n_more == other.n_more and np.array_equal(self.ids, other.ids)
        return same and self.is_alike(other)


def read_held(path: Path, seq_id: int | None = None) -> SessionTokens:
    """The tokens of a session on the disk; cached keys and values are not read.

    Args:
      path: of the session.
      seq_id: the only sequence that is to be written; None is all of them.

    Raises:
      BadSession: it is damaged, or no session.
    """
    found, meta = (folder if path.is_dir() else kv_file).read_cells(path)
    history = codec.history_in(found, meta)
    if seq_id is None:
        return _held(history, found.fingerprint)
    return SessionTokens(fingerprint=found.fingerprint, ids=texts.tokens(history, seq_id))


def held_by(snapshot: Snapshot) -> SessionTokens:
    """The tokens of a session in memory."""
    return _held(snapshot.history, snapshot.fingerprint)


def _held(history: TokenHistory, fingerprint: Fingerprint) -> SessionTokens:
    first, *others = sorted(history.pieces) or [0]
    n_more = sum(len(texts.positions(history, s)) for s in others)
    return SessionTokens(fingerprint=fingerprint, ids=texts.tokens(history, first), n_more=n_more)


def refuse_existing(path: Path) -> None:
    """A `before` for a name that has to be free.

    Raises:
      SaveError: something is there.
    """
    if os.path.lexists(path):
        raise SaveError(f"{path}: is there already and stays as it is; give another name")


def free_name(path: Path) -> Path:
    """The first of book-2.kv, book-3.kv, ... that is free."""
    numbered = (path.with_name(f"{path.stem}-{n}{path.suffix}") for n in range(2, 1 << 31))
    return next(p for p in numbered if not os.path.lexists(p))


def keep_former(path: Path) -> Path:
    """Keeps a session as book.kv~ beside it; call it under the lock of the path.

    A session that has this name already is replaced if that loses few tokens (`judge`), anything
    else stays: then it is book.kv~2, and so on.

    Returns:
      Where it is kept.

    Raises:
      BadSession: there is no sound session at the path.
      SaveError: a lock could not be had.
      OSError: the system refuses the copy.
    """
    held = read_held(path)
    return _keep(path, lambda kept: _gives_way(kept, held))


def keep_damaged(path: Path) -> Path:
    """Keeps a session that cannot be read as book.kv~, or book.kv~2 and so on where that is taken.

    Call it under the lock of the path.

    Returns:
      Where it is kept.

    Raises:
      SaveError: a lock could not be had.
      OSError: the system refuses the copy.
    """
    return _keep(path, lambda kept: not os.path.lexists(kept))


def _keep(path: Path, is_free: Callable[[Path], bool]) -> Path:
    for kept in atomic.backup_names(path):
        with atomic.locked(kept):
            if is_free(kept):
                _duplicate(path, kept)
                return kept
    raise AssertionError("there are 2^31 names")


def _gives_way(kept: Path, held: SessionTokens) -> bool:
    """Whether an older backup may be replaced by this one."""
    if not os.path.lexists(kept):
        return True
    if kept.is_symlink():
        return False
    try:
        older = read_held(kept)
    except BadSession:
        return False
    return judge(older.n, older.n_lost(held.ids)) is not Change.LOSES


def _duplicate(path: Path, kept: Path) -> None:
    """A second name for a file, or a copy where the file system has no such names."""
    # A killed one may have left this very name: numbers of processes come again.
    atomic.sweep(kept)
    new = atomic.temporary(kept)
    try:
        if path.is_dir():
            # Files of a folder session are replaced or removed, never written again.
            shutil.copytree(path, new, copy_function=_link)
        else:
            _link(path, new)
        if kept.is_dir():
            shutil.rmtree(kept)
        os.replace(new, kept)
        # Before what has its name now is replaced.
        atomic.sync_folder(path.parent)
    finally:
        # Two names of one file are left alone by a rename.
        shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())
