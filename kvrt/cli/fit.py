"""`kvrt fit`: what a model and its cache take in memory, and the longest context that fits."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvrt import Runtime
from kvrt.cli.flags.serving import FitOptions
from kvrt.cli.process import output, startup
from kvrt.cli.report.phrases import counted
from kvrt.cli.report.tables import table
from kvrt.cli.setup.config import cache_config, layers_of_spec, policy_of_batch
from kvrt.cli.setup.model import compiling, with_window_sinks
from kvrt.config import MAX_POS, Indexed
from kvrt.errors import UsageError
from kvrt.options.cache import CacheConfig
from kvrt.options.engine import EngineConfig
from kvrt.options.serving import Rules
from kvrt.options.size import show_size
from kvrt.policies import by_position
from kvrt.program import estimate
from kvrt.program.estimate import Estimate, Part
from kvrt.runtime.generate import GenerationSpec
from kvrt.serving.sizing.pool_sizes import engine_plan
from kvrt_models import load
from kvrt_models.decoder import Decoder
from kvrt_models.spec import DecoderSpec

# Fields of an `Estimate` that the JSON has by their own names.
_BESIDE = ("null_bytes", "policy_bytes", "rounding_bytes", "tail_bytes", "index_bytes")
_BESIDE += ("label_bytes", "checkpoint_bytes", "n_padding")


class ProgramMemory(NamedTuple):
    """Programs that were compiled, and the temporary memory of the one that takes most."""

    n: int
    n_bytes: int


def execute(options: FitOptions) -> int:
    """Runs the command and returns its exit code: 1 where the cache would not fit."""
    startup.check_device()
    wanted = options.dtype or "auto"
    described = load.describe_model(options.model, dtype=wanted, progress=not options.json)
    spec = with_window_sinks(described.spec, options.window_sinks)
    described = dataclasses.replace(described, spec=spec)
    config = cache_config(options, spec.n_ctx_train)
    given = options.size("budget")
    budget = startup.available_bytes() if given is None else given
    fit = Fit(described, config, budget, functools.partial(_estimated, options, spec))
    if options.programs:
        if fit.left < 0:
            raise UsageError(
                f"--programs makes the cache, whose {show_size(fit.cache.n_bytes)} do not fit "
                "beside the weights; lower -c"
            )
        fit.programs = _compiled(options, described, config)
    pages = None
    if options.unified:
        how = functools.partial(estimate.of_pages, spec.groups, spec.recurrent)
        pages = Fit(described, config, budget, how)
    output.write_text(_json(fit, pages) if options.json else _text(fit, pages, given is None))
    return 0 if fit.left >= 0 else 1


def _compiled(options: FitOptions, model: load.Described, config: CacheConfig) -> ProgramMemory:
    """Compiles what `kvrt run` runs, without weights.

    Raises:
      BadConfig: the policy or the cache does not go with the model.
    """
    startup.keep_programs_or_warn()
    policy = policy_of_batch(options, model.spec)
    shapes = Decoder(model.spec, model.weights)
    n_prompt = config.n_ctx - 1
    with (
        startup.choosing(config.attention, quiet=options.json),
        output.waiting("compiling programs", not options.json) as say,
        startup.enough_memory(),
    ):
        runtime = Runtime(shapes, config, policy=policy)
        runtime.prepare(n_prompt, GenerationSpec(n_predict=2), progress=compiling(say))
        runtime.programs.wait()
    return ProgramMemory(runtime.programs.n_compiles, runtime.programs.temp_bytes())


def _estimated(options: FitOptions, spec: DecoderSpec, config: CacheConfig) -> Estimate:
    """What a cache takes with the policy of the flags; raises BadConfig."""
    policy = policy_of_batch(dataclasses.replace(options, n_ctx=config.n_ctx), spec)
    layers, drops = layers_of_spec(spec, config, policy), by_position(policy)
    kept = layers.groups, layers.recurrent, layers.config
    if options.mode == "paged":
        rules = Rules(n_batch=config.n_ubatch, n_ctx_seq=config.n_ctx // config.n_seq_max)
        engine = EngineConfig(mode="paged", rules=rules)
        found = estimate.of_blocks(*kept, plan=engine_plan(*kept, engine, drops))
    else:
        found = estimate.of_cells(*kept, n_pinned=drops.n_keep if drops else 0)
    if not layers.scored or spec.recurrent is not None:
        return found
    # What is kept by score is a state to the cache, and keys and values to a reader.
    slots = layers.scored[0].slots[0]
    said = {"kind": "by score", "types": f"{slots.type_k}/{slots.type_v}"}
    parts = (
        dataclasses.replace(part, **said) if part.kind == "recurrent" else part
        for part in found.parts
    )
    return dataclasses.replace(found, parts=tuple(parts))


class Fit:
    """A model with a cache in a budget.

    Attributes:
      programs: None unless they are counted.
      model: what its header says.
      config: of the cache.
      budget: bytes; infinite where nobody knows.
      how: from a config to its estimate.
      cache: the estimate of this one.
    """

    def __init__(
        self,
        model: load.Described,
        config: CacheConfig,
        budget: float,
        how: Callable[[CacheConfig], Estimate],
    ):
        """Estimates the cache."""
        self.model, self.config, self.budget, self.how = model, config, budget, how
        self.programs: ProgramMemory | None = None
        self.cache = how(config)

    @property
    def n_bytes(self) -> int:
        """Of weights and cache."""
        return self.beside + self.cache.n_bytes

    @property
    def beside(self) -> int:
        """Of weights and programs; without those, of the weight that a prompt's products widen."""
        beside = self.programs.n_bytes if self.programs else self.model.widened_bytes
        return self.model.n_bytes + beside

    @property
    def kv_of(self) -> list[tuple[int, int]]:
        """Layers that read the keys and values of others, and which."""
        return sorted(pair for group in self.model.spec.groups for pair in group.kv_of)

    @property
    def indexed(self) -> list[Indexed]:
        """What layers have that choose what they read by index keys."""
        return [group.indexed for group in self.model.spec.groups if group.indexed]

    @property
    def left(self) -> float:
        """What the budget has left; less than 0 where it does not suffice."""
        return self.budget - self.n_bytes

    @property
    def longest(self) -> int | None:
        """The greatest n_ctx that fits; None where nobody knows the budget."""
        if math.isinf(self.budget):
            return None
        return estimate.most_tokens(self.how, self.config, int(self.budget) - self.beside)


def _text(fit: Fit, pages: Fit | None, measured: bool) -> str:
    model, n_seq = fit.model, fit.config.n_seq_max
    together = f", {n_seq:,} sequences together" if n_seq > 1 else ""
    held = counted(model.n_params, "parameter")
    weights = [(f"weights {model.dtype}", f"{model.spec.n_layers}", held, model.n_bytes)]
    if fit.programs:
        held = f"{counted(fit.programs.n, 'program')}, the largest"
        weights.append(("programs", "", held, fit.programs.n_bytes))
    elif model.widened_bytes:
        weights.append(("a prompt's products", "", "1 matrix in f32", model.widened_bytes))
    lines = [
        f"{model.name}, trained for {model.spec.n_ctx_train:,} tokens; "
        f"{fit.config.n_ctx:,} tokens of context{together}",
        _table("", [*weights, *_rows(fit), ("total", "", "", fit.n_bytes)]),
        "",
        _readers(fit),
        _indexers(fit),
        _padding(fit),
        _budget(fit, measured),
        _longest(fit),
    ]
    if pages is not None:
        lines += ["", _table("one page size", _rows(pages)), "", _padding(pages), _longest(pages)]
    return "\n".join(line for line in lines if line is not None) + "\n"


def _table(head: str, rows: Iterable[tuple[str, str, str, int]]) -> str:
    shown = [(*row[:3], f"{row[3]:,}") for row in rows]
    return table((head, "layers", "holds", "bytes"), shown).rstrip("\n")


def _rows(fit: Fit) -> list[tuple[str, str, str, int]]:
    """Lines of the cache."""
    cache = fit.cache
    rows = [_row(part) for part in cache.parts]
    if cache.policy_bytes:
        rows.append(("windows of a policy", "", "more blocks", cache.policy_bytes))
    if cache.null_bytes:
        n = len(cache.plan.pools) if cache.plan else 0
        rows.append(("null blocks", "", counted(n, "block"), cache.null_bytes))
    if cache.rounding_bytes:
        rows.append(("rounded up", "", "empty blocks", cache.rounding_bytes))
    if fit.config.select and cache.label_bytes:
        rows.append((f"labels of {fit.config.select.name}", "", "", cache.label_bytes))
    if cache.tail_bytes:
        rows.append(("keys not yet quantized", "", "f16", cache.tail_bytes))
    if cache.checkpoint_bytes:
        n = f"{counted(fit.config.n_checkpoints, 'checkpoint')} a sequence"
        rows.append(("context checkpoints", "", n, cache.checkpoint_bytes))
    return [*rows, ("positions, owners", "", "", cache.index_bytes)]


def _row(part: Part) -> tuple[str, str, str, int]:
    size = f" {part.size:,}" if part.size else ""
    what = f"{'states' if part.kind == 'recurrent' else 'KV'} {part.types}"
    name = what if part.kind == "recurrent" else f"{what}, {part.kind}{size}"
    held = counted(part.n_held, part.unit.removesuffix("s"))
    if part.unit == "blocks":
        held += f" of {part.block_size:,}, {counted(part.n_groups, 'group')}"
    return name, f"{part.n_layers}", held, part.n_bytes


def _readers(fit: Fit) -> str | None:
    """The layers that keep nothing, by the one whose keys and values they read."""
    pairs = fit.kv_of
    if not pairs:
        return None
    by_layer: dict[int, list[int]] = {}
    for layer, read in pairs:
        by_layer.setdefault(read, []).append(layer)
    whose = "; ".join(
        f"{', '.join(map(str, layers))} of {read}" for read, layers in by_layer.items()
    )
    keep = "layer keeps" if len(pairs) == 1 else "layers keep"
    return f"shared      {len(pairs)} {keep} none and read the keys and values of others: {whose}"


def _indexers(fit: Fit) -> str | None:
    """How many of the layers above are index keys, and what they are for."""
    found = fit.indexed
    if not found:
        return None
    n_layers, n_cells = sum(len(x.keys_of) for x in found), max(x.n_cells for x in found)
    return (
        f"indexer     {counted(n_layers, 'layer')} of KV above are index keys, by which a token "
        f"chooses the {n_cells:,} that it reads"
    )


def _padding(fit: Fit) -> str | None:
    cache = fit.cache
    if not cache.empty_bytes:
        return None
    layers = f"{counted(cache.n_padding, 'layer')} that no group has, " if cache.n_padding else ""
    share = 100 * cache.empty_bytes / cache.cache_bytes
    return f"padding     {layers}{show_size(cache.empty_bytes)}, {share:.1f} % of the blocks"


def _budget(fit: Fit, measured: bool) -> str:
    if math.isinf(fit.budget):
        return "budget      unknown: this machine does not say what is free; give --budget SIZE"
    where = "free on this machine" if measured else "given"
    left = f"{show_size(fit.left)} are left" if fit.left >= 0 else f"{show_size(-fit.left)} too few"
    return f"budget      {show_size(fit.budget)} {where}, {left}"


def _longest(fit: Fit) -> str | None:
    n = fit.longest
    if n is None:
        return None
    if n == 0:
        return "longest     no token fits"
    if n == MAX_POS:
        return "longest     any length: what is kept does not grow with it"
    n_seq = fit.config.n_seq_max
    each = f", {n // n_seq:,} for each of {n_seq:,} sequences" if n_seq > 1 else ""
    return f"longest     {counted(n, 'token')} of context{each}"


def _json(fit: Fit, pages: Fit | None) -> str:
    model, config = fit.model, fit.config
    fields: dict[str, Any] = {
        "model": model.name,
        "n_ctx": config.n_ctx,
        "n_ctx_train": model.spec.n_ctx_train,
        "n_seq": config.n_seq_max,
        "n_params": model.n_params,
        "weights": model.dtype,
        "weights_bytes": model.n_bytes,
        "widened_bytes": model.widened_bytes,
        **({"programs": fit.programs._asdict()} if fit.programs else {}),
        **_fields(fit),
        **({"kv_of": fit.kv_of} if fit.kv_of else {}),
        **({"indexed": [dataclasses.asdict(x) for x in fit.indexed]} if fit.indexed else {}),
        "budget_bytes": None if math.isinf(fit.budget) else int(fit.budget),
        "fits": fit.left >= 0,
    }
    if pages is not None:
        fields["unified"] = _fields(pages)
    return json.dumps(fields) + "\n"


def _fields(fit: Fit) -> dict[str, Any]:
    """What differs between ways to place tokens; longest is null where the budget is unknown."""
    cache = fit.cache
    return {
        "parts": [dataclasses.asdict(part) for part in cache.parts],
        **{name: getattr(cache, name) for name in _BESIDE},
        "padding_bytes": cache.empty_bytes,
        "cache_bytes": cache.cache_bytes,
        "n_bytes": fit.n_bytes,
        "longest": fit.longest,
    }
