"""`kvrt prefill`: reads a text into a session, and generates nothing."""

import dataclasses

from kvrt.cli.flags.session_files import PrefillOptions
from kvrt.cli.process import output
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.report import phrases
from kvrt.cli.run import prompt
from kvrt.cli.run.kept_session import KeptSession, SessionUse
from kvrt.cli.run.prompt_run import PromptRun
from kvrt.cli.setup.open_runtime import ready


def execute(options: PrefillOptions, given: prompt.Prompt) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: what keeps it from starting, or ended it.
    """
    if options.schema is not None:
        from kvrt.cli.schema import encode

        return encode.execute(options, given)
    if options.as_chunk:
        given = dataclasses.replace(given, alone=True)
    with ready(options):
        return _execute(options, given)


def _execute(options: PrefillOptions, given: prompt.Prompt) -> int:
    assert options.output is not None
    use = SessionUse(
        overwrite=options.overwrite, append=options.append, quiet=options.quiet, seq=options.seq
    )
    kept = KeptSession(options.output, use)
    reader = PromptRun(options, given, kept, quiet=options.quiet)
    reader.prepare()
    with Interrupt() as interrupt:
        try:
            reading = reader.read(interrupt)
        finally:
            reader.finish()
        if not options.quiet:
            n = reading.n_done
            output.note(f"{n:,} {phrases.token_noun(n)} read in {reading.seconds:.2f} s")
        return 0 if reading.whole else interrupt.exit_code
