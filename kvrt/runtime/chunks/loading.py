"""Chunks that are read on a worker while those before them are computed, and how fast that goes."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvrt.program.programs import Programs
from kvrt.runtime.chunks.chunk import CachedChunk, StoredChunk


class Loading:
    """Chunks in their order; those whose keys and values are in files are read on one worker."""

    def __init__(
        self,
        chunks: Sequence[CachedChunk | StoredChunk],
        fitted: Callable[[CachedChunk], CachedChunk],
    ):
        """Starts with those that are in memory, which `fitted` refuses where they do not fit."""
        self._fitted, self._n = fitted, 0
        self._chunks = [_in_memory(x, fitted) for x in chunks]
        self._reads: dict[int, Future[CachedChunk]] = {}
        self._worker: ThreadPoolExecutor | None = None
        self.load_s = 0.0

    def __enter__(self) -> "Loading":
        """Starts the worker, where there is something to read."""
        if any(isinstance(x, StoredChunk) for x in self._chunks):
            self._worker = ThreadPoolExecutor(1, "kvrt-chunks")
            for i, chunk in enumerate(self._chunks):
                if isinstance(chunk, StoredChunk):
                    self._reads[i] = self._worker.submit(self._read, chunk)
        return self

    def __exit__(self, *_: Any) -> None:
        """Reads nothing more."""
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)

    @property
    def is_ready(self) -> bool:
        """Whether there is a next chunk, and nobody waits for it."""
        if self._n == len(self._chunks):
            return False
        return self._n not in self._reads or self._reads[self._n].done()

    def next(self) -> tuple[CachedChunk, int]:
        """The next chunk, and how many of its first tokens stay away; waits until it is read.

        Raises:
          BadSession: it is damaged.
          SessionMismatch: it is of another model or cache.
        """
        i, self._n = self._n, self._n + 1
        chunk = self._chunks[i]
        if isinstance(chunk, StoredChunk):
            chunk = self._fitted(self._reads[i].result())
        return chunk, chunk.n_lead if i else 0

    def _read(self, chunk: StoredChunk) -> CachedChunk:
        found = chunk.read()
        self.load_s += chunk.load_s  # one worker, so one at a time
        return found


def _in_memory(
    chunk: CachedChunk | StoredChunk, fitted: Callable[[CachedChunk], CachedChunk]
) -> CachedChunk | StoredChunk:
    """A chunk that fits if it is in memory already, or one that is still to be read."""
    if isinstance(chunk, CachedChunk):
        return fitted(chunk)
    return fitted(chunk.read()) if chunk.is_read else chunk


class Pace:
    """How long tokens take, compilation aside: that of the fastest part."""

    def __init__(self) -> None:
        """Has seen nothing yet."""
        self.per_token_s = float("inf")

    @contextlib.contextmanager
    def of(self, n: int, programs: Programs) -> Iterator[None]:
        """Times a part of n tokens."""
        start, compiled = time.perf_counter(), programs.compile_s
        yield
        taken = time.perf_counter() - start - (programs.compile_s - compiled)
        self.per_token_s = min(self.per_token_s, max(taken, 0.0) / n)
