"""Chunks in a folder of sessions: each text that was computed alone is kept once, and found again.

A chunk's name says its fingerprint (model, KV dtypes, `rope`) and its tokens, the lead among
them, so that it does not matter which prompt it was computed for. The files are plain sessions:
the folder's index has them, and `kvrt ls` and `kvrt prune` treat them like any other.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from kvrt.errors import KvrtError
from kvrt.runtime.chunks.chunk import CachedChunk, StoredChunk
from kvrt.session import fingerprint
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.library.library import Library


class ChunkStore:
    """A folder of chunks."""

    def __init__(self, folder: str | Path, *, tell: Callable[[str], None] | None = None):
        """Makes the folder where it is missing.

        Args:
          folder: of sessions, these among them.
          tell: called with a line where an index had to be written anew.

        Raises:
          UsageError: it cannot be made, or is none.
        """
        self._library = Library(Path(folder), tell=tell)

    @property
    def folder(self) -> Path:
        """Where the chunks are."""
        return self._library.folder

    def path(self, here: Fingerprint, tokens: Sequence[int]) -> Path:
        """Where the chunk of some tokens is, or would be; `here` is `Runtime.fingerprint`."""
        hashed = xxhash.xxh3_128(fingerprint.digest(here).encode())
        hashed.update(np.asarray(tokens, np.int32).tobytes())
        return self.folder / f"chunk-{hashed.hexdigest()}.kv"

    def find(
        self, here: Fingerprint, tokens: Sequence[int], lead: Sequence[int] = ()
    ) -> CachedChunk | None:
        """The chunk of some tokens, which counts as used; None if there is none.

        Args:
          here: of the runtime that is to blend it.
          tokens: of the chunk, the lead first.
          lead: what it was computed behind.

        Raises:
          BadSession: it is there and damaged.
        """
        found = self.find_stored(here, tokens, lead)
        return None if found is None else found.read()

    def find_stored(
        self, here: Fingerprint, tokens: Sequence[int], lead: Sequence[int] = ()
    ) -> StoredChunk | None:
        """As `find`, with keys and values still in the file."""
        path = self.path(here, tokens)
        if not path.exists():
            return None
        chunk = StoredChunk(path, lead)
        if chunk.tokens.tolist() != list(tokens):
            return None  # of an equal name: it is computed, and takes its place
        # A folder that can only be read, or whose index others use, has its chunks all the same.
        with contextlib.suppress(KvrtError, OSError):
            if not self._library.touch(path):
                n_bytes = path.stat().st_size
                self._library.add(path, fingerprint.digest(here), chunk.tokens, n_bytes)
        return chunk

    def add(self, here: Fingerprint, chunk: CachedChunk) -> Path:
        """Keeps a chunk, in place of a file that was there for it; where it is now.

        Raises:
          SaveError: there is no room, or the folder cannot be written.
        """
        path = self.path(here, chunk.tokens.tolist())
        saved = chunk.save(path)
        self._library.add(path, fingerprint.digest(here), chunk.tokens, saved.n_bytes)
        return path
