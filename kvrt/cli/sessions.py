"""A session of a run: what is restored from it, what that saves, and what is written to it."""

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from kvrt import session
from kvrt.arrays import Int32
from kvrt.cells import text as texts
from kvrt.cells.text import Text
from kvrt.cli import output, words
from kvrt.cli.job import Reading, all_of
from kvrt.cli.options import EvalFlags
from kvrt.config import CacheConfig, extent
from kvrt.engine import Runtime
from kvrt.errors import BadSession, BadToken, CacheFull, SaveError, SessionMismatch, UsageError
from kvrt.session import fingerprint, folder, parts
from kvrt.session.diff import common_prefix
from kvrt.session.library import Library
from kvrt.session.manifest import Manifest
from kvrt.session.reuse import Evaluate, Move, Remove, operations, plan_reuse
from models.load import Opened

_Flags = TypeVar("_Flags", bound=EvalFlags)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """What a session says before its rows are read.

    Attributes:
      path: a file, or a folder.
      manifest: sizes and settings.
      text: tokens of every sequence.
      cells: of each group, how many there are, which are used, and their owners.
    """

    path: Path
    manifest: Manifest
    text: Text
    cells: Sequence[tuple[int, np.ndarray, np.ndarray]]

    @property
    def seq_id(self) -> int:
        """The first of its sequences, 0 without any."""
        return min(self.text.pieces, default=0)

    @property
    def held(self) -> tuple[Int32[np.ndarray, " n"], Int32[np.ndarray, " n"]]:
        """Positions and ids of that sequence's tokens, by position."""
        found = texts.entries(self.text, self.seq_id)
        return found[0], found[1]


def open_head(path: Path) -> Head:
    """Reads all of a session but its rows; of a folder those as well.

    Raises:
      BadSession: it is damaged, or no session.
    """
    if path.is_dir():
        whole = session.read(path)
        cells = [(g.n_cells, g.index, g.seqs) for g in whole.groups]
        return Head(path=path, manifest=session.read_manifest(path), text=whole.text, cells=cells)
    found, meta = session.read_cells(path)
    cells = []
    for i, entry in enumerate(found.groups):
        index = parts.array(meta, f"{i}.index", (entry.n_used,), "int32")
        seqs = parts.array(meta, f"{i}.seqs", (entry.n_used, None), "uint32")
        if len(index) and not 0 <= index.min() <= index.max() < entry.n_cells:
            raise BadSession(f"{path}: the cells of group {i} are damaged; save the session again")
        cells.append((entry.n_cells, index, seqs))
    return Head(path=path, manifest=found, text=parts.text(found, meta), cells=cells)


def is_library(path: Path) -> bool:
    """Whether a path is a folder of sessions, and not one session in a folder."""
    return path.is_dir() and not (path / folder.INDEX).exists()


def n_bytes(path: Path) -> int:
    """Bytes of a session on the disk."""
    if path.is_dir():
        return sum(x.stat().st_size for x in path.rglob("*") if x.is_file())
    return path.stat().st_size


def follow(options: _Flags, found: Manifest) -> _Flags:
    """The options with what a session says in place of flags that were not given."""
    said = found.fingerprint
    extend = said.get("self_extend") or {}
    wanted = {
        "rope": said.get("rope"),
        "cache_type_k": said.get("type_k"),
        "cache_type_v": said.get("type_v"),
        "n_ctx": max((g.n_cells for g in found.groups), default=None),
        "grp_attn_n": extend.get("ga_n"),
        "grp_attn_w": extend.get("ga_w"),
        "self_extend": extend.get("kind", "cache") if extend else None,
    }
    new = {k: v for k, v in wanted.items() if v is not None and k not in options.given}
    return dataclasses.replace(options, **new)


def check_fits(head: Head, model: Opened, config: CacheConfig) -> None:
    """Refuses a session of another model or cache as far as that is known without weights.

    Raises:
      SessionMismatch: it is one; the message names the file.
    """
    said, spec = head.manifest.fingerprint, model.spec
    weights = (said.get("model") or {}).get("weights", "")
    here = fingerprint.describe(
        spec.groups, spec.recurrent, config, spec.n_vocab, weights, model.identity
    )
    with told_of(head.path):
        fingerprint.check(said, here, convert=False)


@contextlib.contextmanager
def told_of(path: Path) -> Iterator[None]:
    """Puts the name of a session in front of what does not fit."""
    try:
        yield
    except (SessionMismatch, CacheFull) as error:
        raise type(error)(f"{path}: {error}") from error


def restore(runtime: Runtime, head: Head) -> float:
    """Puts the first sequence of a session into a runtime as its sequence 0.

    Returns:
      Seconds, without compiling.

    Raises:
      SessionMismatch: it is of another model or cache.
      BadSession: it is damaged.
    """
    compiled, start = runtime.stats().compile_s, time.perf_counter()
    snapshot = session.read(head.path)
    with told_of(head.path):
        runtime.restore(snapshot, {head.seq_id: 0} if snapshot.seq_ids else None)
    jax.block_until_ready(runtime.cache)
    return time.perf_counter() - start - (runtime.stats().compile_s - compiled)


class Kept:
    """The session of a run: a file, or the best of a folder.

    Attributes:
      head: of the file that is there already; of a folder None before `begin`.
    """

    def __init__(self, name: str, *, writes: bool, chunks: bool = False, quiet: bool = False):
        """Reads what is there but the rows.

        Args:
          name: a file that need not be there, or a folder.
          writes: whether it is saved.
          chunks: whether rows that were computed under another text may be used.
          quiet: says nothing.

        Raises:
          BadSession: it is damaged, or no session.
          SaveError: it could not be written later.
        """
        self._path = Path(name)
        self._library = Library(self._path) if is_library(self._path) else None
        self._writes, self._chunks, self._quiet = writes, chunks, quiet
        self._pending: Future[session.Saved] | None = None
        self._saving: tuple[fingerprint.Fingerprint, np.ndarray, int | None] | None = None
        self._n_held = 0
        self.head = None
        if self._library is None:
            if writes:
                _check_folder(self._path)
            if self._path.exists():
                self.head = open_head(self._path)
                self._check_single(self.head)

    def check(self, model: Opened, config: CacheConfig) -> None:
        """Refuses what can be refused before the weights are there.

        Raises:
          SessionMismatch: the session is of another model or cache.
          UsageError: chunks are wanted of layers that cannot give them.
        """
        if self.head is not None:
            check_fits(self.head, model, config)
        rolls = any(extent(g, config).rolls for g in model.spec.groups)
        extends = config.self_extend is not None and config.self_extend.kind == "cache"
        if self._chunks and (rolls or extends or model.spec.recurrent is not None):
            raise UsageError(
                "--reuse_chunks fills gaps in the middle, which recurrent layers, SelfExtend in "
                "the cache and windows without --swa_full cannot; leave it out"
            )

    def n_to_do(self, ids: list[int]) -> int:
        """Tokens that will be evaluated, as far as can be told without a runtime."""
        if self.head is None:
            return len(ids)
        same = common_prefix(self.head.held[1], np.asarray(ids, np.int32))
        return len(ids) - min(same, len(ids) - 1)

    def begin(self, runtime: Runtime, ids: list[int]) -> Reading:
        """Restores what fits of a prompt, says so, and gives what is left to read.

        Raises:
          SessionMismatch: the session is of another model or cache.
          BadSession: it is damaged.
        """
        if self._library is not None:
            self._choose(self._library, runtime, ids)
        if self.head is None:
            self._say(f"{self._path}: nothing restored, {len(ids):,} computed: no such session yet")
            return dataclasses.replace(all_of(ids), n_restored=0)
        seconds = restore(runtime, self.head)
        held = runtime.text()
        self._n_held = len(held[1])
        if _is_whole(runtime, ids):
            self._say(f"{self.head.path}: {len(ids):,} tokens restored in {seconds:.2f} s")
            return Reading(ids=ids, n_restored=len(ids))
        if _goes_on(runtime, ids):
            n, more = self._n_held, len(ids) - self._n_held
            self._say(
                f"{self.head.path}: {n:,} tokens restored in {seconds:.2f} s, {more:,} follow"
            )
            return Reading(ids=ids, n_restored=n, spans=[(n, len(ids))])
        plan = plan_reuse(
            held,
            ids,
            chunks=self._chunks,
            earliest=runtime.earliest_resume(),
            n_exact=runtime.n_exact(),
        )
        for op in operations(plan):
            if isinstance(op, Remove):
                runtime.seq_rm(0, op.p0, op.p1)
            elif isinstance(op, Move):
                runtime.seq_add(0, op.p0, op.p1, op.d)
        spans = [(op.start, op.end) for op in operations(plan) if isinstance(op, Evaluate)]
        self._say(words.reused(str(self.head.path), plan, seconds))
        return Reading(ids=ids, n_restored=plan.n_reused, spans=spans)

    def after_prompt(self, runtime: Runtime, reading: Reading) -> None:
        """Starts to save the prompt, if there is more of it than the session holds."""
        n_more = len(runtime.text()[1]) - self._n_held
        if reading.whole and not self._is_new(reading.ids):
            if self._library is not None and self._writes and self.head is not None:
                self._library.touch(self.head.path)
        elif reading.whole or n_more > 0:
            self.save(runtime)

    def save(self, runtime: Runtime, draw: session.Draw | None = None) -> None:
        """Starts to save all that a runtime holds, after the save that is on its way."""
        if not self._writes:
            return
        self.finish()
        taken = runtime.snapshot({} if draw is None else {0: draw})
        self._saving = taken.fingerprint, runtime.text()[1], runtime.n_exact()
        self._pending = session.start_save(self._path, taken)

    def finish(self) -> None:
        """Waits for the save that is on its way.

        Raises:
          SaveError: it failed.
        """
        if self._pending is None or self._saving is None:
            return
        pending, self._pending = self._pending, None
        saved = pending.result()
        if self._library is not None:
            found, ids, n_exact = self._saving
            # Rows after a hole or a move are not those that these tokens would give.
            ids = ids[:n_exact]
            if len(ids):
                digest = fingerprint.digest(found)
                self._library.add(self._path, digest, ids, saved.n_bytes)

    def _choose(self, library: Library, runtime: Runtime, ids: list[int]) -> None:
        """The best session of the folder, and the name of the one to write."""
        digest = fingerprint.digest(runtime.fingerprint)
        match = library.best(digest, ids)
        self.head = None if match is None else open_head(match.entry.path)
        name = hashlib.sha256(digest.encode() + np.asarray(ids, "<i4").tobytes()).hexdigest()
        self._path = library.folder / f"{name[:32]}.kv"

    def _is_new(self, ids: list[int]) -> bool:
        """Whether the session does not begin with all of a prompt already."""
        if self.head is None:
            return True
        return common_prefix(self.head.held[1], np.asarray(ids, np.int32)) < len(ids)

    def _check_single(self, head: Head) -> None:
        if self._writes and len(head.text.pieces) > 1:
            raise UsageError(
                f"{head.path}: it holds sequences {sorted(head.text.pieces)} and a run goes on "
                "with one, so the others would be lost; add --session_ro"
            )

    def _say(self, line: str) -> None:
        if not self._quiet:
            output.note(line)


def _is_whole(runtime: Runtime, ids: list[int]) -> bool:
    """Whether a runtime holds just this prompt, cannot go back in it, and need not."""
    pos, held = runtime.text()
    if held.tolist() != ids or runtime.n_exact() is not None:
        return False
    if runtime.earliest_resume() < len(ids) or pos[-1] != len(ids) - 1:
        return False
    try:
        runtime.last_logits(0)
    except BadToken:
        return False
    return True


def _goes_on(runtime: Runtime, ids: list[int]) -> bool:
    """Whether a prompt goes on from all that is held where SelfExtend has moved positions.

    It cannot be cut, for positions no longer count tokens, but what follows it follows it.
    """
    extend = runtime.config.self_extend
    held = runtime.text()[1].tolist()
    if extend is None or extend.kind != "cache" or not held:
        return False
    return len(held) < len(ids) and ids[: len(held)] == held


def _check_folder(path: Path) -> None:
    """Refuses early what could not be saved after the work."""
    folder = path.parent
    if not folder.is_dir():
        raise SaveError(f"{path}: there is no folder {folder}; make it, or give another name")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SaveError(f"{path}: the folder {folder} cannot be written; give another name")
