"""Writes the session of a run: in the background, and beside what it must not replace."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvrt import Runtime, session
from kvrt.cli.process import output
from kvrt.cli.run.generation import Reading
from kvrt.errors import BadLogits, BadSession, KvrtError, SaveError, SessionMismatch
from kvrt.program.sample import can_sample
from kvrt.session import OpenedSession, fingerprint
from kvrt.session.change import replace
from kvrt.session.change.damage import find_damage
from kvrt.session.change.replace import Change, SessionTokens
from kvrt.session.change.sequences import save_sequence
from kvrt.session.divided.blocks import divided_groups
from kvrt.session.io import Container, container_at
from kvrt.session.library.library import Library
from kvrt.session.orbax.team import Team
from kvrt.session.snapshot import Snapshot

EVERY_S = 45.0  # between two saves, so that one which takes 15 s is on the disk after 60
_TRIES = 8  # free names that other processes may take first


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


class Saver:
    """Saves one session, one save at a time, in a thread of its own.

    What stands at its name is compared under the lock before each save: a run extends its own
    session, keeps a former one as `F~` when a few of its tokens go, and writes to a free name
    where another process has changed it or much would be lost.

    Attributes:
      path: where the next save goes.
      policy: the policy by position that the session was left with, where the run has none.
    """

    def __init__(
        self,
        path: Path,
        *,
        library: Library | None = None,
        overwrite: bool = False,
        quiet: bool = False,
        every_s: float = EVERY_S,
        seq_id: int | None = None,
    ):
        """Nothing is written yet.

        Args:
          path: a session that need not be there.
          library: the folder of sessions that it belongs to, where a loss is another name's.
          overwrite: what was read from the path may go, and is kept as `F~`.
          quiet: says nothing but where a session is that is not at its name.
          every_s: seconds between saves while tokens are read or sampled.
          seq_id: the sequence that is written, while others stay; None is the whole session.
        """
        self.path, self._seq_id = path, seq_id
        self.policy: Mapping[str, Any] | None = None
        self._library, self._overwrite, self._quiet = library, overwrite, quiet
        self._every_s = every_s
        self._known: SessionTokens | None = None  # what this run read there, or wrote
        self._wrote = False
        self._is_damaged = False  # what this run found there and replaces
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._pending: tuple[_Work, Future[_Done]] | None = None
        self._together = False  # several processes write what is being saved
        self._failed: SaveError | None = None  # what this one met, of those that do not lead
        self._since = time.monotonic()

    def expect(self, path: Path, held: SessionTokens | None) -> None:
        """Names the session to write, and what was read from it."""
        self.path, self._known = path, held

    def expect_damage(self) -> None:
        """Notes that what stands at the path is damaged: it may go, and is kept as `F~`."""
        self._is_damaged = True

    def allow_loss(self) -> None:
        """Lets what was read from the path go, kept as `F~`."""
        self._overwrite = True

    @property
    def alone(self) -> bool:
        """Whether one process runs; several take part in each snapshot together."""
        return jax.process_count() == 1

    @property
    def due(self) -> bool:
        """Whether the last save is long enough ago, and done; never where clocks may differ."""
        if not self.alone or time.monotonic() - self._since < self._every_s:
            return False
        return self._pending is None or self._pending[1].done()

    def start(
        self,
        runtime: Runtime,
        wanted: Sequence[int],
        draw: session.SamplingState | None = None,
        *,
        is_part: bool = False,
    ) -> None:
        """Starts to save all that a runtime holds, after the save that is running.

        If that one failed it is one line, and this one tries again.

        Args:
          runtime: with the session as its sequence 0.
          wanted: all tokens that were read and sampled, those that the policy dropped as well.
          draw: where sampling was left.
          is_part: of a prompt that is being read, which may hold less than the session did.
        """
        try:
            self.finish()
        except KvrtError as error:
            output.warn(f"{error}; the run continues and saves again")
        # Of one sequence beside others all keys and values are read and written anew.
        divided = container_at(self.path) == "folder" and self._seq_id is None
        taken = runtime.snapshot({} if draw is None else {0: draw}, divided=divided)
        if self.policy is not None and not taken.policies and 0 in taken.seq_ids:
            taken = dataclasses.replace(taken, policies={0: self.policy})
        self._since = time.monotonic()
        self._together = not self.alone and bool(divided_groups(taken))
        if jax.process_index():
            # All have to take part in the snapshot; a file is written by the first process alone.
            if self._together:
                self._take_part(taken)
            return
        held = SessionTokens(fingerprint=taken.fingerprint, ids=runtime.token_history()[1])
        work = _Work(taken, held, wanted, runtime.n_exact(), is_part)
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
            output.warn(f"{done.why}; this run is saved as {done.path}")
        elif done.former and not self._quiet:
            output.note(f"{done.path}: the former session is kept as {done.former}")
        self.path, self._known, self._wrote = done.path, work.held, True
        if done.unlisted is not None:
            output.warn(f"{done.path}: saved, and not in the index: {done.unlisted}")

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
        kind = container_at(self.path)
        try:
            before = functools.partial(self._protect, work, kept)
            saved = self._put(self.path, work.taken, kind, before)
            return _Done(self.path, saved, former=kept[0] if kept else None)
        except SaveError as error:
            for _ in range(_TRIES):
                path = replace.free_name(self.path)
                self._tell(path)
                with contextlib.suppress(SaveError):
                    before = replace.refuse_existing
                    saved = self._put(path, work.taken, kind, before)
                    return _Done(path, saved, why=str(error))
                if not os.path.lexists(path):
                    break
            raise

    def _put(
        self, path: Path, taken: Snapshot, kind: Container, before: Callable[[Path], None]
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
        if self._is_damaged and not self._wrote:
            kept.append(replace.keep_damaged(path))
            return
        try:
            now = replace.read_held(path, self._seq_id)
        except BadSession as error:
            raise SaveError(f"{error}; it stays as it is") from error
        expected = self._known is not None and _same(now, self._known)
        if expected and self._wrote:
            return
        n_lost = now.n_lost(work.wanted)
        if not expected and (n_lost or not _alike(now, work.held)):
            raise SaveError(f"{path}: holds other tokens by now and stays as it is")
        loses = replace.judge(now.n, n_lost) is Change.LOSES
        if loses and not (self._overwrite or work.is_part):
            raise SaveError(f"{path}: {n_lost:,} of its tokens would be lost, so it stays as it is")
        if n_lost:
            kept.append(replace.keep_former(path))


def _same(a: SessionTokens, b: SessionTokens) -> bool:
    return a.n_more == b.n_more and np.array_equal(a.ids, b.ids) and _alike(a, b)


def _alike(a: SessionTokens, b: SessionTokens) -> bool:
    return fingerprint.digest(a.fingerprint) == fingerprint.digest(b.fingerprint)


def check_sound(path: Path, runtime: Runtime, reading: Reading) -> None:
    """Refuses to save keys and values that are not finite.

    Every later token sees them, so the last one's logits tell; without them the arrays do.
    """
    if reading.whole and can_sample(runtime.last_logits(0)[0]):
        return
    found = find_damage(runtime.snapshot())
    if reading.whole or found:
        why = found or "the logits of the last token have NaN, +inf or no finite value"
        raise BadLogits(f"{path}: not saved, since {why}; the weights are damaged: check the model")


def held_tokens(opened: OpenedSession) -> SessionTokens:
    """The text of a session that a save replaces: of a sequence that was chosen, it alone."""
    n_more = sum(opened.manifest.n_tokens.values()) - len(opened.held[1])
    n_more = n_more if opened.chosen is None else 0
    said = opened.manifest.fingerprint
    return SessionTokens(fingerprint=said, ids=opened.held[1], n_more=n_more)
