"""The default model by layer beside whole programs, in interleaved runs.

    python -m scripts.bench.layers.dispatch
    python -m scripts.bench.layers.dispatch --weights f32 --what decode --contexts 250

Rows: milliseconds of a decode step behind each of --contexts, of a prefill of 512 tokens, and
seconds of 16 requests at once. Rounds in which other processes took more than 4 % of the time are
left out and counted; programs are compiled before the first round.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from kvrt import CacheConfig, Decoder, Engine, Request, Runtime
from kvrt_models.load import load
from scripts._lib import commands, grid, measure

_WEIGHTS = flags.DEFINE_list("weights", ["int8", "f32"], "Of int8, bf16, f32.")
_KINDS = ["decode", "prefill", "requests"]
_WHAT = flags.DEFINE_list("what", _KINDS, f"Of {', '.join(_KINDS)}.")
_CONTEXTS = flags.DEFINE_list("contexts", ["250", "4000"], "Tokens before those that are decoded.")
_ROUNDS = flags.DEFINE_integer("rounds", 12, "Runs of each side.", lower_bound=1)
_SIDES = ("whole", "by_layer")
_N_STEPS = 8  # of a round

# A round of each side, which gives the seconds of its samples.
Rounds = dict[str, Callable[[], list[float]]]


def main() -> None:
    grid.check(_WHAT, _KINDS)
    weights: Any
    for weights in _WEIGHTS.value:
        decoder = load("smollm2-135m", dtype=weights).decoder
        for row, rounds in _rows(decoder):
            _compare(f"{row}, {weights}", rounds)


def _rows(decoder: Decoder) -> Iterator[tuple[str, Rounds]]:
    """What is timed; each row is made when the one before is done."""
    runtimes = {side: Runtime(decoder, _config(side)) for side in _SIDES}
    if "decode" in _WHAT.value:
        for n in map(int, _CONTEXTS.value):
            yield f"decode behind {n} tokens", {s: _decoding(x, n) for s, x in runtimes.items()}
    if "prefill" in _WHAT.value:
        yield "prefill of 512 tokens", {s: _prefill(x) for s, x in runtimes.items()}
    runtimes.clear()
    if "requests" in _WHAT.value:
        engines = {s: Engine(decoder, _config(s, n_ctx=4096, n_seq_max=16)) for s in _SIDES}
        yield "16 requests", {s: _requests(x) for s, x in engines.items()}


def _config(side: str, **sizes: Any) -> CacheConfig:
    """A cache of the default model, dispatched as a side says."""
    options: dict[str, Any] = {"n_ctx": 8192, "programs": side} | sizes
    return CacheConfig(**options)


def _decoding(runtime: Runtime, n: int) -> Callable[[], list[float]]:
    measure.fill(runtime, n)
    tokens = runtime.generate()
    next(tokens)
    return lambda: measure.clock(lambda: next(tokens), _N_STEPS)


def _prefill(runtime: Runtime) -> Callable[[], list[float]]:
    prompt = np.random.default_rng(0).integers(100, 10_000, 512).tolist()
    return lambda: measure.clock(lambda: runtime.prefill(prompt), 1, again=runtime.clear)


def _requests(engine: Engine) -> Callable[[], list[float]]:
    rng, count = np.random.default_rng(0), iter(range(10**6))

    def serve() -> None:
        for i in range(16):
            tokens = tuple(rng.integers(100, 10_000, 32 + 4 * i).tolist())
            engine.add_request(Request(id=str(next(count)), tokens=tokens, n_predict=24))
        while engine.has_work:
            engine.step()

    return lambda: measure.clock(serve, 1)


def _compare(row: str, rounds: Rounds) -> None:
    """Emits the medians of both sides, and their ratio."""
    samples: dict[str, list[float]] = {side: [] for side in rounds}
    for run in rounds.values():
        run()
    n_dropped = 0
    for i in range(_ROUNDS.value):
        busy, own, start = _busy_s(), time.process_time(), time.perf_counter()
        order = list(rounds) if i % 2 else list(rounds)[::-1]
        found = {side: rounds[side]() for side in order}
        others = _busy_s() - busy - (time.process_time() - own)
        if others > 0.04 * (time.perf_counter() - start) + 0.02:
            n_dropped += 1
            continue
        for side, seconds in found.items():
            samples[side] += seconds
    figures: dict[str, Any] = {
        f"{side}_ms": measure.quartiles(x) for side, x in samples.items() if x
    }
    if n_dropped < _ROUNDS.value:
        whole, by_layer = (float(np.median(samples[side])) for side in _SIDES)
        figures["by_layer_of_whole"] = round(by_layer / whole, 3)
    n = len(samples["whole"])
    measure.emit("dispatch", row=row, **figures, n_samples=n, n_rounds_left_out=n_dropped)


def _busy_s() -> float:
    """Seconds of all processors' work so far, where the system says it."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, *others = map(int, stat.read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    commands.run(main)
