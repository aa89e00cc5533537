"""Reads chunks from their files or a folder, and computes those that are not there."""

from collections.abc import Sequence

from kvrt import CachedChunk, Runtime
from kvrt.cli.chunks.files import ChunkFile
from kvrt.cli.process import output
from kvrt.errors import BadSession, KvrtError
from kvrt.runtime.chunks.chunk import StoredChunk
from kvrt.runtime.chunks.store import ChunkStore


class ChunkReader:
    """Chunks for one runtime.

    Attributes:
      n_computed: chunks that were computed.
      n_kept: of them those that the folder has now.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: ChunkStore | None,
        lead: Sequence[int],
        *,
        strict: bool,
    ):
        """Reads nothing yet.

        Args:
          runtime: computes what is not there; it has weights by then.
          store: keeps texts.
          lead: what chunks are computed behind.
          strict: a damaged one is refused.
        """
        self._runtime, self._store = runtime, store
        self._lead, self._strict = list(lead), strict
        self.n_computed = self.n_kept = 0

    @property
    def store(self) -> ChunkStore | None:
        """The folder that keeps texts."""
        return self._store

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
        if self._store is None:
            return self._computed(tokens)
        here = self._runtime.fingerprint
        try:
            if (chunk := self._store.find_stored(here, tokens, self._lead)) is not None:
                return chunk if stored else chunk.read()
        except BadSession as error:
            self._damaged(error, "and takes its place")
        chunk = self._computed(tokens)
        try:
            self._store.add(here, chunk)
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
