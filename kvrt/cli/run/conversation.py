"""A model with an empty runtime, the texts that are read into it, and what follows each of them."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from kvrt import Runtime
from kvrt.cli.flags.evaluate import EvalFlags, RunOptions, TextFlags
from kvrt.cli.flags.groups import BY_POSITION, PlacementFlags
from kvrt.cli.flags.session_files import AskOptions, PrefillOptions
from kvrt.cli.process import output, startup
from kvrt.cli.process.interrupt import Interrupt, Interrupted
from kvrt.cli.report import summary
from kvrt.cli.run import prompt
from kvrt.cli.run.generation import Generation, Reading, all_of
from kvrt.cli.run.kept_session import KeptSession
from kvrt.cli.session.open_session import follow, follow_types
from kvrt.cli.setup import config
from kvrt.cli.setup.model import (
    await_programs,
    choose_weights,
    compile_programs,
    open_with_status,
)
from kvrt.drafts.drafter import Drafter
from kvrt.drafts.layer_skip import LayerSkip
from kvrt.options.cache import CacheConfig
from kvrt.policies import AnyPolicy
from kvrt.runtime.compress import REPEAT, compress_prompt
from kvrt.session import OpenedSession

Check = Callable[[CacheConfig, AnyPolicy | None], Any]


class Conversation:
    """What every command has that evaluates text; everything else is refused without weights.

    Attributes:
      options: of the command, with what a session says in place of flags that were not given.
      weights: the type of the model's matrices.
      model: whose weights may still be on their way.
      runtime: without weights until `compile`.
    """

    runtime: Runtime

    def __init__(
        self, options: RunOptions | PrefillOptions | AskOptions, like: OpenedSession | None = None
    ):
        """Opens the model, as the session `like` had it where no flag says."""
        self.options, self.quiet = options, options.quiet
        self.weights = choose_weights(options.dtype, like)
        self.model = open_with_status(options, self.weights.dtype, quiet=self.quiet)

    def follow_policy(self, said: Mapping[str, Any] | None, ids: Sequence[int], path: Path) -> None:
        """Takes the policy by position that a session was left with, and says so."""
        before = self.options
        self.options = config.follow_policy(before, said, ids, self.model.tokenizer)
        if (flags := config.followed(before, self.options)) and not self.quiet:
            output.note(f"{path}: {flags}, as the session was left")

    def open_runtime(self, ids: list[int], check: Check, n_prompt: int | None = None) -> None:
        """Makes the runtime, in which a prompt has its cells.

        Args:
          ids: the prompt's tokens, of which the policy keeps --keep.
          check: refuses a session or a prompt that does not go with the cache.
          n_prompt: tokens of the longest prompt, if that is another one.

        Raises:
          KvrtError: a flag, the prompt, the session or memory does not go with the model.
        """
        spec, left, n = self.model.spec, startup.available_bytes(), n_prompt or len(ids)
        options: EvalFlags = config.sized(self.options, spec, n, left, quiet=self.quiet)
        cache = config.cache_config(options, spec.n_ctx_train)
        config.check_prompt(options, n, spec, cache)
        drops: AnyPolicy | None = None
        if options.policy_name not in BY_POSITION:
            drops = config.by_score(options, spec, cache.n_ctx)
            if n >= drops.budget + drops.interval and not self.quiet:
                output.warn(f"the prompt has {n:,} tokens: {summary.kept_line(drops)}")
        elif not config.stays(options, spec, cache):
            drops = config.policy_of_run(options, cache.n_ctx, ids, self.model.tokenizer)
        check(cache, drops)
        self.make_runtime(cache, drops)

    def make_runtime(self, cache: CacheConfig, drops: AnyPolicy | None = None) -> None:
        """Makes the runtime of a cache that fits into memory."""
        model, mesh = self.model, startup.mesh(self.options)
        layers = config.layers_of_spec(model.spec, cache, drops)
        startup.check_memory(
            layers.groups, layers.config, layers.recurrent, mesh=mesh, widened=model.widened_bytes
        )
        with startup.choosing(cache.attention, quiet=self.quiet):
            self.runtime = Runtime(
                model.shapes, cache, policy=drops, identity=model.identity, mesh=mesh
            )

    def compile(self, n_tokens: int) -> None:
        """Compiles what a prompt of n_tokens needs, and waits for the weights."""
        compile_programs(self.runtime, self.model, self.options, n_tokens, quiet=self.quiet)

    def generation(
        self, reading: Reading, drafter: Drafter | LayerSkip | None = None
    ) -> Generation:
        """What follows a prompt that was read, not begun yet."""
        assert not isinstance(self.options, PrefillOptions), "it writes nothing"
        if reading.whole:
            await_programs(self.runtime, quiet=self.quiet)
        note = self.weights.note(self.model)
        return Generation(self.options, self.model, self.runtime, reading, note, drafter)


class PromptRun(Conversation):
    """One prompt, with a session where one is named.

    Attributes:
      kept: the session, or None.
    """

    options: RunOptions | PrefillOptions

    def __init__(
        self,
        options: RunOptions | PrefillOptions,
        given: prompt.Prompt,
        kept: KeptSession | None,
    ):
        """Everything that can be refused without the weights is refused here."""
        self.kept = kept
        like = None if kept is None else kept.like(options.model)
        if kept is not None and kept.opened is not None:
            options = follow(options, kept.opened.manifest)
        elif like is not None:
            options = follow_types(options, like.manifest)
        super().__init__(options, like)
        tokenizer = self.model.tokenizer
        if kept is None:
            self._ids = prompt.prompt_ids(given, tokenizer, chat=given.chat)
        else:
            self._ids = kept.tokens(given, tokenizer)
            self.follow_policy(kept.policy_of(self._ids), self._ids, kept.path)
        self.open_runtime(self._ids, self._check)

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt, those that it follows included."""
        return len(self._ids)

    def _check(self, cache: CacheConfig, drops: AnyPolicy | None) -> None:
        if self.kept is not None:
            self.kept.check(self.model, cache, drops, self._ids)

    def prepare(self) -> None:
        """Compiles programs and waits for the weights."""
        self.compile(self.kept.n_to_do(self._ids) if self.kept else len(self._ids))

    def read(self, interrupt: Interrupt) -> Reading:
        """Restores what fits and evaluates the rest, saving it from time to time.

        Raises:
          SessionMismatch: the session is of another model or cache.
          BadSession: it is damaged.
        """
        kept, reading = self.kept, all_of(self._ids)
        if kept is not None:
            with output.waiting("reading the session", not self.quiet):
                reading = kept.begin(self.runtime, self._ids)

        def each() -> None:
            if kept:
                kept.during_prompt(self.runtime, reading)

        if isinstance(self.options, PlacementFlags) and self.options.blocks:
            self.runtime.to_blocks(0)
        if self._is_compressed(reading):
            self._read_compressed(reading, interrupt)
        else:
            reading.run(self.runtime, interrupt, each, quiet=self.quiet)
        if kept:
            kept.after_prompt(self.runtime, reading)
        return reading

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

    def _is_compressed(self, reading: Reading) -> bool:
        """Whether the prompt is read whole and compressed once: asked for, and nothing is there."""
        drops = self.runtime.stats().scored
        if drops is None or not isinstance(self.options, TextFlags):
            return False
        wanted = self.options.compress or drops.reads_whole
        if wanted and reading.n_restored:
            line = "tokens behind a session are read as they come, not compressed at their end"
            output.note(line)
        return wanted and not reading.n_restored

    def _read_compressed(self, reading: Reading, interrupt: Interrupt) -> None:
        """Reads the prompt and compresses it; says before what that takes, and after what it took.

        A signal ends it between two steps, and nothing of the prompt is read then.
        """
        interrupt.check()
        runtime, drops = self.runtime, self.runtime.stats().scored
        assert drops is not None, "asked before"
        name, n, ask = type(drops).__name__, len(reading.ids), list[int]()
        n_all = n
        if drops.reads_whole and n >= drops.budget + drops.interval:
            ask = self.model.tokenizer.encode(REPEAT, add_special=False)
            n_all = 2 * n + len(ask)
            if not self.quiet:
                output.note(
                    f"{name} has the prompt repeated: {n_all:,} tokens are evaluated for "
                    f"its {n:,}, each time beside all of them: several times a prefill"
                )
        compiled, start = runtime.stats().compile_s, time.perf_counter()
        try:
            with summary.prefill_bar(n_all, not self.quiet) as show:

                def step(done: int, total: int) -> None:
                    show(done)
                    interrupt.check()

                found = compress_prompt(runtime, reading.ids, ask=ask, progress=step)
                jax.block_until_ready(found.logits)
        except Interrupted:
            return
        finally:
            compiled = runtime.stats().compile_s - compiled
            reading.seconds = time.perf_counter() - start - compiled
        reading.n_done = reading.n_compressed = n
        reading.seconds -= found.compile_s
        if self.quiet:
            return
        kept = "all of it, for it fits the slots"
        if found.transient_bytes:
            kept = f"{drops.budget:,} tokens a kv head"
        output.note(
            f"{name} keeps {kept}; {found.n_evaluated:,} tokens were evaluated, "
            f"{found.transient_bytes / 1e6:.1f} MB taken and programs compiled in "
            f"{found.compile_s:.2f} s meanwhile"
        )
