"""Whole steps of a model of random weights: alone, beside their products, many in one program."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from kvrt.cells.slots import Places
from kvrt.kv_types import FLOAT_DTYPES, FloatType, KVDtype
from kvrt.program import decode_loop, sample
from kvrt.program.device import Device
from kvrt.program.programs import Programs
from kvrt.program.sample import Sampling
from kvrt.program.step import Cache
from kvrt_models.decoder import Block, Decoder
from kvrt_models.layers.feed_forward import Gated
from scripts._lib import cases, grid, measure, shapes
from scripts._lib.cases import Case

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

    @property
    def n_bytes(self) -> int:
        """What is in memory already."""
        return shapes.weight_bytes(*self._made[0])[0] if self._made else 0


def run(case: Case, weights: Weights, what: str) -> dict[str, Any]:
    """Figures of a step ("step"), or of a token where one program decodes many ("loop")."""
    measure.copy_gb_s()  # first, for it takes memory of its own
    figures = {"side": f"kvrt {case.attention}", **grid.named(case)}
    lacking = grid.no_kernel(case) or grid.no_room(case.n_bytes - weights.n_bytes)
    if lacking:
        return figures | {"skipped": lacking}
    decoder = weights.of(case)
    try:
        return figures | {"step": _step, "loop": _loop}[what](case, decoder)
    except NotImplementedError as error:
        return figures | {"skipped": str(error)}


def in_turn(case: Case, weights: Weights, types: Sequence[KVDtype]) -> Iterator[dict[str, Any]]:
    """Figures of a step over caches of each KV dtype, interleaved, and times by the first's.

    All caches are held at once; a machine whose pace changes changes it for all.
    """
    sides = [dataclasses.replace(case, type_k=t, type_v=t) for t in types]
    n_bytes = sum(x.n_bytes for x in sides) - weights.n_bytes
    lacking = grid.no_kernel(case) or grid.no_room(n_bytes)
    if lacking:
        yield {"side": "types", **grid.named(case), "skipped": lacking}
        return
    decoder = weights.of(case)
    steps = [Step(x, decoder) for x in sides]
    for step in steps:
        measure.clock(step, 2)
    rounds = [[measure.clock(step, 1)[0] for step in steps] for _ in range(grid.n_runs())]
    for i, side in enumerate(sides):
        yield {
            "side": f"kvrt {case.attention}",
            **grid.named(side),
            "step_ms": measure.quartiles([r[i] for r in rounds], digits=3),
            "of_first": measure.quartiles([r[i] / r[0] for r in rounds], scale=1, digits=3),
        }


def beside_products(case: Case, weights: Weights) -> dict[str, Any]:
    """Figures of a step and of its products with weights alone, in interleaved runs.

    What is left is everything else: norms, RoPE, attention and its reads of the cache, writes,
    sampling, and the host's call. Products follow each other by a slice or an addition.
    """
    figures = {"side": f"kvrt {case.attention}", **grid.named(case)}
    lacking = grid.no_kernel(case) or grid.no_room(case.n_bytes - weights.n_bytes)
    if lacking:
        return figures | {"skipped": lacking}
    decoder = weights.of(case)
    sides = [Step(case, decoder), _products(decoder, case.n_batch * case.n_new)]
    for run in sides:
        measure.clock(run, 2)
    rounds = [[measure.clock(run, 1)[0] for run in sides] for _ in range(grid.n_runs())]
    step, products = zip(*rounds, strict=True)
    return figures | {
        "step_ms": measure.quartiles(step, digits=3),
        "products_ms": measure.quartiles(products, digits=3),
        "beside_ms": measure.quartiles([a - b for a, b in rounds], digits=3),
        "best_beside_ms": round((min(step) - min(products)) * 1e3, 3),
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


def _step(case: Case, decoder: Decoder) -> dict[str, Any]:
    step = Step(case, decoder)
    n_bytes = step.n_bytes
    measure.clock(step, 1)
    samples = measure.clock(step, grid.n_runs())
    found = _rates(samples, n_bytes) if case.n_new == 1 else _prompt(case, samples)
    return found | _costs(step.device.programs, "forward")


def _loop(case: Case, decoder: Decoder) -> dict[str, Any]:
    """Steps follow each other without the host; their tokens take the places of one block."""
    n = _N_LOOP
    device, batch = _device(case, decoder), cases.batch(case)
    n_bytes = shapes.weight_bytes(case.spec, case.dtype)[1] + cases.read_bytes(
        case, device.cache.stores
    )

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

    measure.clock(once, 1)
    samples = [s / n for s in measure.clock(once, grid.n_runs())]
    return _rates(samples, n_bytes) | _costs(device.programs, "decode_steps") | {"n_loop": n}


def _rates(samples: list[float], n_bytes: int) -> dict[str, Any]:
    return {
        "step_ms": measure.quartiles(samples, digits=3),
        "step_bytes": n_bytes,
        **measure.beside_copy(samples, n_bytes),
    }


def _prompt(case: Case, samples: list[float]) -> dict[str, Any]:
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
        "step_ms": measure.quartiles(samples, digits=3),
        "tokens_a_second": round(n / median, 1),
        "tflop_s": round(tflop_s, 3),
        "product_tflop_s": round(most, 3),
        "share_of_product": round(tflop_s / most, 3),
    }


def _costs(programs: Programs, kind: str) -> dict[str, Any]:
    temp = programs.temp_bytes(kind)
    return {"compile_s": round(programs.compile_s, 2), "temp_bytes": temp}
