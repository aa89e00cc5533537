"""What a result of `kvrt batch` was computed with: digests that stand with it in its line."""

import functools
import json
from typing import Any, NamedTuple

import xxhash

from kvrt.cli.batch.request_line import Asked
from kvrt.cli.flags.serving import BatchOptions
from kvrt_models.file_digest import depends_on_n_ctx, model_digest

# Flags that decide what a request gets. How many are served at once, in blocks or in cells, on how
# many devices, with what tiers decides how fast it gets that.
_FLAGS = ("dtype", "cache_type_k", "cache_type_v", "hadamard", "rope", "attention")
# Flags that decide whether a request fits at all.
_LIMITS = ("n_ctx", "n_ctx_seq", "n_seq_max", "n_batch", "mode", "block_size", "swa_full")
_KEYS = ("prompt", "tokens", "n_predict", "n", "stop", "chat", "ignore_eos")
_N_HEX = 10


class Basis(NamedTuple):
    """Digests of what a result depends on.

    Attributes:
      model: the model's files.
      flags: those that decide results, but for what a line may say itself.
      request: the request with what flags add to it.
      line: what its line says, but for id and priority.
      limits: flags that decide whether a request fits; they matter to errors alone.
    """

    model: str
    flags: str
    request: str
    line: str
    limits: str

    def __str__(self) -> str:
        """As it stands in a result."""
        return ".".join(self)

    @classmethod
    def parse(cls, value: Any) -> "Basis | None":
        """The inverse of `str`; None of anything else."""
        parts = value.split(".") if isinstance(value, str) else []
        return cls(*parts) if len(parts) == len(cls._fields) else None


class Digests:
    """Of the requests of one command."""

    def __init__(self, options: BatchOptions):
        """The model is not read before it is needed."""
        self._options = options

    def of(self, asked: Asked) -> str:
        """The `Basis` of a request's results, as text.

        Raises:
          UsageError: there is no such model.
          BadModelFile: it cannot be read.
        """
        whole = {k: getattr(asked, k) for k in _KEYS} | dict(asked.sampling)
        said = {k: x for k, x in whole.items() if k in asked.given}
        model, flags, limits = self._common
        return str(Basis(model, flags, _digest(whole), _digest(said), limits))

    @functools.cached_property
    def _common(self) -> tuple[str, str, str]:
        options = self._options
        flags = {name: getattr(options, name) for name in _FLAGS}
        model = model_digest(options.model)
        if depends_on_n_ctx(options.model):
            flags["n_ctx"] = options.n_ctx
        limits = {name: getattr(options, name) for name in _LIMITS}
        return model[:_N_HEX], _digest(flags), _digest(limits)


def _digest(value: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())[:_N_HEX]
