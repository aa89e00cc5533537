"""`kvrt ask`: questions after the text of a session, which stays as it is, or after chunks."""

import functools
import os
import time
from pathlib import Path

from kvrt import session
from kvrt.cli.ask.answers import Asking
from kvrt.cli.ask.chunk_ask import ask_chunks
from kvrt.cli.flags.session_files import AskOptions
from kvrt.cli.process import output
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.process.startup import ready
from kvrt.cli.report import phrases
from kvrt.cli.report.summary import reused_part
from kvrt.cli.run import prompt
from kvrt.cli.run.generation import Reading
from kvrt.cli.session.open_session import check_fits, follow
from kvrt.errors import UsageError
from kvrt.runtime.session_file import restore_sequence
from kvrt.session import OpenedSession
from kvrt.session.io import open_existing


def execute(options: AskOptions) -> int:
    """Runs the command and returns its exit code; raises KvrtError."""
    if options.schema is not None:
        from kvrt.cli.ask.modules import ask_modules

        return ask_modules(options)
    questions = _questions(options)
    if options.chunk:
        return ask_chunks(options, questions)
    assert options.session is not None
    _check_order(options)
    opened = open_existing(Path(options.session)).choose(options.seq, name="--seq")
    with ready(options):
        return SessionAsker(follow(options, opened.manifest), opened, questions).run()


def _questions(options: AskOptions) -> list[str]:
    if options.question is not None:
        found = [options.question]
    else:
        assert options.questions is not None
        found = prompt.read_text("-F", options.questions).splitlines()
    found = [q.strip() for q in found if q.strip()]
    if not found:
        raise UsageError("the question is empty; give at least one character")
    return found


def _check_order(options: AskOptions) -> None:
    """Refuses a question before its session, which is no file where the question is one."""
    first, second = options.session or "", options.question or ""
    if second and os.path.exists(second) and not os.path.exists(first):
        raise UsageError(
            f"{first}: no such session, but {second} is there; the session comes first: "
            f"kvrt ask {second} {first!r}"
        )


class SessionAsker(Asking):
    """A session in memory, and questions that each start from it."""

    def __init__(self, options: AskOptions, opened: OpenedSession, questions: list[str]):
        """Everything that can be refused without the weights is refused here."""
        super().__init__(options, questions, opened)
        self._opened, self._held = opened, opened.held[1].tolist()
        said = opened.manifest.policies.get(opened.seq_id)
        self.follow_policy(said, self._held, opened.path)
        check = functools.partial(check_fits, opened, self.model)
        n_prompt = len(self._held) + self._longest
        self.open_runtime(self._held + self._ids[0], check, n_prompt)

    def _open(self) -> None:
        start = time.perf_counter()
        with output.waiting("reading the session", not self.quiet):
            self._snapshot = session.read(self._opened)
            self._restore()
        seconds = time.perf_counter() - start
        self._end = self.runtime.seq_pos_max() + 1
        self._counts = self._upkeep()
        if not self.quiet:
            n = len(self._held)
            opened, select = self._opened, self.runtime.config.select
            output.note(
                f"{opened.path}: {phrases.counted(n, 'token')} restored in {seconds:.2f} s"
                f"{phrases.sampled_by(opened.manifest, opened.seq_id, select)}"
            )

    def _read(self, i: int, interrupt: Interrupt) -> tuple[Reading, None]:
        if i:
            self._back()
        ids, n = self._held + self._ids[i], len(self._held)
        reading = Reading(
            ids=ids,
            n_restored=n,
            reused=reused_part(self.runtime.n_exact(), "session"),
            since=self.runtime.stats(),
            spans=[(n, len(ids))],
        )
        reading.run(self.runtime, interrupt, quiet=self.quiet)
        return reading, None

    def _back(self) -> None:
        """To the end of the session: by removing what came after it, if nothing else went."""
        runtime = self.runtime
        if self._upkeep() == self._counts and runtime.can_remove(0, self._end):
            runtime.seq_rm(0, self._end)
        else:
            self._restore()
            self._counts = self._upkeep()

    def _restore(self) -> None:
        restore_sequence(self.runtime, self._opened, self._snapshot)

    def _upkeep(self) -> tuple[int, int, int]:
        stats = self.runtime.stats()
        return stats.n_dropped, stats.n_defrag, stats.n_extend
