"""Chunks that lines of `kvrt batch` name, blended in a runtime beside the engine."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from kvrt import BlendSpec, CacheConfig, PrivatePrefix, Runtime
from kvrt.cli.ask.chunks import ChunkFile, ChunkReader, blended_part, joined, open_chunk
from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.process import startup
from kvrt.cli.report.summary import Approximation
from kvrt.cli.run.prompt import chunk_lead
from kvrt.cli.session.open_session import check_fits
from kvrt.errors import CacheFull
from kvrt.program.programs import Programs
from kvrt.runtime.blend import check_spec
from kvrt.runtime.chunks.chunk import tokens_of
from kvrt.session.snapshot import Snapshot
from kvrt_models.load import Opened

# Chunks that stay in memory: those of a few lines, which often name the same ones.
_N_HELD = 32
_CELLS = 256  # a multiple of which the runtime has


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """How a request with chunks begins.

    Attributes:
      prefix: the tokens of its chunks, and what blends them.
      fields: what its results say of that; how many tokens were reused, once it was blended.
      reused: what of the chunks is approximate; None if nothing.
    """

    prefix: PrivatePrefix
    fields: dict[str, Any]
    reused: Approximation | None


class RequestChunks:
    """The chunks of all requests of a batch."""

    def __init__(self, options: BatchOptions, model: Opened, config: CacheConfig):
        """A runtime without weights; `config` is the engine's.

        Raises:
          KvrtError: chunks cannot be blended with these flags, or memory is lacking.
        """
        self._model, self._lead = model, chunk_lead(model.tokenizer)
        self._spec = BlendSpec(ratio=options.ratio, check_layer=options.check_layer)
        check_spec(1, model.spec.n_layers, self._spec)
        # A token that is thrown away follows the chunks, and a chunk has a lead of its own.
        self._n_most = options.n_ctx_request
        n = self._n_most + 1 + len(self._lead)
        self._config = dataclasses.replace(
            config,
            n_ctx=-(-n // _CELLS) * _CELLS,
            n_seq_max=2,
            block_size=_CELLS,
            n_checkpoints=0,
        )
        spec, mesh = model.spec, startup.mesh(options)
        startup.check_memory(
            spec.groups, self._config, spec.recurrent, mesh=mesh, widened=model.widened_bytes
        )
        self._runtime = Runtime(model.shapes, self._config, identity=model.identity, mesh=mesh)
        self._reader = ChunkReader(self._runtime, options, self._lead)
        self._open = functools.lru_cache(maxsize=_N_HELD)(open_chunk)
        self._held = functools.lru_cache(maxsize=_N_HELD)(self._reader.read)
        self._n = {"requests": 0, "reused": 0, "recomputed": 0}

    @property
    def programs(self) -> Programs:
        """Of the runtime, which has no weights before they are bound."""
        return self._runtime.programs

    def begin(self, names: Sequence[str]) -> Begun:
        """How a request begins whose line names these files.

        Raises:
          UsageError: there is no such file, or it is no chunk.
          BadSession: it is damaged.
          CacheFull, SessionMismatch: it does not fit the model or the context.
        """
        files = [self._open(name) for name in names]
        for x in (file.opened for file in files if file.opened is not None):
            check_fits(x, self._model, self._config)
            tokens_of(x, self._lead)
        tokens = [tuple(x.tokens(self._lead, self._model.tokenizer).tolist()) for x in files]
        held = tuple(joined(tokens, len(self._lead)))
        if len(held) >= self._n_most:
            raise CacheFull(
                f"its chunks have {len(held):,} tokens, more than a request may have; raise -c "
                "(and --n_ctx_seq), or give fewer"
            )
        fields: dict[str, Any] = {
            "n_chunks": len(files),
            "ratio": self._spec.ratio,
            "check_layer": self._spec.check_layer,
        }
        named = tuple(zip(files, tokens, strict=True))
        read = functools.partial(self._blended, named, fields)
        prefix, reused = (
            PrivatePrefix(tokens=held, read=read),
            blended_part(tokens, self._spec.ratio),
        )
        return Begun(prefix=prefix, fields=fields, reused=reused)

    def said(self) -> list[str]:
        """The line of the summary, where there was a request with chunks."""
        if not self._n["requests"]:
            return []
        found = self._reader
        kept = "" if found.store is None else f", {found.n_kept} now kept in {found.store.folder}"
        return [
            f"chunks     {self._n['requests']:,} requests began with blended chunks: "
            f"{self._n['reused']:,} tokens reused, {self._n['recomputed']:,} recomputed behind "
            f"layer {self._spec.check_layer}",
            f"           chunks computed alone first: {found.n_computed}{kept}",
        ]

    def _blended(
        self, named: Sequence[tuple[ChunkFile, tuple[int, ...]]], fields: dict[str, Any]
    ) -> Snapshot:
        """A session of the chunks, blended."""
        chunks = [self._held(*x) for x in named]
        self._runtime.clear()
        # Its keys and values are thrown away; a blend wants a token behind the chunks.
        blended = self._runtime.blend(chunks, self._lead or [0], self._spec)
        n = len(blended.computed)
        fields["n_reused"] = blended.n_reused - n
        self._n["requests"] += 1
        self._n["reused"] += blended.n_reused - n
        self._n["recomputed"] += n
        return self._runtime.snapshot()
