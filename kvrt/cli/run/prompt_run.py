"""From flags to a runtime that has read the prompt, with a session where one is named."""

from kvrt.cli.flags.cache import PlacementFlags
from kvrt.cli.flags.evaluate import EvalFlags
from kvrt.cli.process import output, status
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.run import prompt
from kvrt.cli.run.compress import is_compressed, read_compressed
from kvrt.cli.run.generation import Generation, Reading, all_of
from kvrt.cli.run.kept_session import KeptSession
from kvrt.cli.session.open_session import follow, follow_types
from kvrt.cli.setup.model import await_programs, compile_programs, open_with_status
from kvrt.cli.setup.open_runtime import open_runtime
from kvrt.cli.setup.policy import follow_policy, followed
from kvrt.cli.setup.weights import choose_weights
from kvrt.options.cache import CacheConfig
from kvrt.policies import AnyPolicy


class PromptRun:
    """Opens a model and a session, makes a runtime, and reads a prompt into it.

    Attributes:
      weights: the type of the model's matrices.
      model: whose weights may still be on their way.
      runtime: empty until `read`.
      kept: the session, or None.
    """

    def __init__(
        self, options: EvalFlags, given: prompt.Prompt, kept: KeptSession | None, *, quiet: bool
    ):
        """Everything that can be refused without the weights is refused here.

        Args:
          options: flags of the command.
          given: the prompt.
          kept: the session, or None.
          quiet: no progress.
        """
        self._quiet, self.kept = quiet, kept
        like = None if kept is None else kept.like(options.model)
        self.weights = choose_weights(options.dtype, like)
        if kept is not None and kept.opened is not None:
            options = follow(options, kept.opened.manifest)
        elif like is not None:
            options = follow_types(options, like.manifest)
        self._options = options
        self.model = open_with_status(
            options.model,
            dtype=self.weights.dtype,
            on_host=options.mesh is not None,
            quiet=quiet,
            window_sinks=options.window_sinks,
        )
        self._ids = self._tokens(given)
        if kept is not None:
            options = self._options = self._with_policy(kept)
        self.runtime = open_runtime(
            options, self.model, self._ids, self._check, n_prompt=len(self._ids), quiet=quiet
        )

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt, those that it follows included."""
        return len(self._ids)

    def _with_policy(self, kept: KeptSession) -> EvalFlags:
        """The options with the session's policy by position, which is said where it matters."""
        said, before = kept.policy(self._ids), self._options
        options = follow_policy(before, said, self._ids, self.model.tokenizer)
        if (flags := followed(before, options)) and not self._quiet:
            output.note(f"{kept.path}: {flags}, as the session was left")
        return options

    def _tokens(self, given: prompt.Prompt) -> list[int]:
        """All tokens of the prompt, those that it follows included."""
        if self.kept is not None:
            return self.kept.tokens(given, self.model.tokenizer)
        return prompt.prompt_ids(given, self.model.tokenizer, chat=given.chat)

    def _check(self, config: CacheConfig, policy: AnyPolicy | None) -> None:
        if self.kept is not None:
            self.kept.check(self.model, config, policy, self._ids)

    def prepare(self) -> None:
        """Compiles programs and waits for the weights."""
        n = self.kept.n_to_do(self._ids) if self.kept else len(self._ids)
        compile_programs(self.runtime, self.model, self._options, n, quiet=self._quiet)

    def read(self, interrupt: Interrupt) -> Reading:
        """Restores what fits and evaluates the rest, saving it from time to time.

        Raises:
          SessionMismatch: the session is of another model or cache.
          BadSession: it is damaged.
        """
        kept, reading = self.kept, self._begin()

        def each() -> None:
            if kept:
                kept.during_prompt(self.runtime, reading)

        if isinstance(self._options, PlacementFlags) and self._options.blocks:
            self.runtime.to_blocks(0)
        if is_compressed(self._options, self.runtime, reading):
            tokenizer = self.model.tokenizer
            read_compressed(self.runtime, reading, tokenizer, interrupt, quiet=self._quiet)
        else:
            reading.run(self.runtime, interrupt, each, quiet=self._quiet)
        if kept:
            kept.after_prompt(self.runtime, reading)
        if reading.whole:
            await_programs(self.runtime, quiet=self._quiet)
        return reading

    def _begin(self) -> Reading:
        if self.kept is None:
            return all_of(self._ids)
        with status.waiting("reading the session", not self._quiet):
            return self.kept.begin(self.runtime, self._ids)

    def keep(self, job: Generation) -> None:
        """Starts to save all that is held by now, sampled tokens included."""
        if self.kept and job.draw is not None:
            self.kept.save(self.runtime, job.ids, job.draw)

    def finish(self) -> None:
        """Waits for the session to be on the disk.

        Raises:
          SaveError: it is not.
        """
        if self.kept:
            self.kept.finish()
