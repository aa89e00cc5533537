"""`kvrt run` and `kvrt prefill`: a prompt is read, perhaps into a session, and continued."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from kvrt.cli.flags.evaluate import RunOptions
from kvrt.cli.flags.session_files import PrefillOptions
from kvrt.cli.process import output
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.process.startup import ready
from kvrt.cli.report import phrases, summary
from kvrt.cli.report.summary import exactness_lines
from kvrt.cli.report.tables import printable
from kvrt.cli.run import prompt
from kvrt.cli.run.conversation import PromptRun
from kvrt.cli.run.generation import Generation
from kvrt.cli.run.kept_session import KeptSession
from kvrt.cli.session.open_session import follow_sampling
from kvrt.cli.setup.model import open_drafter
from kvrt.errors import BadLogits, CacheFull, UsageError
from kvrt.options.cache import CacheConfig
from kvrt.session.io import is_library
from kvrt_models.tokenizer.encode import Tokenizer

MOST_SHOWN = 400  # characters; of a longer prompt the end is shown
_WORD = 40  # characters in which a word is expected to end


def execute(options: RunOptions, given: prompt.Prompt) -> int:
    """Runs the command and returns its exit code; raises KvrtError."""
    with ready(options):
        return _execute(options, given)


def _execute(options: RunOptions, given: prompt.Prompt) -> int:
    kept, name = None, options.session
    if name is not None:
        options = _remembers(options, name)
        _check_stride(options)
        kept = KeptSession(options)
        if kept.follows(given):
            options = follow_sampling(options, kept.opened)
    reader = PromptRun(options, given, kept)
    n_vocab = reader.model.spec.n_vocab
    if options.logprobs > n_vocab:
        raise UsageError(f"--logprobs {options.logprobs}: the vocabulary has {n_vocab:,} tokens")
    drafter = open_drafter(options, reader.model, reader.runtime.config, reader.n_prompt)
    reader.prepare()
    with Interrupt() as interrupt:
        # Whatever fails, as a terminal does that is closed: a save that has begun ends.
        try:
            reading = reader.read(interrupt)
            job = reader.generation(reading, drafter)
            reason = _answer(options, reader, job, interrupt)
        finally:
            reader.finish()
    if reason == "context_full" and options.n_predict != -2:
        raise _full(reader.runtime.config, len(reading.ids))
    return interrupt.exit_code if reason == "interrupted" else 0


def _answer(options: RunOptions, reader: PromptRun, job: Generation, interrupt: Interrupt) -> str:
    """Writes what follows the prompt, starts to save it, and reports; returns why it ended."""
    shown = not (options.quiet or options.json or options.chat)
    if shown and job.reading.whole and options.n_predict != 0:
        show_prompt(job.reading.ids, reader.model.tokenizer)
    reason = _write(reader, job, interrupt, answers=options.session_all)
    if options.session_all and job.failed is None:
        reader.keep(job)
    _report(options, job, reason)
    if job.failed is not None:
        unsaved = "; the answer is not saved" if options.session_all else ""
        raise BadLogits(f"{job.failed}{unsaved}")
    if options.cells:
        summary.print_cells(reader.runtime.cells, reader.runtime.stats())
    return reason


def _full(config: CacheConfig, n_prompt: int) -> CacheFull:
    remedy = "raise -c" if config.self_extend else "use --context_shift or raise -c"
    return CacheFull(
        f"the context is full: its {config.n_ctx:,} cells hold the {n_prompt:,} tokens of the "
        f"prompt and what follows, and shifting is off; {remedy}"
    )


def _remembers(options: RunOptions, name: str) -> RunOptions:
    """The options with --session_all for a conversation, whose next turn needs the answer."""
    asked = "session_all" in options.given or options.session_ro
    if asked or not options.chat or is_library(Path(name)):
        return options
    return dataclasses.replace(options, session_all=True)


def _check_stride(options: RunOptions) -> None:
    """Refuses to save what a compiled run has in the cache beyond what was taken of it."""
    ahead = f"--stride {options.stride}" if options.stride > 1 else None
    ahead = f"--draft {options.draft}" if options.draft is not None else ahead
    if ahead and options.session_all:
        raise UsageError(
            f"{ahead} runs ahead of what is shown, and a session of the answer "
            "must not have more; leave it out, or save the prompt alone (--nosession_all)"
        )


def _write(reader: PromptRun, job: Generation, interrupt: Interrupt, *, answers: bool) -> str:
    """Writes what follows, saving it from time to time if `answers`; returns why it ended.

    Raises:
      OutputError: it cannot be written; what was by then is saved. Likewise BrokenPipeError.
    """
    kept = reader.kept if answers else None

    def each() -> None:
        if kept is not None and kept.due:
            reader.keep(job)

    try:
        return job.run(interrupt, each)
    except (output.OutputError, BrokenPipeError):
        if kept is not None and kept.alone:
            reader.keep(job)
        raise


def _report(options: RunOptions, job: Generation, reason: str) -> None:
    outcome = job.outcome(reason)
    if options.json:
        output.write_text(summary.outcome_json(outcome) + "\n")
        lines = exactness_lines(outcome.approximations)
        if lines and not options.quiet:
            output.note("\n".join(lines))
    elif not options.quiet:
        # On a terminal the summary would continue the text's last line.
        shared = sys.stdout.isatty() and sys.stderr.isatty()
        gap = "\n\n" if shared and not job.last.endswith("\n") else "\n"
        output.note(gap + "\n".join(summary.summary(outcome)))


def show_prompt(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Writes the prompt on standard error, if that is a terminal, so that the text follows it."""
    if not sys.stderr.isatty():
        return
    from rich.text import Text

    console = output.console(highlight=False, soft_wrap=True)
    console.print(Text(prompt_ending(ids, tokenizer), style="dim"), end="")


def prompt_ending(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of a prompt, of a long one the last words behind an ellipsis.

    Control tokens give nothing; control characters are escaped, but for line ends and tabs.
    """
    text = tokenizer.decode(ids[-MOST_SHOWN:])
    if len(ids) > MOST_SHOWN or len(text) > MOST_SHOWN:
        # A character or a word may have been cut in two.
        text = text[-MOST_SHOWN:].lstrip("\ufffd")
        found = re.search(r"\s", text[:_WORD])
        text = "…" + (text[found.start() :] if found else text)
    else:
        # Some vocabularies put a space before a text.
        text = text.lstrip(" ")
    return re.sub(r"[^\n\t]+", lambda part: printable(part[0]), text)


def execute_prefill(options: PrefillOptions, given: prompt.Prompt) -> int:
    """Runs the command and returns its exit code; raises KvrtError."""
    if options.schema is not None:
        from kvrt.cli.ask import modules

        return modules.encode_modules(options, given)
    if options.as_chunk:
        given = dataclasses.replace(given, alone=True)
    with ready(options):
        return _prefill(options, given)


def _prefill(options: PrefillOptions, given: prompt.Prompt) -> int:
    reader = PromptRun(options, given, KeptSession(options))
    reader.prepare()
    with Interrupt() as interrupt:
        try:
            reading = reader.read(interrupt)
        finally:
            reader.finish()
        if not options.quiet:
            n = reading.n_done
            output.note(f"{phrases.counted(n, 'token')} read in {reading.seconds:.2f} s")
        return 0 if reading.whole else interrupt.exit_code
