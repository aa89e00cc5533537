"""Questions after chunks that were computed alone, blended into one text; their files stay."""

import dataclasses
import time
from typing import Any

import jax

from kvrt import Blended, BlendSpec, CachedChunk
from kvrt.cli.ask.answers import Asking
from kvrt.cli.ask.chunks import ChunkFile, ChunkReader, blended_part, joined, open_chunk
from kvrt.cli.flags.session_files import AskOptions
from kvrt.cli.process import output
from kvrt.cli.process.interrupt import Interrupt
from kvrt.cli.process.startup import ready
from kvrt.cli.run.generation import Reading
from kvrt.cli.run.prompt import chunk_lead
from kvrt.cli.session.open_session import check_fits, follow
from kvrt.cli.setup.model import choose_weights
from kvrt.errors import BadSession, CacheFull, UsageError
from kvrt.options.cache import CacheConfig
from kvrt.policies import AnyPolicy, ScoredPolicy
from kvrt.reuse.blend import hidden_ratio
from kvrt.runtime.blend import check_spec
from kvrt.runtime.chunks.chunk import StoredChunk, tokens_of


def ask_chunks(options: AskOptions, questions: list[str]) -> int:
    """Answers questions after chunks; returns the exit code.

    Raises:
      KvrtError: it cannot start, or an error ended it; answers so far are written.
    """
    files = [open_chunk(x) for x in options.chunk]
    with ready(options):
        return ChunkAsker(_followed(options, files), files, questions).run()


class ChunkAsker(Asking):
    """Chunks, and questions that each stand behind all of them."""

    def __init__(self, options: AskOptions, files: list[ChunkFile], questions: list[str]):
        """Everything that can be refused without the weights is refused here."""
        opened = [x.opened for x in files if x.opened is not None]
        super().__init__(options, questions, opened[0] if opened else None)
        for x in opened[1:]:
            choose_weights(self.weights.dtype, x)
        self._files = files
        self._spec = BlendSpec(
            ratio=options.ratio, check_layer=options.check_layer, auto_ratio=options.auto_ratio
        )
        self._lead = chunk_lead(self.model.tokenizer)
        tokens = [x.tokens(self._lead, self.model.tokenizer).tolist() for x in files]
        self._named = list(zip(files, tokens, strict=True))
        self._chunks = list[CachedChunk | StoredChunk]()
        self._held = joined(tokens, len(self._lead))
        if options.n_ctx:
            self._check_room(options.n_ctx)
        n_prompt = len(self._held) + self._longest
        self.open_runtime(self._held + self._ids[0], self._check, n_prompt)
        check_spec(len(files), self.model.spec.n_layers, self._spec)
        self._reader = ChunkReader(self.runtime, options, self._lead)

    def _open(self) -> None:
        with output.waiting("reading chunks", not self.quiet):
            self._chunks = [self._reader.open(*x) for x in self._named]

    def _read(self, i: int, interrupt: Interrupt) -> tuple[Reading, dict[str, Any]]:
        runtime, ids = self.runtime, self._held + self._ids[i]
        runtime.clear()
        before, start = runtime.stats(), time.perf_counter()
        blended = self._blended(self._ids[i])
        jax.block_until_ready(blended.logits)
        compiled = runtime.stats().compile_s - before.compile_s
        kept = blended.n_reused - len(blended.computed)
        reading = Reading(
            ids=ids,
            n_restored=kept,
            spans=[(kept, len(ids))],
            n_done=len(ids) - kept,
            seconds=time.perf_counter() - start - compiled,
            reused=blended_part([ids for _, ids in self._named], blended.ratio),
            since=before,
        )
        if not self.quiet and not i:
            output.note(self._said(blended))
        return reading, self._fields(blended)

    def _blended(self, ids: list[int]) -> Blended:
        """The chunks and a question; damaged chunks are mended first, or refused."""
        try:
            found = self.runtime.blend(self._chunks, ids, self._spec)
        except BadSession:
            both = zip(self._chunks, self._named, strict=True)
            self._chunks = [
                self._reader.read(*named) if isinstance(x, StoredChunk) else x for x, named in both
            ]
            found = self.runtime.blend(self._chunks, ids, self._spec)
        # All questions get the ratio of the first: later ones find the chunks in memory.
        self._spec = dataclasses.replace(self._spec, ratio=found.ratio, auto_ratio=False)
        return found

    def _check(self, config: CacheConfig, policy: AnyPolicy | None) -> None:
        if isinstance(policy, ScoredPolicy):
            raise UsageError(
                "a --policy by score keeps some tokens of a chunk in each head, and a chunk is "
                "blended whole; use none, or one by position"
            )
        for x in (file.opened for file in self._files if file.opened is not None):
            check_fits(x, self.model, config)
            tokens_of(x, self._lead)
        self._check_room(config.n_ctx)

    def _check_room(self, n_ctx: int) -> None:
        n = len(self._held) + self._longest
        if n > n_ctx:
            raise CacheFull(
                f"chunks and question have {n:,} tokens, the context {n_ctx:,} cells, and "
                "tokens of chunks are not dropped; raise -c, or give fewer chunks"
            )

    def _said(self, blended: Blended) -> str:
        """One line on what was reused."""
        n, m = blended.n_reused, len(blended.computed)
        return (
            f"chunks     {len(self._files):,} of {n:,} tokens in all: {n - m:,} reused, {m:,} "
            f"recomputed behind layer {self._spec.check_layer} (ratio {blended.ratio:.2g})"
            f"{self._timed(blended)}{self._kept()}"
        )

    def _timed(self, blended: Blended) -> str:
        """Why the ratio is what it is, with --auto_ratio."""
        if blended.prefill_s is None:
            return ""
        hidden = hidden_ratio(blended.load_s, blended.prefill_s)
        least = self.options.ratio
        taken = (
            "was taken" if hidden >= least else f"is less than --ratio {least:g}, which was taken"
        )
        return (
            f"\n           loading took {blended.load_s:.3f} s, computing all would take "
            f"{blended.prefill_s:.3f} s: {hidden:.2g} {taken}"
        )

    def _kept(self) -> str:
        """What was computed first, and where it is now."""
        found = self._reader
        if not found.n_computed:
            return ""
        where = "--chunk_dir DIR would keep texts"
        if found.store is not None:
            where = f"{found.n_kept} now kept in {found.store.folder}"
        return f"\n           {found.n_computed} of them computed alone first; {where}"

    def _fields(self, blended: Blended) -> dict[str, Any]:
        """For --json; what --auto_ratio measured is of the first question."""
        fields = {
            "n_chunks": len(self._files),
            "n_chunks_computed": self._reader.n_computed,
            "n_reused": blended.n_reused - len(blended.computed),
            "ratio": blended.ratio,
            "check_layer": self._spec.check_layer,
        }
        if blended.prefill_s is not None:
            fields |= {"load_s": blended.load_s, "prefill_s": blended.prefill_s}
        return fields


def _followed(options: AskOptions, files: list[ChunkFile]) -> AskOptions:
    """The options with what a chunk says of keys and values; its length says nothing of others."""
    opened = next((x.opened for x in files if x.opened is not None), None)
    if opened is None:
        return options
    return dataclasses.replace(follow(options, opened.manifest), n_ctx=options.n_ctx)
