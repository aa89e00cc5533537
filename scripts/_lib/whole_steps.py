"""Whole steps of a model of random weights: alone, beside their products, many in one program."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from kvrt.cells.slots import Places
from kvrt.kv_types import FLOAT_DTYPES, FloatType, KVDtype
from kvrt.options.sampling import Sampling
from kvrt.program import decode_loop, sample
from kvrt.program.device import Device
from kvrt.program.programs import Programs
from kvrt.program.step import Cache
from kvrt_models.decoder import Block, Decoder
from kvrt_models.layers.feed_forward import Gated
from scripts._lib import (
    attention_alone,
    cases,
    grid,
    implementations,
    measure,
    rounds,
    shapes,
    torch_peer,
)
from scripts._lib.cases import Case
from scripts._lib.rounds import Ready

# Tokens that one program decodes.
_N_LOOP = 16


class Weights:
    """The decoder of the cases, made once for those that share it."""

    def __init__(self) -> None:
        """None yet."""
        self._made: tuple[Any, Decoder] | None = None

    def of(self, case: Case) -> Decoder:
        """The decoder of a case."""
        key = case.spec, case.dtype
        if self._made is None or self._made[0] != key:
            self._made = None  # its memory first
            self._made = key, shapes.random_decoder(case.spec, case.dtype)
        return self._made[1]

    def check_room(self, case: Case, n_caches: int = 1) -> None:
        """Refuses a case whose cache, of which there are so many, and weights do not fit.

        Raises:
          NoKernel: this device cannot run its attention.
          MemoryError: they do not fit.
        """
        grid.check_kernel(case)
        there = shapes.weight_bytes(*self._made[0])[0] if self._made else 0
        weights = shapes.weight_bytes(case.spec, case.dtype)[0]
        lacking = grid.no_room(weights - there + n_caches * (case.n_bytes - weights))
        if lacking:
            raise MemoryError(f"the step {lacking}")


def lines(asked: Sequence[list[Case]], what: str, peers: str) -> Iterator[dict[str, Any]]:
    """A line a side of each size, sides interleaved.

    Args:
      asked: cases that differ by their implementation, for each size.
      what: "step", or "loop", a token where one program decodes many.
      peers: PyTorch's step beside ours where they are "all", in a process of its own and first.
    """
    torch = peers == "all" and what == "step" and grid.wanted("torch step")
    theirs = torch_peer.run([_asked_of_torch(of[0]) for of in asked] if torch else [])
    measure.copy_gb_s()  # first, for it takes memory of its own
    weights, make = Weights(), {"step": step_ready, "loop": loop_ready}[what]
    for i, of in enumerate(asked):
        sides = {f"kvrt {implementations.plain_name(x.attention)}": x for x in of}
        makers = {x: functools.partial(make, c, weights) for x, c in sides.items()}
        makers = {x: run for x, run in makers.items() if grid.wanted(x)}
        found = rounds.compared(makers, grid.n_runs())
        found |= {"torch step": rounds.Timed(**theirs[i])} if theirs else {}
        for side, timed in found.items():
            attention = {"attention": side.removeprefix("kvrt ")}
            yield {"side": side, **grid.named(of[0]), **attention, **_figures(of[0], timed)}


def _asked_of_torch(case: Case) -> torch_peer.Asked:
    names = ("n_layers", "n_embd", "n_ff", "n_vocab", "tied")
    step = {name: getattr(case.spec, name) for name in names}
    step["weight_bytes"] = shapes.weight_bytes(case.spec, case.dtype)[1]
    return attention_alone.asked_of_torch(case, case.spec.groups[0], "torch step", **step)


def _figures(case: Case, timed: rounds.Timed) -> dict[str, Any]:
    """Milliseconds; of decoding the bytes beside a copy's, of a prompt the work of its products."""
    if not timed.samples:
        return dict(timed.figures)
    if case.n_new > 1:
        rates = _of_products(case, timed.samples)
    else:
        rates = {"step_bytes": timed.n_bytes, **measure.beside_copy(timed.samples, timed.n_bytes)}
    return {"step_ms": measure.quartiles(timed.samples, digits=3), **rates, **timed.figures}


def by_type(of: list[Case], types: Sequence[KVDtype]) -> Iterator[dict[str, Any]]:
    """Steps over caches of each KV dtype, interleaved, and times by the first's.

    All caches are held at once; a machine whose pace changes changes it for all.
    """
    weights = Weights()
    for case in of:
        sides = {t: dataclasses.replace(case, type_k=t, type_v=t) for t in types}
        try:
            widest = max(sides.values(), key=lambda x: x.n_bytes)
            weights.check_room(widest, len(sides))
            steps = {t: Step(x, weights.of(x)) for t, x in sides.items()}
        except (NotImplementedError, MemoryError) as error:
            yield {"side": "types", **grid.named(case), "skipped": str(error)}
            continue
        runs = {t: rounds.timed(step) for t, step in steps.items()}
        times = rounds.interleaved(runs, grid.n_runs(), n_warm=2)
        for t, side in sides.items():
            ratios = [a / b for a, b in zip(times[t], times[types[0]], strict=True)]
            yield {
                "side": f"kvrt {implementations.plain_name(case.attention)}",
                **grid.named(side),
                "step_ms": times.ms(t, digits=3),
                "of_first": measure.quartiles(ratios, scale=1, digits=3),
            }


def beside_products(of: list[Case]) -> Iterator[dict[str, Any]]:
    """A step and its products with weights alone, in interleaved runs.

    What is left is everything else: norms, RoPE, attention and its reads of the cache, writes,
    sampling, and the host's call. Products follow each other by a slice or an addition.
    """
    weights = Weights()
    for case in of:
        line = {"side": f"kvrt {implementations.plain_name(case.attention)}", **grid.named(case)}
        try:
            weights.check_room(case)
        except (NotImplementedError, MemoryError) as error:
            yield line | {"skipped": str(error)}
            continue
        decoder = weights.of(case)
        products = _products(decoder, case.n_batch * case.n_new)
        sides = {"step": rounds.timed(Step(case, decoder)), "products": rounds.timed(products)}
        times = rounds.interleaved(sides, grid.n_runs(), n_warm=2)
        beside = [a - b for a, b in zip(times["step"], times["products"], strict=True)]
        best = min(times["step"]) - min(times["products"])
        yield line | {
            "step_ms": times.ms("step", digits=3),
            "products_ms": times.ms("products", digits=3),
            "beside_ms": measure.quartiles(beside, digits=3),
            "best_beside_ms": round(best * 1e3, 3),
        }


def _products(decoder: Decoder, n_tokens: int) -> Callable[[], Any]:
    """A program of nothing but a decoder's products for so many tokens, one after the other."""
    (graph, params), spec = nnx.split(decoder), decoder.spec
    x = jax.random.normal(jax.random.key(0), (n_tokens, spec.n_embd))

    def run(params: Any, x: jax.Array) -> jax.Array:
        model, before = nnx.merge(graph, params), x

        def given() -> jax.Array:
            # The first term keeps values in range, the second makes this product wait.
            return x + 1e-6 * before[:, :1]

        for i, block in enumerate(model.blocks):
            assert isinstance(block, Block), "shapes have no layers without queries"
            n_mixed = spec.n_heads * spec.group_of(i).head_dim
            before = block.out(block.qkv(given())[:, :n_mixed])
            assert isinstance(block.ffn, Gated), "shapes have no experts"
            before = block.ffn.down(block.ffn.gate_up(given())[:, : spec.n_ff])
        return model.head(given())

    compiled = jax.jit(run).lower(params, x).compile()
    return lambda: compiled(params, x)


def _device(case: Case, decoder: Decoder) -> Device:
    """A device with the cache of a case."""
    device = Device(decoder, case.config, case.layout)
    device.cache = Cache(stores=(), cells=())  # its memory first
    device.cache = cases.cache(case)
    return device


class Step:
    """A step of a case, which can be run again and again."""

    def __init__(self, case: Case, decoder: Decoder):
        """Makes the cache; compiles nothing yet."""
        self.device, self._batch = _device(case, decoder), cases.batch(case)
        weight_bytes = shapes.weight_bytes(case.spec, case.dtype)[1]
        self.n_bytes = weight_bytes + cases.read_bytes(case, self.device.cache.stores)
        self._sampler = jax.device_put(sample.create(Sampling(), [[]] * case.n_batch))

    def __call__(self) -> Any:
        """Runs it; what is to be waited for."""
        return *self.device.forward(self._batch, self._sampler), self.device.cache


def step_ready(case: Case, weights: Weights) -> Ready:
    """A step of all sequences of a case, ready to be timed.

    Raises:
      NoKernel: this device cannot run its attention.
      MemoryError: weights and cache do not fit.
    """
    weights.check_room(case)
    step = Step(case, weights.of(case))
    step()
    sizes = attention_alone.tile_sizes(attention_alone.key(case, case.spec.groups[0], "f32"))
    figures = _costs(step.device.programs, "forward") | ({"tiles": sizes} if sizes else {})

    def behind(samples: list[float]) -> dict[str, Any]:
        """The time that the device was busy; the rest of the wall time is the host's."""
        busy = None if jax.default_backend() == "cpu" else busy_s(step, n=5)
        if busy is None:
            return {}
        gap = 1 - busy / float(np.median(samples))
        return {"device_ms": round(busy * 1e3, 3), "host_gap": round(gap, 3)}

    return Ready(run=step, n_bytes=step.n_bytes, figures=figures, behind=behind)


def loop_ready(case: Case, weights: Weights) -> Ready:
    """Steps that follow each other without the host; their tokens take the places of one block."""
    weights.check_room(case)
    n = _N_LOOP
    device, batch = _device(case, weights.of(case)), cases.batch(case)
    cache_bytes = cases.read_bytes(case, device.cache.stores)

    def run_of(places: Places) -> Places:
        # All steps write where the first one does, so that runs can be repeated.
        slots = np.tile(np.asarray(places.slots)[None], (n, 1))
        return dataclasses.replace(places, slots=slots)

    plan = decode_loop.LoopPlan(
        tokens=batch.tokens,
        pos=batch.pos,
        seq_ids=batch.seq_ids,
        places=tuple(map(run_of, batch.places)),
        n_steps=np.asarray(n, np.int32),
        stop_ids=np.full(16, -1, np.int32),
    )
    plan, sampler = jax.device_put((plan, sample.create(Sampling(), [[]] * case.n_batch)))

    def once() -> Any:
        return device.decode(plan, sampler, 0), device.cache

    once()
    return Ready(
        run=once,
        parts=n,
        n_bytes=shapes.weight_bytes(case.spec, case.dtype)[1] + cache_bytes,
        figures=_costs(device.programs, "decode_steps") | {"n_loop": n},
    )


def _of_products(case: Case, samples: list[float]) -> dict[str, Any]:
    """Tokens a second, and the products' work beside a product of large matrices."""
    n, median = case.n_batch * case.n_new, float(np.median(samples))
    flop = 2 * n * shapes.matrix_sizes(case.spec)
    flop += 2 * case.n_batch * case.spec.n_embd * case.spec.n_vocab
    for group in case.spec.groups:
        # Half of a step's own tokens are hidden from each other.
        seen = cases.n_seen(case, group) + case.n_new / 2
        flop += 4 * n * seen * case.spec.n_heads * group.head_dim * len(group.layers)
    kind: FloatType = "f32" if case.dtype == "int8" else case.dtype  # a prompt's are widened
    tflop_s, most = flop / median / 1e12, measure.product_tflop_s(FLOAT_DTYPES[kind])
    return {
        "tokens_a_second": round(n / median, 1),
        "tflop_s": round(tflop_s, 3),
        "product_tflop_s": round(most, 3),
        "share_of_product": round(tflop_s / most, 3),
    }


def _costs(programs: Programs, kind: str) -> dict[str, Any]:
    temp = programs.temp_bytes(kind)
    return {"compile_s": round(programs.compile_s, 2), "temp_bytes": temp}


# --- time of the device ---------------------------------------------------------------------------

# Lines of a device's plane that hold what ran there, the rest repeats it: streams of a GPU, and
# programs of a TPU.
_LINES = ("Stream", "XLA Modules")


def busy_s(run: Callable[[], Any], n: int) -> float | None:
    """Seconds of a run in which the device worked, None where no profile says so."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(n):
                jax.block_until_ready(run())
        total = sum(map(_of_file, Path(folder).rglob("*.xplane.pb")))
    return total / n if total else None


def _of_file(path: Path) -> float:
    data = jax.profiler.ProfileData.from_file(str(path))
    spans = [
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in data.planes
        if plane.name.startswith("/device:")
        for line in plane.lines
        if line.name.startswith(_LINES)
        for event in line.events
    ]
    return covered(spans) / 1e9


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what some spans cover together."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total
