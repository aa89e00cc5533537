"""A session that was opened: its manifest parsed and checked once, its arrays read later."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int32  # not from arrays: a list of sessions needs no JAX

from kvrt.cellcache import history as histories
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.saved import SavedCells
from kvrt.errors import BadSession, CacheFull, SessionMismatch, UsageError
from kvrt.session import codec
from kvrt.session.kv_file.blobs import Tensors
from kvrt.session.manifest import Manifest
from kvrt.session.snapshot import SamplingState

_SHOWN = 8  # sequences that a message lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedSession:
    """All of a session but its cached keys and values, checked; `kvrt.session.read` reads those.

    Attributes:
      path: a file, or a folder.
      manifest: sizes and settings.
      sha256: of the manifest's bytes; a session that was saved again since has another.
      meta: arrays of cells, tokens and logits, as the session has them.
      groups: cells of each group.
      history: tokens of every sequence.
      chosen: the sequence that is meant; None is the first.
    """

    path: Path
    manifest: Manifest
    sha256: bytes
    meta: Tensors = dataclasses.field(repr=False)
    groups: tuple[SavedCells, ...] = dataclasses.field(repr=False)
    history: TokenHistory = dataclasses.field(repr=False)
    chosen: int | None = None

    @property
    def seq_id(self) -> int:
        """The sequence that is meant: the one that was chosen, or the first; 0 without any."""
        first = min(self.history.pieces, default=0)
        return first if self.chosen is None else self.chosen

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Sequences that hold something, ascending."""
        return tuple(sorted(self.history.pieces))

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Puts the session's path in front of what says that it does not fit."""
        try:
            yield
        except (SessionMismatch, CacheFull) as error:
            raise type(error)(f"{self.path}: {error}") from error

    def choose(
        self, seq_id: int | None, *, may_be_new: bool = False, name: str = "seq_id"
    ) -> "OpenedSession":
        """The session with the sequence that is meant; without a choice the only one.

        Args:
          seq_id: the sequence; None leaves it open.
          may_be_new: it may be one that the session does not hold yet.
          name: of the choice, for the message.

        Raises:
          UsageError: it holds several and none is named, or not the one that is.
        """
        there, n_tokens = self.seq_ids, self.manifest.n_tokens
        only = len(there) <= 1 if seq_id is None else may_be_new
        if only or seq_id in there:
            return dataclasses.replace(self, chosen=seq_id)
        listed = ", ".join(
            f"{s} ({n_tokens[s]:,} {'token' if n_tokens[s] == 1 else 'tokens'})"
            for s in there[:_SHOWN]
        )
        more = f" and {len(there) - _SHOWN:,} more" if len(there) > _SHOWN else ""
        lacks = "" if seq_id is None else f", and no {seq_id}"
        raise UsageError(
            f"{self.path}: holds {'sequences' if len(there) > 1 else 'sequence'} "
            f"{listed or 'none'}{more}{lacks}; choose one with {name}"
        )

    @property
    def draw(self) -> SamplingState | None:
        """Where the sampling of that sequence was left."""
        return self.manifest.draws.get(self.seq_id)

    @property
    def held(self) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
        """Positions and ids of that sequence's tokens, by position."""
        found = histories.entries(self.history, self.seq_id)
        return found[0], found[1]


def opened_session(path: Path, found: Manifest, sha256: bytes, meta: Tensors) -> OpenedSession:
    """A session of such a manifest, whose cells and tokens fit it and each other.

    Raises:
      BadSession: they do not; the message names the path.
    """
    try:
        groups, history = codec.cells(found, meta)
    except BadSession as error:
        raise BadSession(f"{path}: {error}") from error
    return OpenedSession(
        path=path, manifest=found, sha256=sha256, meta=meta, groups=groups, history=history
    )
