"""A decode step whole, by layer, and as a `lax.scan` over its layers, in interleaved runs.

    python -m scripts.bench.layers.programs --shape smollm2-135m --attention chunked
    python -m scripts.bench.layers.programs --shape llama-3.1-8b --dtype bf16 --type_k bf16 \
        --type_v bf16 --attention pallas_gpu --context 4096

Random weights. Each side says the seconds that its first step takes to trace, lower and compile,
bytes of temporaries, and milliseconds a step:

    whole     one program, in which a run of layers is traced once for its kind
    plain     one program, traced layer by layer, as a model's that does not tell its layers apart
    by_layer  one program for runs of a kind; its figure is the first step
    scan      a loop over layers of one kind, whose weights and caches lie in one array each
    stacked   the same, with weights that are stacked in the program; it is compiled only

A process keeps what it tuned for a GPU, so that the first side alone says what compiling takes
there. --only_compile times no step.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax import lax

from kvrt.options.cache import CacheConfig
from kvrt.program import step
from kvrt.program.batch import Batch
from kvrt.program.device import Device, whole_step
from kvrt.program.layers.by_layer import (
    Arrays,
    Fixed,
    Stream,
    TracedLayers,
    call_traced,
    embed_step,
    finish_step,
    layers,
)
from kvrt.program.layers.runs import layers_part
from kvrt.program.programs import ModelKind, TracedParams
from kvrt.program.step import Cache
from kvrt.store.kv import KVStore
from kvrt_models.decoder import Decoder
from scripts._lib import cases, commands, grid, measure, rounds, shapes
from scripts._lib.cases import Case

SIDES = ("whole", "plain", "by_layer", "scan", "stacked")
_SIDES = flags.DEFINE_list("sides", list(SIDES), f"In this order: {', '.join(SIDES)}.")
_ONLY_COMPILE = flags.DEFINE_bool("only_compile", False, "Compiles, and times no step.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case(Case):
    """A case, and how its step is dispatched."""

    programs: str = "whole"

    @property
    def config(self) -> CacheConfig:
        """That of `Case`, with the way that is named."""
        programs: Any = self.programs
        return dataclasses.replace(super().config, programs=programs)


def main() -> None:
    grid.check(_SIDES, SIDES)
    for case in (case for of in grid.cases() for case in of):
        decoder = shapes.random_decoder(case.spec, case.dtype)
        figures, steps = {}, {}
        for side in _SIDES.value:
            figures[side], once = _side(side, case, decoder)
            if once and not _ONLY_COMPILE.value:
                steps[side] = rounds.timed(once)
        times = rounds.interleaved(steps, grid.n_runs()) if steps else rounds.Times()
        for side, found in figures.items():
            step_ms = {"step_ms": times.ms(side)} if side in times else {}
            measure.emit("programs", side=side, **grid.named(case), **found, **step_ms)


def _side(
    side: str, case: Case, decoder: Decoder
) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """What one side took to compile, and its step."""
    way = "by_layer" if side == "by_layer" else "whole"
    named = {x.name: getattr(case, x.name) for x in dataclasses.fields(Case)}
    wanted = _Case(**named, programs=way)
    device = Device(decoder, wanted.config, wanted.layout)
    device.cache = Cache(stores=(), cells=())  # its memory first
    device.cache = cases.cache(wanted)
    batch = cases.batch(wanted)
    if side == "by_layer":
        return _by_layer(device, batch)
    kind, params = device.programs.kind, device.programs.params
    if side in ("whole", "plain"):
        run = functools.partial(whole_step if side == "whole" else plain_step, kind)
        args = params, device.cache, batch
    else:
        rest, each = TracedParams(kind, params).rest, _by_kind(kind, params)
        stacked = each if side == "stacked" else _stacked(each)
        stores = _stacked([_of_layer(kind, device.cache, i) for i in range(len(each))])
        device.cache = dataclasses.replace(device.cache, stores=())
        run = functools.partial(scan_step, kind)
        args = (rest, stacked), (stores, device.cache.cells), batch
    compiled, figures = _compiled(run, args)
    held = args[1]
    device.cache = Cache(stores=(), cells=())

    def once() -> Any:
        nonlocal held
        logits, held = compiled(args[0], held, batch)
        return logits, held

    return figures, None if side == "stacked" else once


def plain_step(
    kind: ModelKind, params: tuple, cache: Cache, batch: Batch
) -> tuple[jax.Array, Cache]:
    """A step that knows nothing of kinds."""
    return step.forward(kind.model(params), cache, batch, kind.spec)


def _by_layer(device: Device, batch: Batch) -> tuple[dict[str, Any], Callable[[], Any]]:
    start = time.perf_counter()
    jax.block_until_ready(device.forward(batch))
    figures = {"first_step_s": round(time.perf_counter() - start, 2)}
    names = {key.name for key in device.programs.compiled()}
    temp_bytes = max(map(device.programs.temp_bytes, names))
    figures |= {"n_programs": device.programs.n_compiles, "temp_bytes": temp_bytes}
    return figures, lambda: (device.forward(batch), device.cache)


def _compiled(run: Callable, args: tuple) -> tuple[jax.stages.Compiled, dict[str, Any]]:
    """A program that donates its second argument, and the seconds of each phase."""
    times = [time.perf_counter()]
    traced = jax.jit(run, donate_argnums=1).trace(*args)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    phases = ("trace_s", "lower_s", "compile_s")
    figures = {x: round(b - a, 2) for x, a, b in zip(phases, times, times[1:], strict=False)}
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA tells memory of programs that it compiled"
    return compiled, figures | {"temp_bytes": memory.temp_size_in_bytes}


def _by_kind(kind: ModelKind, params: tuple) -> list[tuple]:
    """Parameters of each layer, which have to be of one kind."""
    of_layers = kind.layers
    if of_layers is None or len(set(of_layers.kinds)) != 1 or len(kind.spec.layout.groups) != 1:
        raise app.UsageError("a scan wants layers of one kind; take other --sides, or llama shapes")
    traced = TracedParams(kind, params)
    return [traced.params_of(i, i + 1) for i in range(len(of_layers.kinds))]


@functools.partial(jax.jit)
def _stacked(trees: list) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _of_layer(kind: ModelKind, cache: Cache, layer: int) -> Any:
    part = layers_part(kind.spec.layout, layer, layer + 1)
    return Arrays(cache, call_traced).of(part, ())[0].stores


def scan_step(
    kind: ModelKind, params: tuple[tuple, Any], held: tuple[Any, tuple], batch: Batch
) -> tuple[jax.Array, tuple[Any, tuple]]:
    """A step as a loop over layers of one kind.

    Args:
      kind: of the model and the cache.
      params: parameters of no layer; those of layers, stacked, or a list of each layer's.
      held: stores of layers, stacked; and cells. Donated by jitted callers.
      batch: the step's tokens.
    """
    (rest, of_layers), (stores, cells) = params, held
    if isinstance(of_layers, list):
        of_layers = jax.tree.map(lambda *x: jnp.stack(x), *of_layers)
    how = TracedLayers(0, 1, is_narrow=False)
    x, cells, batch = embed_step(kind, cells, rest, batch)

    def body(carry: tuple, given: tuple) -> tuple[tuple, None]:
        (x, stores), (i, of_layer) = carry, given
        mine = jax.tree.map(lambda of: lax.dynamic_index_in_dim(of, i, keepdims=False), stores)
        fixed = Fixed(params=of_layer, lent=(KVStore(k=(), v=()),), labels=(), cells=cells)
        cache, entering = Cache(stores=mine, cells=()), Stream(x=x, own={}, late={})
        stream, cache = layers(kind, how, cache, fixed, batch, entering)

        def put(of: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(of, new, i, 0)

        return (stream.x, jax.tree.map(put, stores, cache.stores)), None

    n = jax.tree.leaves(stores)[0].shape[0]
    (x, stores), _ = lax.scan(body, (x, stores), (jnp.arange(n), of_layers))
    rows, cells = finish_step(kind, False, cells, batch, x)
    return kind.outer(rest).head(rows), (stores, cells)


if __name__ == "__main__":
    commands.run(main)
