"""Questions after chunks that were computed alone, blended into one text; their files stay."""

import dataclasses
import time
from pathlib import Path

import jax

from kvrt import Blended, BlendSpec, CachedChunk
from kvrt.cli.ask.answers import Answers, question_ids
from kvrt.cli.flags.session_files import AskOptions
from kvrt.cli.process import output, status
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.run.generation import Reading
from kvrt.cli.run.prompt import chunk_lead
from kvrt.cli.session.open_session import check_fits, follow, open_existing
from kvrt.cli.setup.model import compile_programs, open_with_status
from kvrt.cli.setup.open_runtime import open_runtime, ready
from kvrt.cli.setup.weights import choose_weights
from kvrt.config import CacheConfig
from kvrt.errors import BadSession, CacheFull
from kvrt.runtime.blend import check_spec
from kvrt.runtime.chunk import tokens_of
from kvrt.session import OpenedSession


def ask_chunks(options: AskOptions, questions: list[str]) -> int:
    """Answers questions after chunks; returns the exit code.

    Raises:
      KvrtError: what keeps it from starting, or ended it; answers so far are written.
    """
    opened = [open_existing(Path(x)) for x in options.chunk]
    with ready(options):
        asker = ChunkAsker(_followed(options, opened[0]), opened, questions)
        with Interrupt() as interrupt:
            return asker.run(interrupt)


class ChunkAsker:
    """Chunks, and questions that each stand behind all of them."""

    def __init__(self, options: AskOptions, opened: list[OpenedSession], questions: list[str]):
        """Everything that can be refused without the weights is refused here."""
        self._options, self._opened = options, opened
        self._spec = BlendSpec(ratio=options.ratio, check_layer=options.check_layer)
        weights = choose_weights(options.dtype, opened[0])
        for x in opened[1:]:
            choose_weights(weights.dtype, x)
        self._model = open_with_status(
            options.model,
            dtype=weights.dtype,
            on_host=options.mesh is not None,
            quiet=options.quiet,
            window_sinks=options.window_sinks,
        )
        self._lead = chunk_lead(self._model.tokenizer)
        held = [x.held[1][len(self._lead) if i else 0 :].tolist() for i, x in enumerate(opened)]
        self._held = [token for chunk in held for token in chunk]
        self._ids = question_ids(questions, self._model.tokenizer)
        self._longest = max(map(len, self._ids))
        self._runtime = open_runtime(
            options,
            self._model,
            self._held + self._ids[0],
            self._check,
            n_prompt=len(self._held) + self._longest,
            quiet=options.quiet,
        )
        check_spec(len(opened), self._model.spec.n_layers, self._spec)
        self._answers = Answers(options, self._model, weights, questions)

    def run(self, interrupt: Interrupt) -> int:
        """Answers all questions in their order; returns the exit code."""
        runtime, quiet = self._runtime, self._options.quiet
        compile_programs(runtime, self._model, self._options, self._longest, quiet=quiet)
        with status.waiting("reading chunks", not quiet):
            chunks = [self._chunk(x) for x in self._opened]
        for i, ids in enumerate(self._ids):
            runtime.clear()
            compiled, start = runtime.stats().compile_s, time.perf_counter()
            blended = runtime.blend(chunks, ids, self._spec)
            jax.block_until_ready(blended.logits)
            compiled = runtime.stats().compile_s - compiled
            kept = blended.n_reused - len(blended.computed)
            reading = Reading(
                ids=self._held + ids,
                n_restored=kept,
                spans=[(kept, len(self._held) + len(ids))],
                n_done=len(self._held) + len(ids) - kept,
                seconds=time.perf_counter() - start - compiled,
            )
            if not quiet and not i:
                output.note(self._said(blended))
            code = self._answers.write(i, runtime, reading, interrupt, self._fields(blended))
            if code:
                return code
        return 0

    def _check(self, config: CacheConfig) -> None:
        for x in self._opened:
            check_fits(x, self._model, config)
            tokens_of(x, self._lead)
        n = len(self._held) + self._longest
        if n > config.n_ctx:
            raise CacheFull(
                f"chunks and question have {n:,} tokens, the context {config.n_ctx:,} cells, and "
                "tokens of chunks are not dropped; raise -c, or give fewer chunks"
            )

    def _chunk(self, opened: OpenedSession) -> CachedChunk:
        """A chunk from its file, or computed again where keys and values in it are damaged."""
        try:
            return CachedChunk.load(opened, self._lead)
        except BadSession as error:
            if self._options.strict:
                raise
            output.warn(f"{error}; the chunk is computed again from its tokens, the file stays")
            tokens = tokens_of(opened, self._lead)[len(self._lead) :]
            return self._runtime.chunk(tokens.tolist(), self._lead)

    def _said(self, blended: Blended) -> str:
        """One line on what was reused."""
        n, m = blended.n_reused, len(blended.computed)
        return (
            f"chunks     {len(self._opened)} of {n:,} tokens in all: {n - m:,} reused, {m:,} "
            f"recomputed behind layer {self._spec.check_layer} (ratio {self._spec.ratio:g}); the "
            "answer is approximate"
        )

    def _fields(self, blended: Blended) -> dict[str, object]:
        return {
            "n_chunks": len(self._opened),
            "n_reused": blended.n_reused - len(blended.computed),
            "ratio": self._spec.ratio,
            "check_layer": self._spec.check_layer,
            "approximate": True,
        }


def _followed(options: AskOptions, first: OpenedSession) -> AskOptions:
    """The options with what a chunk says of keys and values; its length says nothing of others."""
    followed = follow(options, first.manifest)
    return dataclasses.replace(followed, n_ctx=options.n_ctx)
