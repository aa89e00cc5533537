"""`kvrt ask --schema`: one prompt that is built of the modules of a session."""

import functools
import time
from pathlib import Path

import jax

from kvrt import PromptCache, session
from kvrt.cli.ask.answers import end_answer
from kvrt.cli.flags.session_files import AskOptions
from kvrt.cli.process import output, status
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.report.exactness import reused_part
from kvrt.cli.run.generation import Generation, Reading
from kvrt.cli.schema import opened
from kvrt.cli.session.open_session import check_fits, follow, naming_session, open_existing
from kvrt.cli.setup.model import await_programs, compile_programs, open_with_status
from kvrt.cli.setup.open_runtime import ready
from kvrt.cli.setup.weights import choose_weights
from kvrt.errors import UsageError
from kvrt.reuse.schema import ModulePrompt, PlacedSchema, read_request


def execute(options: AskOptions) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: what keeps it from starting, or ended it; what was written so far stays.
    """
    assert options.session is not None
    if options.question is None or options.seq is not None:
        raise UsageError("--schema takes one prompt, as QUESTION; leave out -F and --seq")
    wanted = read_request(options.question)
    held = open_existing(Path(options.session))
    with ready(options):
        return _Prompt(follow(options, held.manifest), held, wanted).run()


class _Prompt:
    """A prompt of modules, and what follows it."""

    def __init__(self, options: AskOptions, held: session.OpenedSession, wanted: ModulePrompt):
        """Everything that can be refused without the weights is refused here."""
        assert options.schema is not None
        self._options, self._held, self._wanted = options, held, wanted
        self._weights = choose_weights(options.dtype, held)
        self._model = open_with_status(
            options.model, dtype=self._weights.dtype, on_host=False, quiet=options.quiet
        )
        encode = opened.encoder(self._model.tokenizer)
        self._placed: PlacedSchema = opened.read_placed(options.schema, self._model)
        self._arguments = {key: encode(text) for key, text in wanted.arguments.items()}
        self._suffix = encode(f"\n\n{wanted.text}") if wanted.text else []
        self._n_new = len(self._suffix) + sum(map(len, self._arguments.values()))
        check = functools.partial(check_fits, held, self._model)
        self._runtime = opened.open_modules(
            options, self._model, self._placed, self._n_new + 1, check
        )

    def run(self) -> int:
        """Serves the prompt and writes what follows; returns the exit code."""
        runtime, options, held = self._runtime, self._options, self._held
        quiet = options.quiet
        compile_programs(runtime, self._model, options, max(self._n_new, 1), quiet=quiet)
        with status.waiting("reading the session", not quiet), naming_session(held.path):
            runtime.restore(session.read(held))
            modules = PromptCache(runtime, self._placed, opened.FIRST_SEQ)
        start = time.perf_counter()
        served = modules.serve(0, self._wanted.modules, self._suffix, self._arguments)
        jax.block_until_ready(served.logits)
        seconds = time.perf_counter() - start
        if not quiet:
            output.note(
                f"{held.path}: {served.n_shared:,} tokens of modules shared, {served.n_computed:,} "
                f"computed in {seconds:.2f} s; the modules have not seen each other"
            )
        ids = runtime.token_history(0)[1].tolist()
        reading = Reading(
            ids=ids,
            n_restored=served.n_shared,
            spans=[(len(ids) - served.n_computed, len(ids))],
            n_done=served.n_computed,
            seconds=seconds,
            reused=reused_part(runtime.n_exact(), "modules"),
        )
        await_programs(runtime, quiet=quiet)
        job = Generation(options, self._model, runtime, reading, self._weights.note(self._model))
        with Interrupt() as interrupt:
            reason = job.run(interrupt)
            end_answer(options, job.outcome(reason), options.question or "")
            if job.failed is not None:
                raise job.failed
            return interrupt.exit_code if reason == "interrupted" else 0
