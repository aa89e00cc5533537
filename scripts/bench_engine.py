"""Many requests at once: throughput, prefix hits, blocks against cells, host work.

Run it with `python scripts/bench_engine.py`; --rounds, --what=throughput,prefix,host,waste. Sides
that are compared take turns in one run. The model is the default one, float32, but for host work,
which takes a model that costs nothing.
"""

import time
from collections.abc import Sequence

import jax.numpy as jnp
import measure
import numpy as np
from absl import app, flags
from flax import nnx

from kvrt import CacheConfig, Engine, GroupSpec, Request, RopeSpec, Rules
from kvrt.arrays import Array
from kvrt.program.batch import Batch
from kvrt.program.sample import Sampler
from kvrt.serving.config import EngineConfig, Mode
from kvrt_models.load import load

_N_ROUNDS = flags.DEFINE_integer("rounds", 3, "Turns of each side.", lower_bound=1)
_WHAT = flags.DEFINE_list("what", ["throughput", "prefix", "host", "waste"], "What is measured.")

_MODEL = "smollm2-135m"
_N_ROWS = 16


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    for what in _WHAT.value:
        {"throughput": throughput, "prefix": prefix, "host": host, "waste": waste}[what]()


def mixed(n: int, seed: int) -> list[Request]:
    """Requests of mixed length, with nothing in common."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            id=str(i),
            tokens=tuple(rng.integers(100, 10_000, rng.integers(20, 200)).tolist()),
            n_predict=int(rng.integers(40, 120)),
        )
        for i in range(n)
    ]


def serve(engine: Engine, asked: Sequence[Request]) -> dict[str, float]:
    """Serves requests that come together; seconds to the first token of each, and of all."""
    start, first = time.perf_counter(), {}
    for request in asked:
        engine.add_request(request)
    while engine.has_work:
        for out in engine.step():
            first.setdefault(out.id, time.perf_counter() - start)
    return first | {"all": time.perf_counter() - start}


class StepClock:
    """Seconds that an engine spends in its compiled steps, as its device is asked for them."""

    def __init__(self, engine: Engine):
        """Listens to an engine from now on."""
        self.seconds, self._serve = 0.0, engine.device.serve
        engine.device.serve = self._timed

    def _timed(self, batch: Batch, sampler: Sampler) -> tuple[np.ndarray, Array]:
        start = time.perf_counter()
        out = self._serve(batch, sampler)
        self.seconds += time.perf_counter() - start
        return out


def throughput() -> None:
    """16 requests at once, in blocks with and without a prefix cache and in cells, and in turn."""
    decoder = load(_MODEL).decoder

    def engine(n_rows: int, mode: Mode, block_size: int, *, caching: bool = True) -> Engine:
        config = CacheConfig(n_ctx=8192, n_seq_max=n_rows, block_size=block_size)
        return Engine(decoder, config, EngineConfig(mode=mode, prefix_cache=caching))

    sides = {
        "one at a time": engine(1, "paged", 16),
        "blocks": engine(_N_ROWS, "paged", 16),
        "blocks, no prefix cache": engine(_N_ROWS, "paged", 16, caching=False),
        "cells": engine(_N_ROWS, "cell", 256),
    }
    # What differs is on the host alone: the very same programs serve both.
    sides["blocks, no prefix cache"].device.programs = sides["blocks"].device.programs
    for name, side in sides.items():
        for n_prompt in (5, 20, 100, 400):
            tokens = tuple(range(100, 100 + n_prompt))
            serve(side, [Request(id=name, tokens=tokens, n_predict=2)])
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    # The share of the time that is not the compiled steps': what a prefix cache can make longer.
    inside = {name: StepClock(side) for name, side in sides.items()}
    shares: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(_N_ROUNDS.value):
        asked, order = mixed(_N_ROWS, i), list(sides)
        # Nobody is always the one after another.
        for name in order[i % len(order) :] + order[: i % len(order)]:
            inside[name].seconds = 0.0
            seconds[name].append(serve(sides[name], asked)["all"])
            shares[name].append(1 - inside[name].seconds / seconds[name][-1])
    n_drawn = [sum(r.n_predict for r in mixed(_N_ROWS, i)) for i in range(_N_ROUNDS.value)]
    for name, times in seconds.items():
        rates = [n / s for n, s in zip(n_drawn, times, strict=True)]
        measure.emit(
            "throughput",
            side=name,
            tokens_a_second=measure.quartiles(rates, scale=1),
            host_percent=measure.quartiles(shares[name], scale=100),
        )
    base = seconds["blocks"]
    for name in seconds:
        ratios = [a / b for a, b in zip(seconds[name], base, strict=True)]
        measure.emit(
            "throughput ratio", of=name, to="blocks", seconds=measure.quartiles(ratios, scale=1)
        )


def prefix() -> None:
    """Four requests that share 1,000 tokens: seconds to the first token of each."""
    config = CacheConfig(n_ctx=8192, n_seq_max=4, block_size=16)
    engine = Engine(load(_MODEL).decoder, config)
    first, later = [], []
    for i in range(_N_ROUNDS.value + 1):
        rng = np.random.default_rng(i)
        shared = rng.integers(100, 10_000, 1000).tolist()
        times = []
        for j in range(4):
            tokens = (*shared, *rng.integers(100, 10_000, 12).tolist())
            request = Request(id=str(j), tokens=tokens, n_predict=1)
            times.append(serve(engine, [request])["all"])
        if i:  # the first turn compiles
            first.append(times[0])
            later += times[1:]
    measure.emit(
        "prefix",
        first_ms=measure.quartiles(first),
        later_ms=measure.quartiles(later),
        ratio=float(np.median(first) / np.median(later)),
    )


class Nothing(nnx.Module):
    """A model of one head that hardly computes: what is left is the host's work."""

    recurrent = None
    n_vocab = 32

    def __init__(self) -> None:
        """One group of one layer."""
        rope = RopeSpec(n_rot=2)
        self.groups = (GroupSpec(layers=(0,), n_kv_heads=1, head_dim=2, rope=rope),)
        self.table = nnx.Param(jnp.ones((32, 32), jnp.float32))

    def __call__(self, tokens, attend, out_ids):
        """Rows of a table, whatever attention says."""
        x = self.table[...][tokens][:, None, :2]
        attend(0, x, x, x)
        return self.table[...][tokens[out_ids]]


def host() -> None:
    """A step of 256 requests that decode: the time outside the compiled program."""
    n = 256
    config = CacheConfig(n_ctx=n * 256, n_seq_max=n, block_size=16, n_ubatch=512)
    for caching in (True, False):
        rules = Rules(n_batch=512, n_ctx_seq=1024)
        engine = Engine(Nothing(), config, EngineConfig(rules=rules, prefix_cache=caching))
        for i in range(n):
            tokens = tuple(np.random.default_rng(i).integers(0, 32, 8 + i % 16).tolist())
            engine.add_request(Request(id=str(i), tokens=tokens, n_predict=200))
        while engine.stats().n_waiting:
            engine.step()
        spent, inside = [], StepClock(engine)
        for _ in range(120):
            inside.seconds, start = 0.0, time.perf_counter()
            engine.step()
            spent.append(time.perf_counter() - start - inside.seconds)
        measure.emit(
            "host work of a step", requests=n, caching=caching, ms=measure.quartiles(spent)
        )


def waste() -> None:
    """Rows that hold nothing: of blocks, and of reserving the most for each; mixed lengths."""
    config = CacheConfig(n_ctx=16_384, n_seq_max=32, block_size=16, n_ubatch=256)
    engine = Engine(Nothing(), config, EngineConfig(rules=Rules(n_batch=256)))
    rng = np.random.default_rng(0)
    for i in range(200):
        n_prompt, n_predict = (int(x) for x in rng.integers((30, 20), (700, 300)))
        tokens = tuple(rng.integers(0, 32, n_prompt).tolist())
        engine.add_request(Request(id=str(i), tokens=tokens, n_predict=n_predict))
    n_max, empty, reserved = 1000, [], []
    while engine.has_work:
        engine.step()
        running = [s.n_computed for s in engine.running]
        if running:
            held = sum(-(-n // 16) * 16 for n in running)
            empty.append(1 - sum(running) / held)
            reserved.append(1 - sum(running) / (n_max * len(running)))
    measure.emit("waste", blocks=float(np.mean(empty)), reserving=float(np.mean(reserved)))


if __name__ == "__main__":
    app.run(main)
