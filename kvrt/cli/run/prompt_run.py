"""From flags to a runtime that has read the prompt, with a session where one is named."""

from kvrt import Runtime
from kvrt.cli.flags.evaluate import EvalFlags
from kvrt.cli.process import devices, startup, status
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.run import prompt
from kvrt.cli.run.generation import Job, Reading, all_of
from kvrt.cli.run.kept_session import Kept
from kvrt.cli.session.open_session import follow
from kvrt.cli.setup import config, model


class Reader:
    """Opens a model and a session, makes a runtime, and reads a prompt into it.

    Attributes:
      model: whose weights may still be on their way.
      config: of the cache.
      runtime: empty until `read`.
    """

    def __init__(self, options: EvalFlags, given: prompt.Prompt, kept: Kept | None, *, quiet: bool):
        """Everything that can be refused without the weights is refused here.

        Args:
          options: flags of the command.
          given: the prompt.
          kept: the session, or None.
          quiet: no progress.
        """
        self._quiet, self._kept = quiet, kept
        self.model = model.open_model(
            options.model, dtype=options.dtype, on_host=options.mesh is not None, quiet=quiet
        )
        spec = self.model.spec
        if kept is not None and kept.head is not None:
            options = follow(options, kept.head.manifest)
        self._options, tokenizer = options, self.model.tokenizer
        if kept is not None:
            self._ids = kept.tokens(given, tokenizer)
        else:
            self._ids = prompt.encode(given, tokenizer, chat=given.chat)
        left = startup.available_bytes()
        options = config.sized(options, spec, len(self._ids), left, quiet=quiet)
        self.config = config.cache_config(options, spec.n_ctx_train)
        config.check_prompt(options, len(self._ids), spec, self.config)
        policy = None
        if not config.stays(spec, self.config):
            policy = config.context_shift(
                options, self.config.n_ctx, self._ids, self.model.tokenizer
            )
        if kept is not None:
            kept.check(self.model, self.config, self._ids)
        mesh = devices.mesh(options)
        startup.check_memory(spec.groups, self.config, spec.recurrent, mesh=mesh)
        self.runtime = Runtime(
            self.model.shapes,
            self.config,
            policy=policy,
            identity=self.model.identity,
            mesh=mesh,
        )

    def read(self, interrupt: Interrupt) -> Reading:
        """Waits for the weights, restores what fits and evaluates the rest.

        Raises:
          SessionMismatch: the session is of another model or cache.
          BadSession: it is damaged.
        """
        kept = self._kept
        n = kept.n_to_do(self._ids) if kept else len(self._ids)
        model.prepare(self.runtime, self.model, self._options, n, quiet=self._quiet)
        reading = self._begin()
        reading.run(self.runtime, interrupt, quiet=self._quiet)
        if kept:
            kept.after_prompt(self.runtime, reading)
        return reading

    def _begin(self) -> Reading:
        if self._kept is None:
            return all_of(self._ids)
        with status.waiting("reading the session", not self._quiet):
            return self._kept.begin(self.runtime, self._ids)

    def keep(self, job: Job) -> None:
        """Starts to save all that is held by now, sampled tokens included."""
        if self._kept and job.draw is not None:
            self._kept.save(self.runtime, job.ids, job.draw)

    def finish(self) -> None:
        """Waits for the session to be on the disk.

        Raises:
          SaveError: it is not.
        """
        if self._kept:
            self._kept.finish()
