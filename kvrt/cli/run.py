"""`kvrt run`: loads a model, evaluates the prompt, streams what follows, and reports."""

import sys

from kvrt.cli import devices, output, prompt, report, startup
from kvrt.cli.head import follow_draw
from kvrt.cli.interrupt import EXIT_CODE, Interrupt
from kvrt.cli.job import Job
from kvrt.cli.options import RunOptions
from kvrt.cli.reader import Reader
from kvrt.cli.sessions import Kept
from kvrt.errors import BadLogits, CacheFull, UsageError


def execute(options: RunOptions, given: prompt.Prompt) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: what keeps the run from starting, or ended it; the text so far is written.
    """
    with devices.joined(options):
        startup.check_device(options.attention)
        startup.keep_programs()
        with startup.enough_memory():
            return _execute(options, given)


def _execute(options: RunOptions, given: prompt.Prompt) -> int:
    kept = None
    if options.session is not None:
        kept = Kept(
            options.session,
            writes=not options.session_ro,
            chunks=options.reuse_chunks,
            quiet=options.quiet,
        )
        if given.is_none:
            options = follow_draw(options, kept.head if kept else None)
    reader = Reader(options, given, kept, quiet=options.quiet)
    n_vocab = reader.model.spec.n_vocab
    if options.logprobs > n_vocab:
        raise UsageError(f"--logprobs {options.logprobs}: the vocabulary has {n_vocab} tokens")
    with Interrupt() as interrupt:
        reading = reader.read(interrupt)
        job = Job(options, reader.model, reader.runtime, reading)
        reason = job.run(interrupt)
    _report(options, job, reason)
    if job.failed is not None:
        reader.finish()
        unsaved = "; the answer is not saved" if options.session_all else ""
        raise BadLogits(f"{job.failed}{unsaved}")
    if options.cells:
        report.print_cells(reader.runtime.cells, reader.runtime.stats())
    if options.session_all and job.draw is not None:
        reader.keep(job.draw)
    reader.finish()
    if reason == "context_full" and options.n_predict != -2:
        raise CacheFull(
            f"the context is full: its {reader.config.n_ctx} cells hold the {len(reading.ids)} "
            "tokens of the prompt and what follows, and shifting is off; "
            f"{'raise -c' if reader.config.self_extend else 'use --context_shift or raise -c'}"
        )
    return EXIT_CODE if reason == "interrupted" else 0


def _report(options: RunOptions, job: Job, reason: str) -> None:
    outcome = job.outcome(reason)
    if options.json:
        output.write_text(report.to_json(outcome) + "\n")
    elif not options.quiet:
        # On a terminal the summary would go on in the text's last line.
        shared = sys.stdout.isatty() and sys.stderr.isatty()
        gap = "\n\n" if shared and not job.last.endswith("\n") else "\n"
        output.note(gap + "\n".join(report.summary(outcome)))
