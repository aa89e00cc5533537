"""The session of a run: what is restored from it, what that saves, and what is written to it."""

import dataclasses
import hashlib
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np

from kvrt import session
from kvrt.cli import output, words
from kvrt.cli.head import Head, check_fits, is_library, open_head, restore
from kvrt.cli.job import Reading, all_of
from kvrt.config import CacheConfig
from kvrt.engine import Runtime
from kvrt.engine.generate import After
from kvrt.engine.sample import can_draw
from kvrt.errors import BadLogits, BadToken, CannotRewind, UsageError
from kvrt.extent import extent
from kvrt.session import files, fingerprint
from kvrt.session.damage import find_damage
from kvrt.session.diff import common_prefix
from kvrt.session.library import Library
from kvrt.session.reuse import Move, Remove, Reuse, operations, plan_reuse
from models.load import Opened


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
        if self._library is not None and writes:
            self._library.check_writable()
        if self._library is None:
            if writes:
                files.check_writable(self._path)
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
            if self._library is not None and self._writes and self.head is not None:
                self._library.touch(self.head.path)
        elif reading.whole or n_more > 0:
            if self._writes:
                _check_sound(self._path, runtime, reading)
            self.save(runtime)

    def save(self, runtime: Runtime, draw: session.Draw | None = None) -> None:
        """Starts to save all that a runtime holds, after the save that is on its way."""
        if not self._writes:
            return
        self.finish()
        taken = runtime.snapshot({} if draw is None else {0: draw})
        if jax.process_index():
            return  # All have to take part in the snapshot; the first process writes it.
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

    def _is_new(self, ids: list[int], runtime: Runtime) -> bool:
        """Whether the session does not begin with all of a prompt already, as exact as now."""
        if self.head is None:
            return True
        n_exact = self.head.manifest.exact.get(self.head.seq_id)
        if runtime.n_exact() is None and n_exact is not None and n_exact < len(ids):
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
    except (BadToken, CannotRewind):
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


def _check_sound(path: Path, runtime: Runtime, reading: Reading) -> None:
    """Refuses to save keys and values that are not finite.

    Every later token sees them, so the last one's logits tell; without them the arrays do.
    """
    if reading.whole and can_draw(runtime.last_logits(0)[0]):
        return
    found = find_damage(runtime.snapshot())
    if reading.whole or found:
        why = found or "the logits of the last token have NaN, +inf or no finite value"
        raise BadLogits(f"{path}: not saved, since {why}; the weights are damaged: check the model")
