"""Answers to questions, written one after the other."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvrt import Runtime
from kvrt.cli.flags.session_files import AskOptions
from kvrt.cli.process import output
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.report import summary
from kvrt.cli.report.exactness import exactness_lines
from kvrt.cli.run.generation import Generation, Reading
from kvrt.cli.setup.model import await_programs
from kvrt.cli.setup.weights import WeightsChoice
from kvrt.errors import CacheFull
from kvrt_models.load import Opened
from kvrt_models.tokenizer.encode import Tokenizer


class Answers:
    """Writes the answers of one call."""

    def __init__(
        self, options: AskOptions, model: Opened, weights: WeightsChoice, questions: Sequence[str]
    ):
        """Nothing is written yet."""
        self._options, self._model, self._weights = options, model, weights
        self._questions = questions

    def write(
        self,
        i: int,
        runtime: Runtime,
        reading: Reading,
        interrupt: Interrupt,
        more: Mapping[str, Any] | None = None,
    ) -> int:
        """Writes what follows a question that was read; returns the exit code, 0 to go on.

        Args:
          i: which of the questions.
          runtime: where the question stands last.
          reading: what was read.
          interrupt: ends it between two tokens.
          more: further fields of --json.

        Raises:
          BadLogits, CacheFull: they ended it; the answer so far is written.
        """
        options = self._options
        if reading.whole:
            await_programs(runtime, quiet=options.quiet)
        if options.questions is not None and not (options.quiet or options.json):
            output.write_text(f"> {self._questions[i]}\n")
        note = self._weights.note(self._model)
        job = Generation(options, self._model, runtime, reading, note)
        reason = job.run(interrupt)
        last = i == len(self._questions) - 1
        end_answer(options, job.outcome(reason), self._questions[i], more, last=last)
        if job.failed is not None:
            raise job.failed
        if reason == "interrupted":
            return interrupt.exit_code
        if reason == "context_full" and options.n_predict != -2:
            raise CacheFull(
                f"the context is full at question {i + 1}: {runtime.config.n_ctx:,} cells hold "
                "the session, the question and the answer; raise -c"
            )
        return 0


def end_answer(
    options: AskOptions,
    outcome: summary.Outcome,
    question: str,
    more: Mapping[str, Any] | None = None,
    *,
    last: bool = True,
) -> None:
    """Ends an answer, whose text is written already unless --json is given.

    Tokens that were dropped are told with --quiet too.
    """
    lines = exactness_lines(outcome.approximations)
    if options.json:
        output.write_text(summary.outcome_json(outcome, question=question, more=more) + "\n")
    else:
        output.write_text("\n" if last else "\n\n")
        lines = [*summary.summary(outcome)[:2], *lines]
    dropped = [x for x in outcome.approximations if x.n_dropped]
    if lines and not options.quiet:
        output.note("\n".join(lines))
    elif dropped:
        output.warn(f"the answer is {dropped[0].line}; raise -c to keep them")


def question_ids(questions: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens of each question behind a blank line, encoded by itself: what is held stays."""
    return [tokenizer.encode(f"\n\n{q}", add_special=False) for q in questions]
