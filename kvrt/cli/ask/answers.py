"""Questions behind a text that is held, and their answers, written one after the other."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from kvrt.cli.flags.session_files import AskOptions
from kvrt.cli.process import output
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.report import summary
from kvrt.cli.report.summary import exactness_lines
from kvrt.cli.run.conversation import Conversation
from kvrt.cli.run.generation import Reading
from kvrt.errors import CacheFull
from kvrt.session import OpenedSession
from kvrt_models.tokenizer.encode import Tokenizer


class Asking(Conversation, abc.ABC):
    """Questions that each stand behind the same text, which a subclass reads."""

    options: AskOptions

    def __init__(
        self, options: AskOptions, questions: Sequence[str], like: OpenedSession | None = None
    ):
        """Opens the model; each question is encoded by itself, and held tokens stay."""
        super().__init__(options, like)
        self._questions = questions
        self._ids = question_ids(questions, self.model.tokenizer)
        self._longest = max(map(len, self._ids))

    def run(self) -> int:
        """Answers all questions in their order; returns the exit code.

        Raises:
          BadLogits, CacheFull: they ended an answer; what there is of it is written.
        """
        self.compile(self._longest)
        self._open()
        with Interrupt() as interrupt:
            codes = (self._answer(i, interrupt) for i in range(len(self._ids)))
            return next(filter(None, codes), 0)

    @abc.abstractmethod
    def _open(self) -> None:
        """Reads the text, once the weights are there."""

    @abc.abstractmethod
    def _read(self, i: int, interrupt: Interrupt) -> tuple[Reading, Mapping[str, Any] | None]:
        """Reads question i behind the text; further fields of its --json."""

    def _answer(self, i: int, interrupt: Interrupt) -> int:
        """Writes what follows question i; returns the exit code, 0 to go on."""
        reading, more = self._read(i, interrupt)
        options, question = self.options, self._questions[i]
        if options.questions is not None and not (options.quiet or options.json):
            output.write_text(f"> {question}\n")
        last = i == len(self._questions) - 1
        reason = write_answer(self, reading, interrupt, question, more=more, last=last)
        if reason == "interrupted":
            return interrupt.exit_code
        if reason == "context_full" and options.n_predict != -2:
            raise CacheFull(
                f"the context is full at question {i + 1}: {self.runtime.config.n_ctx:,} cells "
                "hold the session, the question and the answer; raise -c"
            )
        return 0


def write_answer(
    talk: Conversation,
    reading: Reading,
    interrupt: Interrupt,
    question: str,
    *,
    more: Mapping[str, Any] | None = None,
    last: bool = True,
) -> str:
    """Writes what follows a question that was read, and its numbers; returns why it ended.

    Tokens that were dropped are told with --quiet too.

    Raises:
      BadLogits: they ended it; the answer so far is written.
    """
    job = talk.generation(reading)
    reason = job.run(interrupt)
    outcome = job.outcome(reason)
    lines = exactness_lines(outcome.approximations)
    if job.options.json:
        output.write_text(summary.outcome_json(outcome, question=question, more=more) + "\n")
    else:
        output.write_text("\n" if last else "\n\n")
        lines = [*summary.summary(outcome)[:2], *lines]
    dropped = [x for x in outcome.approximations if x.n_dropped]
    if lines and not talk.quiet:
        output.note("\n".join(lines))
    elif dropped:
        output.warn(f"the answer is {dropped[0].line}; raise -c to keep them")
    if job.failed is not None:
        raise job.failed
    return reason


def question_ids(questions: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens of each question behind a blank line, encoded by itself: what is held stays."""
    return [tokenizer.encode(f"\n\n{q}", add_special=False) for q in questions]
