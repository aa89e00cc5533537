"""The session of a run: what is restored from it, what that saves, and what is written to it."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvrt.cli import output, words
from kvrt.cli.head import Head, check_fits, is_library, open_head, restore
from kvrt.cli.job import Reading, all_of
from kvrt.cli.saving import EVERY_S, Saver
from kvrt.config import CacheConfig
from kvrt.engine import Runtime
from kvrt.engine.generate import After
from kvrt.errors import BadToken, SaveError, SessionMismatch, UsageError
from kvrt.extent import extent
from kvrt.session import Draw, fingerprint, replace
from kvrt.session.diff import common_prefix
from kvrt.session.library import Library
from kvrt.session.replace import Change, Held
from kvrt.session.reuse import Move, Remove, Reuse, operations, plan_reuse
from models.load import Opened


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
    """How a run uses its session.

    Attributes:
      writes: it is saved.
      answers: with what is sampled.
      overwrite: another text may take its place.
      chunks: cached keys and values that were computed under another text may be used.
      quiet: nothing is said but what went wrong.
    """

    writes: bool = True
    answers: bool = False
    overwrite: bool = False
    chunks: bool = False
    quiet: bool = False


class Kept:
    """The session of a run: a file, or the best of a folder.

    Attributes:
      head: of the file that is there already; of a folder None before `begin`.
    """

    def __init__(self, name: str, use: Use, *, every_s: float = EVERY_S):
        """Reads what is there but the cached keys and values.

        Args:
          name: a file that need not be there, or a folder; a link stands for what it points to.
          use: what is done with it.
          every_s: seconds between saves while tokens are sampled, where `use.answers`.

        Raises:
          BadSession: it is damaged, or no session.
          SaveError: it could not be written later.
        """
        self._path = real_path(name)
        self._library = Library(self._path) if is_library(self._path) else None
        self._use = use
        self._saver = Saver(
            self._path,
            library=self._library,
            overwrite=use.overwrite,
            quiet=use.quiet,
            every_s=every_s,
        )
        self._n_held = 0
        self.head = None
        if self._library is None:
            if use.writes:
                _check_folder(self._path)
            if self._path.exists():
                self.head = open_head(self._path)
                self._check_single(self.head)
                self._saver.expect(self._path, _held(self.head))

    @property
    def is_folder(self) -> bool:
        """Whether it is one of many in a folder, found by its text."""
        return self._library is not None

    def check(self, model: Opened, config: CacheConfig, ids: Sequence[int]) -> None:
        """Refuses what can be refused before the weights are there.

        Args:
          model: whose session it has to be.
          config: of the cache.
          ids: tokens of the prompt.

        Raises:
          SessionMismatch: the session is of another model or cache.
          UsageError: chunks are wanted of layers that cannot give them, or much of what the
            session holds would be lost.
        """
        if self.head is not None:
            try:
                check_fits(self.head, model, config)
            except SessionMismatch as error:
                raise SessionMismatch(f"{error}, or another name for the session") from error
        rolls = any(extent(g, config).rolls for g in model.spec.groups)
        extends = config.self_extend is not None and config.self_extend.kind == "cache"
        if self._use.chunks and (rolls or extends or model.spec.recurrent is not None):
            raise UsageError(
                "--reuse_chunks fills gaps in the middle, which recurrent layers, SelfExtend in "
                "the cache and windows without --swa_full cannot; leave it out"
            )
        self._check_loss(ids)

    def _check_loss(self, ids: Sequence[int]) -> None:
        """Refuses a prompt in whose place much of the held text would go."""
        if self.head is None or not self._use.writes or self._use.overwrite:
            return
        held = _held(self.head)
        n_exact = self.head.manifest.exact.get(self.head.seq_id, len(held.ids))
        begins = common_prefix(held.ids, np.asarray(ids, np.int32)) == len(ids) <= n_exact
        if begins and not self._use.answers:
            return  # Nothing will be saved.
        n_lost = held.n_lost(ids)
        if replace.judge(held.n, n_lost) is Change.LOSES:
            raise UsageError(
                f"{self._path}: holds {held.n:,} tokens, and {n_lost:,} of them are not in this "
                "prompt and would be lost; use --append to go on behind them, --overwrite to "
                f"replace them (kept as {self._path.name}~), or another name"
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
            chunks=self._use.chunks,
            earliest=runtime.earliest_resume(),
            n_exact=runtime.n_exact(),
        )
        spans = _apply(plan, runtime)
        self._say(words.reused(str(self.head.path), plan, seconds))
        return Reading(ids=ids, n_restored=plan.n_reused, spans=spans)

    def all_ids(self) -> list[int]:
        """All tokens of the session, that one included that was drawn but not evaluated.

        Raises:
          UsageError: there is no session, or nothing in it.
        """
        if self.head is None or not len(self.head.held[1]):
            what = "which of its sessions" if self._library else "what"
            raise UsageError(
                f"--session {self._path}: there is nothing to say {what} to go on with; give a "
                "prompt with -p, -f or --tokens"
            )
        draw = self.head.draw
        newest = [] if draw is None or draw.token is None else [draw.token]
        return [*self.head.held[1].tolist(), *newest]

    def go_on(self, runtime: Runtime, ids: list[int]) -> Reading:
        """Restores everything, to go on where drawing was left; `ids` are from `all_ids`.

        Raises:
          SessionMismatch: the session is of another model or cache.
          BadSession: it is damaged.
        """
        assert self.head is not None
        draw = self.head.draw
        if draw is None or draw.token is None:
            return self.begin(runtime, ids)
        seconds = restore(runtime, self.head)
        n = len(ids) - 1
        self._say(
            f"{self.head.path}: {n:,} {words.tokens(n)} restored in {seconds:.2f} s, goes on after "
            f"{draw.n_drawn:,} drawn"
        )
        after = After(token=draw.token, n_drawn=draw.n_drawn)
        # The newest one is fed by what draws the next.
        return Reading(ids=ids, n_restored=len(ids), after=after)

    def after_prompt(self, runtime: Runtime, reading: Reading) -> None:
        """Starts to save the prompt, if there is more of it than the session holds."""
        if reading.after is not None:
            return
        n_more = len(runtime.text()[1]) - self._n_held
        if reading.whole and not self._is_new(reading.ids, runtime):
            if self._library is not None and self._use.writes and self.head is not None:
                self._library.touch(self.head.path)
        elif reading.whole or n_more > 0:
            self.save(runtime, reading.read)

    def save(self, runtime: Runtime, ids: Sequence[int], draw: Draw | None = None) -> None:
        """Starts to save all that a runtime holds, after the save that is on its way.

        Args:
          runtime: what is saved.
          ids: all tokens that were read and sampled.
          draw: where sampling was left.
        """
        if self._use.writes:
            self._saver.start(runtime, ids, draw)

    @property
    def due(self) -> bool:
        """Whether what was sampled has to be saved again."""
        return self._use.writes and self._use.answers and self._saver.due

    def finish(self) -> None:
        """Waits for the save that is on its way.

        Raises:
          SaveError: it failed.
        """
        self._saver.finish()

    def _choose(self, library: Library, runtime: Runtime, ids: list[int]) -> None:
        """The best session of the folder, and the name of the one to write."""
        digest = fingerprint.digest(runtime.fingerprint)
        match = library.best(digest, ids)
        self.head = None if match is None else open_head(match.entry.path)
        if self.head is not None:
            n, n_ctx = (
                max((g.n_used for g in self.head.manifest.groups), default=0),
                runtime.config.n_ctx,
            )
            if n > n_ctx:
                self._say(f"{self.head.path}: has {n:,} cells, -c gives {n_ctx:,}: left out")
                self.head = None
        name = hashlib.sha256(digest.encode() + np.asarray(ids, "<i4").tobytes()).hexdigest()
        self._path = library.folder / f"{name[:32]}.kv"
        self._saver.expect(self._path, None)

    def _is_new(self, ids: list[int], runtime: Runtime) -> bool:
        """Whether the session does not begin with all of a prompt already, as exact as now."""
        if self.head is None:
            return True
        n_exact = self.head.manifest.exact.get(self.head.seq_id)
        if runtime.n_exact() is None and n_exact is not None and n_exact < len(ids):
            return True
        return common_prefix(self.head.held[1], np.asarray(ids, np.int32)) < len(ids)

    def _check_single(self, head: Head) -> None:
        if self._use.writes and len(head.text.pieces) > 1:
            raise UsageError(
                f"{head.path}: it holds sequences {sorted(head.text.pieces)} and a run goes on "
                "with one, so the others would be lost; add --session_ro"
            )

    def _say(self, line: str) -> None:
        if not self._use.quiet:
            output.note(line)


def real_path(name: str) -> Path:
    """Where a session is written: what a link points to, so that the link stays one."""
    path = Path(name)
    return path.resolve() if path.is_symlink() else path


def _held(head: Head) -> Held:
    """The text of a session with one sequence."""
    n_more = sum(head.manifest.n_tokens.values()) - len(head.held[1])
    said = head.manifest.fingerprint
    return Held(fingerprint=said, ids=head.held[1], n_more=n_more)


def _apply(plan: Reuse, runtime: Runtime) -> list[tuple[int, int]]:
    """Removes and moves what a plan says; returns what is left to evaluate."""
    spans = []
    for op in operations(plan):
        if isinstance(op, Remove):
            runtime.seq_rm(0, op.p0, op.p1)
        elif isinstance(op, Move):
            runtime.seq_add(0, op.p0, op.p1, op.d)
        else:
            spans.append((op.start, op.end))
    return spans


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
