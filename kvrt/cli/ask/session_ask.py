"""Questions after the text of a session, which stays as it is."""

import functools
import os
import time
from pathlib import Path

from kvrt import session
from kvrt.cli.ask.answers import Answers, question_ids
from kvrt.cli.flags.session_files import AskOptions
from kvrt.cli.process import output, status
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.report import phrases
from kvrt.cli.report.exactness import reused_part
from kvrt.cli.run.generation import Reading
from kvrt.cli.session.open_session import (
    check_fits,
    choose_sequence,
    follow,
    naming_session,
    open_existing,
)
from kvrt.cli.setup.model import compile_programs, open_with_status
from kvrt.cli.setup.open_runtime import open_runtime, ready
from kvrt.cli.setup.policy import follow_policy, followed
from kvrt.cli.setup.weights import choose_weights
from kvrt.errors import UsageError
from kvrt.session import OpenedSession


def ask_session(options: AskOptions, questions: list[str]) -> int:
    """Answers questions after a session; returns the exit code.

    Raises:
      KvrtError: what keeps it from starting, or ended it; answers so far are written.
    """
    assert options.session is not None
    _check_order(options)
    opened = choose_sequence(open_existing(Path(options.session)), options.seq)
    with ready(options):
        return Asker(follow(options, opened.manifest), opened, questions).run()


class Asker:
    """A session in memory, and questions that each start from it."""

    def __init__(self, options: AskOptions, opened: OpenedSession, questions: list[str]):
        """Everything that can be refused without the weights is refused here."""
        self._options, self._opened = options, opened
        self._weights = choose_weights(options.dtype, opened)
        self._model = open_with_status(
            options.model,
            dtype=self._weights.dtype,
            on_host=options.mesh is not None,
            quiet=options.quiet,
            window_sinks=options.window_sinks,
        )
        self._held = opened.held[1].tolist()
        said = opened.manifest.policies.get(opened.seq_id)
        options = follow_policy(options, said, self._held, self._model.tokenizer)
        if (flags := followed(self._options, options)) and not options.quiet:
            output.note(f"{opened.path}: {flags}, as the session was left")
        self._options = options
        self._ids = question_ids(questions, self._model.tokenizer)
        self._longest = max(map(len, self._ids))
        self._runtime = open_runtime(
            options,
            self._model,
            self._held + self._ids[0],
            functools.partial(check_fits, opened, self._model),
            n_prompt=len(self._held) + self._longest,
            quiet=options.quiet,
        )
        self._answers = Answers(options, self._model, self._weights, questions)

    def run(self) -> int:
        """Answers all questions in their order; returns the exit code."""
        runtime, quiet = self._runtime, self._options.quiet
        compile_programs(runtime, self._model, self._options, self._longest, quiet=quiet)
        start = time.perf_counter()
        with status.waiting("reading the session", not quiet):
            self._snapshot = session.read(self._opened)
            self._restore()
        seconds = time.perf_counter() - start
        self._end = runtime.seq_pos_max() + 1
        self._counts = self._upkeep()
        if not quiet:
            n = len(self._held)
            opened, select = self._opened, runtime.config.select
            output.note(
                f"{opened.path}: {n:,} {phrases.token_noun(n)} restored in {seconds:.2f} s"
                f"{phrases.sampled_by(opened.manifest, opened.seq_id, select)}"
            )
        with Interrupt() as interrupt:
            return self._answer_all(interrupt)

    def _answer_all(self, interrupt: Interrupt) -> int:
        for i, ids in enumerate(self._ids):
            if i:
                self._back()
            reading = Reading(
                ids=self._held + ids,
                n_restored=len(self._held),
                reused=reused_part(self._runtime.n_exact(), "session"),
                since=self._runtime.stats(),
                spans=[(len(self._held), len(self._held) + len(ids))],
            )
            reading.run(self._runtime, interrupt, quiet=self._options.quiet)
            code = self._answers.write(i, self._runtime, reading, interrupt)
            if code:
                return code
        return 0

    def _back(self) -> None:
        """To the end of the session: by removing what came after it, if nothing else went."""
        runtime = self._runtime
        if self._upkeep() == self._counts and runtime.can_remove(0, self._end):
            runtime.seq_rm(0, self._end)
        else:
            self._restore()
            self._counts = self._upkeep()

    def _restore(self) -> None:
        with naming_session(self._opened.path):
            self._runtime.restore(self._snapshot, {self._opened.seq_id: 0})

    def _upkeep(self) -> tuple[int, int, int]:
        stats = self._runtime.stats()
        return stats.n_dropped, stats.n_defrag, stats.n_extend


def _check_order(options: AskOptions) -> None:
    """Refuses a question before its session, which is no file where the question is one."""
    first, second = options.session or "", options.question or ""
    if second and os.path.exists(second) and not os.path.exists(first):
        raise UsageError(
            f"{first}: no such session, but {second} is there; the session comes first: "
            f"kvrt ask {second} {first!r}"
        )
