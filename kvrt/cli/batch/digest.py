"""What a result of `kvrt batch` was computed with: digests that stand with it in its line."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import xxhash

from kvrt.cli.batch.requests import MAX_LINE_BYTES, Asked, Wrong
from kvrt.cli.flags.groups import BY_POSITION
from kvrt.cli.flags.serving import BatchOptions
from kvrt.errors import UsageError, reason
from kvrt.files import regular
from kvrt.kv_types import FLOAT_DTYPES, any_by_channel
from kvrt.options.option import deciding, flags_of
from kvrt.policies.scored.duo_attention import read_streaming
from kvrt.runtime.heavy_channels import read_channels
from kvrt_models.file_digest import depends_on_n_ctx, model_digest
from kvrt_models.weights.types import WeightType

_TYPES = ("dtype", "cache_type_k", "cache_type_v")
# What "auto" is on a device is not known before JAX is there; results have its name on a CPU.
_WRITTEN_AS = {"auto": "chunked"}
_N_HEX = 10
_PART = 1 << 20


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
        # A file is read once, though many lines may name it.
        self._file_digest = functools.lru_cache(maxsize=256)(_file_digest)

    def of(self, asked: Asked) -> str:
        """The `Basis` of a request's results, as text.

        Raises:
          Wrong: a file of a chunk cannot be read.
          UsageError: there is no such model.
          BadModelFile: it cannot be read.
        """
        options, by_score = asked.options, self._by_score
        keys = [x for x in flags_of(BatchOptions) if x.line is not False]
        whole = deciding(options, keys, ["policy"] if by_score else [])
        whole |= {"prompt": asked.prompt, "tokens": asked.tokens, "n": asked.n}
        if options.policy != "none" or by_score:
            whole |= {"n_window": options.window(options.n_ctx_request), **by_score}
            if by_score and options.policy != self._options.policy:
                whole["by_score"] = self._options.policy
            # A context decides what is dropped, and a step's tokens how a longer prompt is read.
            whole |= {"n_ctx": options.n_ctx_request, "n_batch": options.n_batch}
        if asked.beams.get("num_beams", 1) > 1:
            whole |= asked.beams
        # The context of its policy; what is reserved changes nothing that it says.
        whole |= {k: x for k, x in asked.room.items() if k == "quota"}
        if asked.chunks:
            whole |= {"chunks": self._chunks(asked)}
            whole |= {name: getattr(self._options, name) for name in ("ratio", "check_layer")}
        said = {k: x for k, x in whole.items() if k in asked.given}
        model, flags, limits = self._common
        return str(Basis(model, flags, _digest(whole), _digest(said), limits))

    def _chunks(self, asked: Asked) -> list[str]:
        """Of the files of a request's chunks; raises Wrong."""
        try:
            return [self._file_digest(name) for name in asked.chunks]
        except OSError as error:
            said = f"{error.filename}: {reason(error)}; give a text file, or a chunk"
            raise Wrong(f"chunks: {said}", asked.id) from error

    @functools.cached_property
    def _by_score(self) -> dict[str, Any]:
        """What a policy by score goes by, that of all requests; nothing where there is none."""
        options = self._options
        if options.policy in BY_POSITION:
            return {}
        flags = [x for x in flags_of(BatchOptions) if "by_score" in (x.decides or ())]
        found = deciding(options, flags, ["by_score"])
        if options.streaming_heads is not None:  # whatever the file is called
            found["streaming_heads"] = read_streaming(options.streaming_heads)
        if "n_sink" in options.given and options.n_sink == BatchOptions.n_sink:
            found["n_sink_given"] = True  # else it is the policy's own
        return found

    @functools.cached_property
    def _common(self) -> tuple[str, str, str]:
        options = self._options
        model = model_digest(options.model)
        limits = {x.name: getattr(options, x.name) for x in flags_of(BatchOptions) if x.limits}
        if options.budget is not None:  # results of 0.1 know nothing of it
            limits["n_ctx"] = options.budget
        return model[:_N_HEX], _digest(_flags(options)), _digest(limits)


def types_of_results(options: BatchOptions) -> BatchOptions | None:
    """The options with the types of weights and cache that the first result of a file names.

    None where there is no such file or result, or where another flag differs.
    """
    assert options.output is not None
    try:
        with regular.open_file(options.output) as file:
            record = json.loads(file.readline(4 * MAX_LINE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    basis = Basis.parse(record.get("digest")) if isinstance(record, dict) else None
    if basis is None:
        return None
    said = _flags(options)  # once, for it may read the model's header
    for found in _candidates(options):
        types = {name: getattr(found, name) for name in _TYPES}
        if _digest(said | types) == basis.flags:
            return found
    return None


def _candidates(options: BatchOptions) -> Iterator[BatchOptions]:
    """The options with each type that a flag leaves open and that may have been a default."""
    weights = [options.dtype] if options.dtype else get_args(WeightType)
    usual = FLOAT_DTYPES  # no quantized type was ever the cache's default
    keys = [options.cache_type_k] if options.cache_type_k else usual
    for dtype, type_k in itertools.product(weights, keys):
        for type_v in [options.cache_type_v] if options.cache_type_v else usual:
            yield dataclasses.replace(
                options, dtype=dtype, cache_type_k=type_k, cache_type_v=type_v
            )


def _flags(options: BatchOptions) -> dict[str, Any]:
    own = [x for x in flags_of(BatchOptions) if x.line is False]
    flags = deciding(options, own)
    flags["attention"] = _WRITTEN_AS.get(options.attention, options.attention)
    if options.select_channels is not None:  # whatever the file is called
        flags["select_channels"] = read_channels(options.select_channels)
    if any_by_channel(options.cache_type_k or ()):  # tokens whose keys wait for each other
        flags["run"] = options.hash_block_size or options.block
    if depends_on_n_ctx(options.model):
        if options.budget is not None:
            raise UsageError(
                f"{options.model} rotates keys by the length of the context, so that its results "
                "would depend on --budget; give -c N"
            )
        flags["n_ctx"] = options.n_ctx
    return flags


def _file_digest(name: str) -> str:
    """Of a file's bytes; of a session in a folder, of what names its checkpoint."""
    path, found = Path(name), xxhash.xxh3_64()
    with regular.open_file(path / "session.json" if path.is_dir() else path) as file:
        while part := file.read(_PART):
            found.update(part)
    return found.hexdigest()[:_N_HEX]


def _digest(value: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())[:_N_HEX]
