"""`kvrt run`: loads a model, evaluates the prompt, streams what follows, and reports."""

import sys
import time

import jax

from kvrt.cli import output, prompt, report, startup
from kvrt.cli.interrupt import EXIT_CODE, Interrupt, Interrupted
from kvrt.cli.options import RunOptions
from kvrt.config import CacheConfig, SelfExtend, extent
from kvrt.engine import Runtime, Sampling, Token
from kvrt.errors import BadConfig, CacheFull, UsageError
from kvrt.policies import ContextShift
from models import load
from models.spec import DecoderSpec
from models.stream import TextStream

_DEFAULT_N_CTX = 4096


def execute(options: RunOptions, given: prompt.Prompt) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: what keeps the run from starting, or ended it; the text so far is written.
    """
    startup.check_device()
    startup.keep_programs()
    with startup.enough_memory():
        return _execute(options, given)


def _execute(options: RunOptions, given: prompt.Prompt) -> int:
    model = load.open_model(options.model, dtype=options.dtype, progress=not options.quiet)
    ids = prompt.encode(given, model.tokenizer, chat=options.chat)
    config = cache_config(options, model.spec.n_ctx_train)
    check_prompt(options, len(ids), model.spec, config)
    shift = None
    if not stays(model.spec, config):
        shift = context_shift(options, config.n_ctx, ids, model.tokenizer)
    n_vocab = model.spec.n_vocab
    if options.logprobs > n_vocab:
        raise UsageError(f"--logprobs {options.logprobs}: the vocabulary has {n_vocab} tokens")
    startup.check_memory(model.spec.groups, config, model.spec.recurrent)
    runtime = Runtime(model.shapes, config, policy=shift)
    job = Job(options, model, runtime, ids)
    with Interrupt() as interrupt:
        # Compiling and reading the weights take about as long, and neither waits for the other.
        runtime.prepare(len(ids))
        runtime.bind(model.wait().decoder)
        reason = job.run(interrupt)
    _report(options, job, reason)
    if options.cells:
        report.print_cells(runtime.cells, runtime.stats())
    if reason == "context_full" and options.n_predict != -2:
        raise CacheFull(
            f"the context is full: its {config.n_ctx} cells hold the {len(ids)} tokens of the "
            "prompt and what follows, and shifting is off; "
            f"{'raise -c' if config.self_extend else 'use --context_shift or raise -c'}"
        )
    return EXIT_CODE if reason == "interrupted" else 0


def cache_config(options: RunOptions, n_trained: int) -> CacheConfig:
    """Sizes and types of the cache; warns of a context above the trained length."""
    n_ctx = options.n_ctx or min(_DEFAULT_N_CTX, n_trained)
    extend = self_extend(options)
    reach = extend.reach(n_trained) if extend else n_trained
    if n_ctx > reach:
        further = f" (with SelfExtend {reach})" if extend else ""
        output.warn(
            f"-c {n_ctx} is above the {n_trained} tokens that the model was trained for{further}, "
            f"and text beyond them suffers; use -c {reach} "
            f"{'or a greater -gan' if extend else 'with --context_shift'}"
        )
    return CacheConfig(
        n_ctx=n_ctx,
        n_ubatch=options.n_ubatch,
        type_k=options.cache_type_k,
        type_v=options.cache_type_v,
        rope=options.rope,
        defrag_threshold=options.defrag_thold,
        self_extend=extend,
        swa_full=options.swa_full,
    )


def stays(spec: DecoderSpec, config: CacheConfig) -> bool:
    """Whether older text never has to go: no layer keeps all of it, or one cannot forget."""
    return spec.recurrent is not None or all(extent(g, config).rolls for g in spec.groups)


def check_prompt(
    options: RunOptions, n_prompt: int, spec: DecoderSpec, config: CacheConfig
) -> None:
    """Refuses a prompt that leaves no cell for what follows; tells when older text will go.

    Raises:
      UsageError: it does not fit, and nothing shifts.
    """
    n_least = n_prompt + (options.n_predict != 0)
    if all(extent(g, config).rolls for g in spec.groups):
        return
    if shifts(options) and spec.recurrent is not None:
        output.warn(
            "the state of recurrent layers cannot forget, so the context does not shift and the "
            f"text ends with its {config.n_ctx} cells; --nocontext_shift if that is wanted"
        )
    if n_least <= config.n_ctx:
        return
    if shifts(options) and spec.recurrent is None:
        if n_prompt > config.n_ctx:
            output.warn(
                f"the prompt has {n_prompt} tokens, the context {config.n_ctx} cells: older text "
                "is dropped while it is read; raise -c to keep it"
            )
        return
    raise UsageError(
        f"the prompt has {n_prompt} tokens, the context {config.n_ctx} cells, and {n_least} are "
        f"needed; raise -c to {n_least} or more (the model was trained for {spec.n_ctx_train}), "
        "use --context_shift or shorten the prompt"
    )


def self_extend(options: RunOptions) -> SelfExtend | None:
    """SelfExtend as the flags ask for it, or None.

    Raises:
      UsageError: the kind does not go with the key frame.
      BadConfig: the window is not a multiple of the group.
    """
    if options.grp_attn_n == 1:
        return None
    if options.self_extend == "paper" and options.rope != "read":
        raise UsageError("--self_extend paper turns each key in two ways; add --rope read")
    return SelfExtend(ga_n=options.grp_attn_n, ga_w=options.grp_attn_w, kind=options.self_extend)


def shifts(options: RunOptions) -> bool:
    """Whether the flags let older text go."""
    # Both would move positions; llama.cpp's tool leaves out the shift as well.
    extends = options.grp_attn_n > 1 and options.self_extend == "cache"
    return options.context_shift and options.n_predict != -2 and not extends


def context_shift(
    options: RunOptions, n_ctx: int, ids: list[int], tokenizer: load.tokenizer.Tokenizer
) -> ContextShift | None:
    """The policy that the flags ask for.

    Raises:
      BadConfig: --keep leaves nothing to drop.

    Source: llama.cpp `tools/completion`, n_keep.
    """
    if not shifts(options):
        return None
    begins = tokenizer.add_bos and ids[0] == tokenizer.bos_id
    n_keep = options.keep + begins if 0 <= options.keep <= len(ids) else len(ids)
    n_keep = min(n_keep, len(ids))
    if n_keep > n_ctx - 2:
        raise BadConfig(
            f"--keep {options.keep} keeps {n_keep} tokens, which leaves nothing to drop in "
            f"{n_ctx} cells; keep fewer, raise -c or use --nocontext_shift"
        )
    return ContextShift(n_keep=n_keep)


class Job:
    """One prompt and its continuation; counts what it does."""

    def __init__(
        self, options: RunOptions, model: load.Opened, runtime: Runtime, ids: list[int]
    ) -> None:
        """Nothing is evaluated yet."""
        self._options, self._model, self._runtime, self._ids = options, model, runtime, ids
        self._n_prefilled = self._n_generated = 0
        self._prefill_s = self._decode_s = 0.0
        self._tokens: list[Token] = []
        self._text: list[str] = []
        self.last = ""  # what was written last

    def run(self, interrupt: Interrupt) -> str:
        """Evaluates the prompt and writes what follows; returns why it ended."""
        try:
            interrupt.check()
            self._prefill(interrupt)
        except Interrupted:
            return "interrupted"
        stream = TextStream(self._model.tokenizer, self._options.stop)
        reason = self._decode(stream, interrupt)
        self._emit(stream.flush())
        return reason

    def outcome(self, reason: str) -> report.Outcome:
        """The run in numbers."""
        return report.Outcome(
            model=self._model.name,
            n_prompt=len(self._ids),
            n_prefilled=self._n_prefilled,
            n_generated=self._n_generated,
            finish_reason=reason,
            stats=self._runtime.stats(),
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            tokens=[t.id for t in self._tokens],
            text="".join(self._text),
            logprobs=[t.best for t in self._tokens] if self._options.logprobs else None,
        )

    def _prefill(self, interrupt: Interrupt) -> None:
        compiled, start = self._runtime.stats().compile_s, time.perf_counter()
        wanted = not self._options.quiet
        try:
            with report.prefill_bar(len(self._ids), wanted) as show:

                def step(done: int, total: int) -> None:
                    # Steps are queued ahead of the device: without the wait, progress is fiction.
                    jax.block_until_ready(self._runtime.cache.cells[0].pos)
                    self._n_prefilled = done
                    show(done)
                    interrupt.check()

                jax.block_until_ready(self._runtime.prefill(self._ids, progress=step))
        finally:
            compiled = self._runtime.stats().compile_s - compiled
            self._prefill_s = time.perf_counter() - start - compiled

    def _decode(self, stream: TextStream, interrupt: Interrupt) -> str:
        ends = () if self._options.ignore_eos else tuple(sorted(self._model.tokenizer.eos_ids))
        tokens = self._runtime.generate(
            self._options.n_predict if self._options.n_predict >= 0 else None,
            sampling=self._sampling(),
            stop_ids=ends,
            recent=self._ids,
            n_best=self._options.logprobs,
        )
        while not interrupt.asked:
            compiled, start = self._runtime.programs.compile_s, time.perf_counter()
            try:
                token = next(tokens, None)
            except CacheFull:
                return "context_full"
            if token is None:
                return "length"
            if self._n_generated:
                compiled = self._runtime.programs.compile_s - compiled
                self._decode_s += time.perf_counter() - start - compiled
            self._take(token, stream)
            if stream.stopped:
                return "stop_string"
            if token.id in ends:
                return "stop"
        return "interrupted"

    def _take(self, token: Token, stream: TextStream) -> None:
        self._n_generated += 1
        if self._options.json:
            self._tokens.append(token)
        self._emit(stream.push(token.id))

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._options.json:
            self._text.append(text)
        else:
            output.write_text(text)
            self.last = text

    def _sampling(self) -> Sampling:
        o = self._options
        return Sampling(
            temp=o.temp,
            top_k=o.top_k,
            top_p=o.top_p,
            min_p=o.min_p,
            repeat_penalty=o.repeat_penalty,
            repeat_last_n=o.repeat_last_n,
            seed=o.seed,
        )


def _report(options: RunOptions, job: Job, reason: str) -> None:
    outcome = job.outcome(reason)
    if options.json:
        output.write_text(report.to_json(outcome) + "\n")
    elif not options.quiet:
        # On a terminal the summary would go on in the text's last line.
        shared = sys.stdout.isatty() and sys.stderr.isatty()
        gap = "\n\n" if shared and not job.last.endswith("\n") else "\n"
        output.note(gap + "\n".join(report.summary(outcome)))
