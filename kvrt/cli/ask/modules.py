"""Prompts that are built of modules: `kvrt prefill --schema` and `kvrt ask --schema`."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvrt import CacheConfig, PromptCache, Runtime, session
from kvrt.cli.ask.answers import write_answer
from kvrt.cli.flags.session_files import AskOptions, PrefillOptions
from kvrt.cli.process import output, startup
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.process.startup import ready
from kvrt.cli.report.summary import reused_part
from kvrt.cli.run import prompt
from kvrt.cli.run.conversation import Conversation
from kvrt.cli.run.generation import Reading
from kvrt.cli.session.open_session import check_fits, follow
from kvrt.cli.setup import config
from kvrt.errors import UsageError
from kvrt.reuse.schema import ModulePrompt, PlacedSchema, lay_out, read_request, read_schema
from kvrt.session.change import replace
from kvrt.session.io import open_existing
from kvrt_models.tokenizer.encode import Tokenizer
from kvrt_models.tokenizer.vocab import Kind

FIRST_SEQ = 1  # sequence 0 is the prompt's


class _Modules(Conversation):
    """The modules of a schema's file, and a runtime with room for them."""

    options: PrefillOptions | AskOptions

    def __init__(
        self, options: PrefillOptions | AskOptions, like: session.OpenedSession | None = None
    ):
        """Places the modules by the model's tokenizer, behind BOS where the model has one.

        See `placeholder` for what stands for arguments.

        Raises:
          UsageError: the file cannot be read, or is no schema.
        """
        super().__init__(options, like)
        path, tokenizer = options.schema or "", self.model.tokenizer
        text = prompt.read_text("--schema", path)
        try:
            unions, held_by = read_schema(text), placeholder(tokenizer)
            self.placed = lay_out(unions, self.encode, held_by, prompt.chunk_lead(tokenizer))
        except UsageError as error:
            raise UsageError(f"--schema {path}: {error}") from error
        # Cells of all modules, those of each union together.
        self.n_tokens = len(self.placed.lead) + sum(len(m.ids) for m in self.placed.modules)

    def encode(self, text: str) -> list[int]:
        """A text's tokens by themselves, without BOS."""
        return self.model.tokenizer.encode(text, add_special=False)

    def open_modules(self, n_more: int, check: Callable[[CacheConfig], Any]) -> None:
        """Makes a runtime with a sequence for the prompt and one for each choice of a union.

        Args:
          n_more: tokens of a prompt beside the modules.
          check: refuses a session that does not go with the cache.

        Raises:
          UsageError: a flag that modules do not go with; too few cells.
        """
        _check_flags(self.options)
        n, left, spec = self.n_tokens + n_more, startup.available_bytes(), self.model.spec
        options = config.sized(self.options, spec, n, left, quiet=True)
        cache = config.cache_config(options, spec.n_ctx_train)
        if n > cache.n_ctx:
            raise UsageError(
                f"the modules and the prompt have {n:,} tokens, the context {cache.n_ctx:,} cells; "
                f"raise -c to {n}"
            )
        check(cache)
        n_seq_max = self.placed.n_choices + FIRST_SEQ
        self.make_runtime(dataclasses.replace(cache, n_seq_max=n_seq_max))


def _check_flags(options: PrefillOptions | AskOptions) -> None:
    if options.mesh is not None:
        raise UsageError("--schema and --mesh do not go together yet; leave out --mesh")
    if "policy" in options.given and options.policy_name != "none":
        raise UsageError(
            f"--policy {options.policy_name} drops tokens, and those of modules are other prompts' "
            "as well; leave it out"
        )


def placeholder(tokenizer: Tokenizer) -> int:
    """The token that stands where an argument will be: the unknown one, else the end of text.

    Raises:
      UsageError: the vocabulary has neither.
    """
    kinds = list(tokenizer.vocab.kinds)
    if Kind.UNKNOWN in kinds:
        return kinds.index(Kind.UNKNOWN)
    if tokenizer.eos_id is None:
        raise UsageError("the vocabulary has no unknown token and no end of text to hold a place")
    return tokenizer.eos_id


def encode_modules(options: PrefillOptions, given: prompt.Prompt) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: it cannot start, or an error ended it.
    """
    assert options.output is not None
    if not given.is_none:
        raise UsageError("--schema has its text in it; leave out -p, -f and --tokens")
    path = Path(options.output)
    if not options.overwrite:
        replace.refuse_existing(path)
    with ready(options):
        _encode(_Modules(options), path, overwrite=options.overwrite)
    return 0


def _encode(made: _Modules, path: Path, *, overwrite: bool) -> None:
    # Beside the modules, room for what their loss is measured with.
    placed, quiet = made.placed, made.quiet
    made.open_modules(placed.end, lambda _: None)
    runtime = made.runtime
    made.compile(max(len(m.ids) for m in placed.modules))
    compiled, start = runtime.stats().compile_s, time.perf_counter()
    with output.waiting(f"computing {len(placed.modules)} modules", not quiet):
        PromptCache.encode(runtime, placed, FIRST_SEQ)
        jax.block_until_ready(runtime.cache.cells[0].pos)
    seconds = time.perf_counter() - start - (runtime.stats().compile_s - compiled)
    with output.waiting("saving", not quiet):
        _save(path, runtime, overwrite=overwrite)
    if quiet:
        return
    n, tokenizer = made.n_tokens, made.model.tokenizer
    output.note(f"{len(placed.modules)} modules of {n:,} tokens computed in {seconds:.2f} s")
    if any(m.reserved for m in placed.modules):
        token = placeholder(tokenizer)
        output.note(f"arguments were held a place by {tokenizer.piece(token)!r}")
    _say_loss(runtime, placed)


def _save(path: Path, runtime: Runtime, *, overwrite: bool) -> None:
    def keep(there: Path) -> None:
        if there.exists():
            output.note(f"{there}: the former session is kept as {replace.keep_former(there)}")

    session.save(path, runtime.snapshot(), before=keep if overwrite else replace.refuse_existing)


def _say_loss(runtime: Runtime, placed: PlacedSchema) -> None:
    """What modules lose that have not seen each other: over the last one, behind all before it."""
    *others, last = (m for m in placed.modules if m.choice == 0)
    if not others:
        output.note("one module alone is as exact as a cached prefix")
        return
    before = tuple(m for m in placed.modules if m.start < last.start)
    modules = PromptCache(
        runtime, dataclasses.replace(placed, modules=before, end=last.start), FIRST_SEQ
    )
    ids = last.ids.tolist()
    held = {
        (m.name, name): m.ids[at - m.start : at - m.start + n].tolist()
        for m in others
        for name, (at, n) in m.reserved.items()
    }
    modules.serve(0, [m.name for m in others if m.name], ids[:1], held)
    served = _following(runtime, ids)
    runtime.append([*placed.lead, *(t for m in others for t in m.ids.tolist()), ids[0]], 0)
    exact = _following(runtime, ids)
    kl = float((np.exp(exact) * (exact - served)).sum(axis=1).mean())
    output.note(
        f"modules do not see each other: over {last.name or 'the last text'!r}, behind the others, "
        f"KL {kl:.3f} from a prefill of the whole text"
    )


def _following(runtime: Runtime, ids: list[int]) -> np.ndarray:
    """Log-probabilities after each of some tokens, the first of which ends the sequence.

    The sequence is empty after it.
    """
    found = [runtime.last_logits(0)]
    if ids[1:]:
        found.append(runtime.append(ids[1:], 0, out_ids=range(len(ids) - 1)))
    runtime.seq_rm(0)
    return np.concatenate([np.asarray(jax.nn.log_softmax(x), np.float64) for x in found])


def ask_modules(options: AskOptions) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: it cannot start, or an error ended it; text written so far stays.
    """
    assert options.session is not None
    if options.question is None or options.seq is not None:
        raise UsageError("--schema takes one prompt, as QUESTION; leave out -F and --seq")
    wanted = read_request(options.question)
    held = open_existing(Path(options.session))
    with ready(options):
        return _Prompt(follow(options, held.manifest), held, wanted).run()


class _Prompt(_Modules):
    """A prompt of modules, and what follows it."""

    options: AskOptions

    def __init__(self, options: AskOptions, held: session.OpenedSession, wanted: ModulePrompt):
        """Everything that can be refused without the weights is refused here."""
        super().__init__(options, held)
        self._held, self._wanted = held, wanted
        self._arguments = {key: self.encode(text) for key, text in wanted.arguments.items()}
        self._suffix = self.encode(f"\n\n{wanted.text}") if wanted.text else []
        self._n_new = len(self._suffix) + sum(map(len, self._arguments.values()))
        self.open_modules(self._n_new + 1, functools.partial(check_fits, held, self.model))

    def run(self) -> int:
        """Serves the prompt and writes what follows; returns the exit code."""
        held, runtime = self._held, self.runtime
        self.compile(max(self._n_new, 1))
        with output.waiting("reading the session", not self.quiet), held.naming():
            runtime.restore(session.read(held))
            modules = PromptCache(runtime, self.placed, FIRST_SEQ)
        start = time.perf_counter()
        served = modules.serve(0, self._wanted.modules, self._suffix, self._arguments)
        jax.block_until_ready(served.logits)
        seconds = time.perf_counter() - start
        if not self.quiet:
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
        with Interrupt() as interrupt:
            reason = write_answer(self, reading, interrupt, self.options.question or "")
            return interrupt.exit_code if reason == "interrupted" else 0
