"""Chunks that `--chunk FILE` names: read from sessions, or computed from texts and kept."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvrt import CachedChunk, Runtime
from kvrt.arrays import Int32
from kvrt.cli.flags.session_files import BlendFlags
from kvrt.cli.process import output
from kvrt.cli.report.summary import Approximation
from kvrt.cli.run.prompt import read_text
from kvrt.errors import BadSession, KvrtError, UsageError, reason
from kvrt.runtime.chunks.chunk import StoredChunk
from kvrt.runtime.chunks.store import ChunkStore
from kvrt.session import OpenedSession
from kvrt.session.io import open_existing
from kvrt_models.tokenizer.encode import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkFile:
    """A file of a chunk.

    Attributes:
      path: of it.
      opened: a session.
      text: in place of a session.
    """

    path: Path
    opened: OpenedSession | None
    text: str = ""

    def tokens(self, lead: list[int], tokenizer: Tokenizer) -> Int32[np.ndarray, " n"]:
        """Its tokens, the lead first.

        Raises:
          UsageError: a text without a token.
        """
        if self.opened is not None:
            return self.opened.held[1]
        ids = tokenizer.encode(self.text, add_special=False)
        if not ids:
            raise UsageError(f"{self.path}: the text is empty; give at least one character")
        return np.array([*lead, *ids], np.int32)


def joined(chunks: Sequence[Sequence[int]], n_lead: int) -> list[int]:
    """Tokens of chunks one behind the other; of each but the first without its n_lead first."""
    return [t for i, ids in enumerate(chunks) for t in ids[n_lead if i else 0 :]]


def blended_part(tokens: Sequence[Sequence[int]], ratio: float) -> Approximation | None:
    """The approximate part of blended chunks: all behind the first; None if all was recomputed."""
    if len(tokens) == 1 or ratio >= 1:
        return None
    return Approximation(by="chunks", from_token=len(tokens[0]))


def open_chunk(name: str) -> ChunkFile:
    """A file as a session, or as a text.

    Raises:
      UsageError: nothing is there.
      BadSession: it is a damaged session, or neither.
    """
    path = Path(name)
    try:
        path.stat()
    except OSError as error:
        raise UsageError(f"{path}: {reason(error)}; give a text file, or a chunk") from error
    try:
        return ChunkFile(path, open_existing(path))
    except BadSession:
        if path.is_dir():
            raise
        with path.open("rb") as file:
            if b"\0" in file.read(4096):
                raise
        return ChunkFile(path, None, read_text("--chunk", name))


class ChunkReader:
    """Chunks for one runtime.

    Attributes:
      store: keeps texts, where a flag names its folder.
      n_computed: chunks that were computed.
      n_kept: of them those that the folder has now.
    """

    def __init__(self, runtime: Runtime, options: BlendFlags, lead: Sequence[int]):
        """Reads nothing yet.

        Args:
          runtime: computes what is not there; it has weights by then.
          options: name the folder, and say whether a damaged chunk is refused.
          lead: what chunks are computed behind.
        """
        folder = options.chunk_dir
        self.store = None if folder is None else ChunkStore(folder, tell=output.note)
        self._runtime, self._lead, self._strict = runtime, list(lead), options.strict
        self.n_computed = self.n_kept = 0

    def open(self, file: ChunkFile, tokens: Sequence[int]) -> CachedChunk | StoredChunk:
        """The chunk of a file, whose keys and values stay there until it is blended.

        What is not kept yet is computed. Where `Runtime.blend` finds damage, `read` mends it.

        Raises:
          KvrtError: as `read`.
        """
        if file.opened is not None:
            return StoredChunk(file.opened, self._lead)
        return self._found(tokens, stored=True)

    def read(self, file: ChunkFile, tokens: Sequence[int]) -> CachedChunk:
        """The chunk of a file; `tokens` are its own, the lead first.

        Raises:
          BadSession: it is damaged, and `strict`.
          KvrtError: it is no chunk, or does not fit.
        """
        if file.opened is None:
            found = self._found(tokens)
            return found.read() if isinstance(found, StoredChunk) else found
        try:
            return CachedChunk.load(file.opened, self._lead)
        except BadSession as error:
            self._damaged(error, "the file stays")
            return self._computed(tokens)

    def _found(self, tokens: Sequence[int], *, stored: bool = False) -> CachedChunk | StoredChunk:
        """The chunk of a text, which the folder keeps from then on; read, if not `stored`."""
        if self.store is None:
            return self._computed(tokens)
        here = self._runtime.fingerprint
        try:
            if (chunk := self.store.find_stored(here, tokens, self._lead)) is not None:
                return chunk if stored else chunk.read()
        except BadSession as error:
            self._damaged(error, "and takes its place")
        chunk = self._computed(tokens)
        try:
            self.store.add(here, chunk)
            self.n_kept += 1
        except KvrtError as error:
            output.warn(f"{error}; the answer goes on, and the text is not kept")
        return chunk

    def _damaged(self, error: BadSession, then: str) -> None:
        if self._strict:
            raise error
        output.warn(f"{error}; the chunk is computed again from its tokens, {then}")

    def _computed(self, tokens: Sequence[int]) -> CachedChunk:
        self.n_computed += 1
        return self._runtime.chunk(tokens[len(self._lead) :], self._lead)
