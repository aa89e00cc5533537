"""The life of a session file: opened, restored as far as it serves a prompt, and saved again.

What stands at its name is compared under the lock before each save: a session that was read here
is extended, a former one is kept as `F~` when a few of its tokens go, and the save takes a free
name where another process has changed it or much would be lost.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvrt import session
from kvrt.cells.edits import Remove, Shift
from kvrt.errors import (
    BadSession,
    BadToken,
    CannotRewind,
    KvrtError,
    SaveError,
    SessionMismatch,
    UsageError,
)
from kvrt.files import atomic
from kvrt.reuse.diff import common_prefix
from kvrt.reuse.plan import ReusePlan, operations, plan_reuse
from kvrt.runtime.generate import After
from kvrt.runtime.runtime import Runtime
from kvrt.session import OpenedSession, SamplingState, fingerprint, io
from kvrt.session.change import replace
from kvrt.session.change.replace import Change, SessionTokens
from kvrt.session.change.sequences import save_sequence
from kvrt.session.divided import divided_groups
from kvrt.session.library.library import Library
from kvrt.session.orbax.team import Team
from kvrt.session.snapshot import Snapshot

EVERY_S = 45.0  # between two saves, so that one which takes 15 s is on the disk after 60
_TRIES = 8  # free names that other processes may take first

Span = tuple[int, int]


class Way(enum.Enum):
    """How a prompt stands to the session."""

    COMPARED = "what both begin with is taken"
    APPENDED = "it follows all that is held"
    RESUMED = "none was given: sampling resumes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What a session gave a prompt, and what is left to evaluate.

    Attributes:
      ids: all tokens of the prompt.
      n_restored: how many of them the session held.
      spans: what is left, ascending; all but the last are holes that are filled.
      seconds: that it took, without compiling.
      after: where sampling was left: the last of `ids`, which is not evaluated yet.
      plan: why not all of it serves; None where all does, or nothing is there.
      n_exact: tokens at the beginning that are as computed in one go; None if all are.
    """

    ids: list[int]
    n_restored: int
    spans: Sequence[Span] = ()
    seconds: float = 0.0
    after: After | None = None
    plan: ReusePlan | None = None
    n_exact: int | None = None

    def evaluate(self, runtime: Runtime) -> None:
        """Evaluates what is left, in sequence 0."""
        evaluate_spans(runtime, self.ids, self.spans, lambda n_done: None)


def evaluate_spans(
    runtime: Runtime, ids: Sequence[int], spans: Sequence[Span], show: Callable[[int], None]
) -> None:
    """Evaluates spans of a prompt in sequence 0; `show` gets the tokens done after each step."""
    before = 0
    for begin, end in spans:
        if end < len(ids):
            runtime.fill(ids[begin:end], 0, begin)
            show(before + end - begin)
        else:

            def step(done: int, total: int, before: int = before) -> None:
                # Steps are queued ahead of the device: without the wait, progress is fiction.
                cache = runtime.cache
                jax.block_until_ready(cache.cells[0].pos if cache.cells else cache.states)
                show(before + done)

            jax.block_until_ready(runtime.append(ids[begin:end], progress=step))
        before += end - begin


def restore_sequence(runtime: Runtime, opened: OpenedSession, snapshot: Snapshot) -> None:
    """Puts the sequence of a session that is meant into a runtime, as its sequence 0.

    Args:
      runtime: empty.
      opened: of the session.
      snapshot: what it holds.

    Raises:
      SessionMismatch: it is of another model or cache.
      CacheFull: it has more cells.
    """
    with opened.naming():
        mine = {opened.seq_id: 0} if opened.seq_id in snapshot.seq_ids else {}
        runtime.restore(snapshot, mine if snapshot.seq_ids else None)


@dataclasses.dataclass(frozen=True)
class _Work:
    """One save.

    Attributes:
      taken: what is saved.
      held: its tokens, as they will be read again.
      wanted: all tokens that were read and sampled; what the policy dropped is no loss.
      n_exact: as in `Runtime.n_exact`.
      is_part: of a prompt that is being read; what stood there before is kept whatever goes.
    """

    taken: Snapshot
    held: SessionTokens
    wanted: Sequence[int]
    n_exact: int | None
    is_part: bool


@dataclasses.dataclass(frozen=True)
class _Done:
    """Where a save went.

    Attributes:
      path: where.
      saved: its size.
      why: it did not go to where it should have gone.
      former: what it replaced.
      unlisted: why the index of its folder does not list it.
    """

    path: Path
    saved: session.Saved
    why: str = ""
    former: Path | None = None
    unlisted: KvrtError | None = None


class SessionFile:
    """A session on the disk, or the best of a folder of them, and one conversation in a runtime.

    In a `with` block the last save is waited for at its end.

    Attributes:
      path: where it is; a folder before `restore`, then where it will be in it.
      opened: what is there already; of a folder None before `restore`.
    """

    _seq_name = "seq_id"  # of the choice of a sequence, in messages

    def __init__(
        self,
        path: str | Path,
        *,
        seq_id: int | None = None,
        writes: bool = True,
        overwrite: bool = False,
        every_s: float = EVERY_S,
    ):
        """Reads what is there but the cached keys and values.

        Args:
          path: a file that need not be there, or a folder; a link stands for what it points to.
          seq_id: the sequence that is read and written, while others stay; None is the only one.
          writes: it will be saved.
          overwrite: a damaged session, or one of another text, may go, and is kept as `F~`.
          every_s: seconds between two saves for which it is `due`.

        Raises:
          BadSession: it is damaged, or no session.
          SaveError: it could not be written later.
          UsageError: it holds several sequences, and none of them is named; or there is no folder
            to save it in.
        """
        self.path = io.real_path(path)
        self.opened: OpenedSession | None = None
        self._library = Library(self.path, tell=self._note) if io.is_library(self.path) else None
        self._seq_id, self._writes = seq_id, writes
        self._overwrite = self._may_lose = overwrite
        self._damage = ""  # what is damaged of the session that is replaced
        self._policy: Mapping[str, Any] | None = None  # as the session was left
        self._known: SessionTokens | None = None  # what was read there, or written
        self._wrote = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._pending: tuple[_Work, Future[_Done]] | None = None
        self._together = False  # several processes write what is being saved
        self._failed: SaveError | None = None  # what this one met, of those that do not lead
        self._every_s, self._since = every_s, time.monotonic()
        if self._library is not None and writes:
            self._library.check_writable()
        elif writes:
            atomic.check_writable(self.path)
        if self._library is not None and seq_id is not None:
            raise UsageError(
                f"{self.path}: is a folder of sessions, of a sequence each; name one for "
                f"{self._seq_name}"
            )
        if self._library is None and self.path.exists():
            self._open()

    def __enter__(self) -> "SessionFile":
        """The file itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Waits for the save that is running; see `finish`."""
        self.finish()

    def _note(self, line: str) -> None:
        """Says what is of no concern."""

    def _warn(self, line: str) -> None:
        """Says what a user should know."""
        warnings.warn(line, stacklevel=3)

    def _open(self) -> None:
        """Opens the file that is there; a damaged one that may be replaced counts as none."""
        try:
            opened = io.open_existing(self.path)
        except BadSession as error:
            self._replace_damaged(error)
            return
        self.opened = opened.choose(self._seq_id, may_be_new=self._writes, name=self._seq_name)
        self._known = held_tokens(self.opened)

    def _replace_damaged(self, error: BadSession) -> None:
        """Does without a damaged session where it may be replaced; else raises the error.

        One of its sequences cannot be written beside others that cannot be read.
        """
        if not self._overwrite or self._seq_id is not None or not io.holds_session(self.path):
            raise error
        self._damage = str(error).partition("; ")[0].removeprefix(f"{self.path}: ")
        self.opened = None

    def restore(
        self, runtime: Runtime, ids: list[int], *, way: Way = Way.COMPARED, chunks: bool = False
    ) -> Restored:
        """Restores into an empty runtime what serves a prompt.

        Args:
          runtime: gets it as its sequence 0.
          ids: all tokens of the prompt; those that are held as well, whatever the way.
          way: how they stand to the session.
          chunks: cached keys and values that were computed under another text may be used.

        Raises:
          SessionMismatch: the session is of another model or cache.
          BadSession: it is damaged.
        """
        if self._library is not None:
            self._choose(self._library, runtime, ids)
        if self.opened is not None:
            try:
                return self._restored(runtime, self.opened, ids, way, chunks=chunks)
            except BadSession as error:
                self._replace_damaged(error)
        return Restored(ids=ids, n_restored=0, spans=[(0, len(ids))])

    @staticmethod
    def _restored(
        runtime: Runtime, opened: OpenedSession, ids: list[int], way: Way, *, chunks: bool
    ) -> Restored:
        compiled, start = runtime.stats().compile_s, time.perf_counter()
        restore_sequence(runtime, opened, session.read(opened))
        jax.block_until_ready(runtime.cache)
        seconds = time.perf_counter() - start - (runtime.stats().compile_s - compiled)
        some = functools.partial(Restored, ids=ids, seconds=seconds)
        n_exact, n_held, draw = runtime.n_exact(), len(opened.held[1]), opened.draw
        if way is Way.RESUMED and draw is not None and draw.token is not None:
            after = After(token=draw.token, n_sampled=draw.n_drawn)
            return some(n_restored=len(ids), after=after, n_exact=n_exact)
        if way is Way.APPENDED or _continues(runtime, ids):
            return some(n_restored=n_held, spans=[(n_held, len(ids))], n_exact=n_exact)
        if _is_whole(runtime, ids):
            return some(n_restored=len(ids))
        at = runtime.resume_positions()
        plan = plan_reuse(runtime.token_history(), ids, chunks=chunks, at=at, n_exact=n_exact)
        spans = _apply(plan, runtime)
        return some(n_restored=plan.n_reused, spans=spans, plan=plan, n_exact=plan.n_exact)

    def _choose(self, library: Library, runtime: Runtime, ids: list[int]) -> None:
        """The best session of the folder, and the name of the one to write."""
        digest = fingerprint.digest(runtime.fingerprint)
        match = library.best(digest, ids)
        self.opened = None if match is None else io.open_existing(match.entry.path)
        if self.opened is not None:
            n = max((g.n_used for g in self.opened.manifest.groups), default=0)
            n_ctx = runtime.config.n_ctx
            if n > n_ctx:
                self._note(f"{self.opened.path}: has {n:,} cells, -c gives {n_ctx:,}: left out")
                self.opened = None
        name = hashlib.sha256(digest.encode() + np.asarray(ids, "<i4").tobytes()).hexdigest()
        self.path = library.folder / f"{name[:32]}.kv"
        self._known = None

    def policy_of(self, ids: Sequence[int]) -> Mapping[str, Any] | None:
        """The policy by position that the session was left with; None is none that is known.

        It keeps no more of a prompt than both begin with; a runtime without one saves it again.
        """
        if self.opened is None or self._overwrite:
            return None
        said = self.opened.manifest.policies.get(self.opened.seq_id)
        if said is not None and isinstance(said.get("n_keep"), int):
            n = common_prefix(self.opened.held[1], np.asarray(ids, np.int32))
            said = {**said, "n_keep": min(said["n_keep"], n)}
        self._policy = said
        return said

    def lacks(self, runtime: Runtime, ids: Sequence[int]) -> bool:
        """Whether the session lacks a part of a prompt, or has it less exactly."""
        if self.opened is None:
            return True
        n_exact = self.opened.manifest.exact.get(self.opened.seq_id)
        if runtime.n_exact() is None and n_exact is not None and n_exact < len(ids):
            return True
        return common_prefix(self.opened.held[1], np.asarray(ids, np.int32)) < len(ids)

    def note_use(self) -> None:
        """Notes in the index of a folder that its session was used."""
        if self._library is not None and self._writes and self.opened is not None:
            try:
                self._library.touch(self.opened.path)
            except KvrtError as error:
                self._warn(f"{self.opened.path}: its use is not noted: {error}")

    @property
    def alone(self) -> bool:
        """Whether one process runs; several take part in each snapshot together."""
        return jax.process_count() == 1

    @property
    def due(self) -> bool:
        """Whether the last save is long enough ago, and done; never where clocks may differ."""
        if not self._writes or not self.alone or time.monotonic() - self._since < self._every_s:
            return False
        return self._pending is None or self._pending[1].done()

    def save(
        self,
        runtime: Runtime,
        wanted: Sequence[int] | None = None,
        draw: SamplingState | None = None,
        *,
        is_part: bool = False,
    ) -> None:
        """Starts to save all that a runtime holds, after the save that is running.

        If that one failed it is one line, and this one tries again.

        Args:
          runtime: with the session as its sequence 0.
          wanted: all tokens that were read and sampled, those that a policy dropped as well; None
            is those that are held.
          draw: where sampling was left.
          is_part: of a prompt that is being read, which may hold less than the session did.
        """
        if not self._writes:
            return
        try:
            self.finish()
        except KvrtError as error:
            self._warn(f"{error}; the run continues and saves again")
        # Of one sequence beside others all keys and values are read and written anew.
        divided = io.container_at(self.path) == "folder" and self._seq_id is None
        taken = runtime.snapshot({} if draw is None else {0: draw}, divided=divided)
        if self._policy is not None and not taken.policies and 0 in taken.seq_ids:
            taken = dataclasses.replace(taken, policies={0: self._policy})
        self._since = time.monotonic()
        self._together = not self.alone and bool(divided_groups(taken))
        if jax.process_index():
            # All have to take part in the snapshot; a file is written by the first process alone.
            if self._together:
                self._take_part(taken)
            return
        held = SessionTokens(fingerprint=taken.fingerprint, ids=runtime.token_history()[1])
        work = _Work(
            taken, held, held.ids.tolist() if wanted is None else wanted, runtime.n_exact(), is_part
        )
        self._pending = work, self._thread.submit(self._write, work)
        if self._together:
            wait([self._pending[1]])  # The others do nothing else meanwhile.

    def finish(self) -> None:
        """Waits for the save that is running, and says where it went if not to its name.

        Raises:
          SaveError: it failed.
        """
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        if self._pending is None:
            return
        (work, job), self._pending = self._pending, None
        done = job.result()
        if done.why and not self._library:
            self._warn(f"{done.why}; this run is saved as {done.path}")
        elif done.former:
            self._note(f"{done.path}: the former session is kept as {done.former}")
        self.path, self._known, self._wrote = done.path, work.held, True
        if done.unlisted is not None:
            self._warn(f"{done.path}: saved, and not in the index: {done.unlisted}")

    def _write(self, work: _Work) -> _Done:
        """Saves at the path, or, if that is refused, at a free name, and lists it in the folder."""
        try:
            done = self._written(work)
        finally:
            self._tell(None)
        # Keys and values after a hole or a move are not those that these tokens would give.
        ids = work.held.ids[: work.n_exact]
        if self._library is not None and len(ids):
            digest = fingerprint.digest(work.held.fingerprint)
            try:
                self._library.add(done.path, digest, ids, done.saved.n_bytes)
            except KvrtError as error:
                return dataclasses.replace(done, unlisted=error)
        return done

    def _tell(self, again: Path | None) -> None:
        """Tells other processes that write with this one where it tries again."""
        if self._together:
            Team.of_jax().say({"again": again and str(again)})

    def _take_part(self, taken: Snapshot) -> None:
        """Writes this process's part of what the first one saves, as often as that one tries."""
        path: str | None = str(self.path)
        while path is not None:
            self.path, self._failed = Path(path), None
            try:
                session.save(self.path, taken, "folder")
            except SaveError as error:
                self._failed = error
            path = Team.of_jax().hear()["again"]

    def _written(self, work: _Work) -> _Done:
        kept: list[Path] = []
        kind = io.container_at(self.path)
        try:
            before = functools.partial(self._protect, work, kept)
            saved = self._put(self.path, work.taken, kind, before)
            return _Done(self.path, saved, former=kept[0] if kept else None)
        except SaveError as error:
            for _ in range(_TRIES):
                path = replace.free_name(self.path)
                self._tell(path)
                with contextlib.suppress(SaveError):
                    saved = self._put(path, work.taken, kind, replace.refuse_existing)
                    return _Done(path, saved, why=str(error))
                if not os.path.lexists(path):
                    break
            raise

    def _put(
        self, path: Path, taken: Snapshot, kind: io.Container, before: Callable[[Path], None]
    ) -> session.Saved:
        if self._seq_id is None:
            return session.save(path, taken, kind, before=before)
        try:
            return save_sequence(path, taken, self._seq_id, kind, before=before)
        except (BadSession, SessionMismatch) as error:
            raise SaveError(f"{path}: {error}; it stays as it is") from error

    def _protect(self, work: _Work, kept: list[Path], path: Path) -> None:
        """Refuses to lose what stands at a path, or keeps it as `F~`; runs under its lock."""
        if not os.path.lexists(path):
            return
        if self._damage and not self._wrote:
            kept.append(replace.keep_damaged(path))
            return
        try:
            now = replace.read_held(path, self._seq_id)
        except BadSession as error:
            raise SaveError(f"{error}; it stays as it is") from error
        expected = self._known is not None and now.is_same(self._known)
        if expected and self._wrote:
            return
        n_lost = now.n_lost(work.wanted)
        if not expected and (n_lost or not now.is_alike(work.held)):
            raise SaveError(f"{path}: holds other tokens by now and stays as it is")
        loses = replace.judge(now.n, n_lost) is Change.LOSES
        if loses and not (self._may_lose or work.is_part):
            raise SaveError(f"{path}: {n_lost:,} of its tokens would be lost, so it stays as it is")
        if n_lost:
            kept.append(replace.keep_former(path))


def held_tokens(opened: OpenedSession) -> SessionTokens:
    """The text of a session that a save replaces: of a sequence that was chosen, it alone."""
    n_more = sum(opened.manifest.n_tokens.values()) - len(opened.held[1])
    n_more = n_more if opened.chosen is None else 0
    said = opened.manifest.fingerprint
    return SessionTokens(fingerprint=said, ids=opened.held[1], n_more=n_more)


def _apply(plan: ReusePlan, runtime: Runtime) -> list[Span]:
    """Removes and moves what a plan says; returns what is left to evaluate."""
    spans = []
    for op in operations(plan):
        if isinstance(op, Remove):
            runtime.seq_rm(0, op.p0, op.p1)
        elif isinstance(op, Shift):
            runtime.to_cells(0)  # in blocks no position could move
            runtime.seq_add(0, op.p0, op.p1, op.d)
        else:
            spans.append((op.start, op.end))
    return spans


def _is_whole(runtime: Runtime, ids: list[int]) -> bool:
    """Whether a runtime holds just this prompt, cannot go back in it, and need not."""
    pos, held = runtime.token_history()
    if held.tolist() != ids or runtime.n_exact() is not None:
        return False
    if len(ids) - 1 in runtime.resume_positions() or pos[-1] != len(ids) - 1:
        return False
    try:
        runtime.last_logits(0)
    except (BadToken, CannotRewind):
        return False
    return True


def _continues(runtime: Runtime, ids: list[int]) -> bool:
    """Whether a prompt follows all that is held where SelfExtend has moved positions.

    It cannot be cut, for positions no longer count tokens, but what follows it follows it.
    """
    extend = runtime.config.self_extend
    held = runtime.token_history()[1].tolist()
    if extend is None or extend.kind != "cache" or not held:
        return False
    return len(held) < len(ids) and ids[: len(held)] == held
