"""Decode and prefill of the default model beside llama.cpp, in one run, turn and turn about.

Run it with `python scripts/bench_decode.py`; add `--nopeer` to leave out llama.cpp, whose weights
are written once (1 GB) beside the fetched model. Contexts: 128 to 512 tokens with the peer; then
250 against 8,000 of 8,192 cells, and 512 against 32,768 cells that hold 250.
"""

from collections.abc import Sequence
from pathlib import Path

import measure
import numpy as np
import peer
from absl import app, flags

from kvrt import CacheConfig, Runtime
from models.load import load

_PEER = flags.DEFINE_bool("peer", True, "Also time llama.cpp.")
_LONG = flags.DEFINE_bool("long", True, "Also time long contexts and large caches.")
_BF16 = flags.DEFINE_bool("bf16", True, "Also time bf16 weights.")
_N_THREADS = flags.DEFINE_integer("threads", 2, "llama.cpp's threads.", lower_bound=1)
_N_ROUNDS = flags.DEFINE_integer("rounds", 5, "Turns of each side.", lower_bound=1)

_MODEL = "smollm2-135m"
_N_PROMPT, _N_STEPS = 128, 96


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    # Warmth of the machine matters more than order: sides take turns, medians are compared.
    peers = {}
    if _PEER.value:
        for dtype in ("f32", "bf16"):
            peers[dtype] = peer.model_file(_MODEL, dtype)
    decoder = load(_MODEL).decoder
    beside_peer("f32", Runtime(decoder, CacheConfig(n_ctx=1024)), peers)
    if _LONG.value:
        long_context(decoder)
        large_cache(decoder)
    if _BF16.value:
        decoder = load(_MODEL, dtype="bf16").decoder
        beside_peer("bf16", Runtime(decoder, CacheConfig(n_ctx=1024)), peers)


def beside_peer(dtype: str, runtime: Runtime, peers: dict[str, Path]) -> None:
    """Decode from 128 tokens of context, and prefill of 512."""
    rng = np.random.default_rng(0)
    prompt, long = rng.integers(100, 10000, _N_PROMPT), rng.integers(100, 10000, 512).tolist()
    ours, ours_prefill = [], []
    theirs: dict[str, list[float]] = {name: [] for name in peers}
    theirs_prefill: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(_N_ROUNDS.value + 1):
        runtime.clear()
        prefill = measure.clock(lambda: runtime.prefill(long), 1)
        measure.fill(runtime, _N_PROMPT)
        decode = list(measure.steps(runtime, _N_STEPS))
        if turn > 0:  # the first compiles
            ours, ours_prefill = ours + decode, ours_prefill + prefill
        for name, other in peers.items():
            requests = [(prompt.tolist(), _N_STEPS), (long, 1)]
            decoded, read = peer.time(other, _N_THREADS.value, requests)
            theirs[name].append(decoded.decode_s)
            theirs_prefill[name].append(read.prefill_s)
    figures = {"dtype": dtype, "decode_ms": measure.quartiles(ours)}
    figures["prefill_512_ms"] = measure.quartiles(ours_prefill)
    for name in peers:
        figures[f"llama_cpp_{name}_decode_ms"] = measure.quartiles(theirs[name])
        figures[f"llama_cpp_{name}_prefill_512_ms"] = measure.quartiles(theirs_prefill[name])
        ratio = float(np.median(theirs[name]) / np.median(ours))
        figures[f"tps_over_llama_cpp_{name}"] = round(ratio, 3)
        ratio = float(np.median(theirs_prefill[name]) / np.median(ours_prefill))
        figures[f"prefill_over_llama_cpp_{name}"] = round(ratio, 3)
    figures["decode_temp_bytes"] = runtime.programs.temp_bytes("decode")
    measure.emit("decode", **figures, compile_s=round(runtime.programs.compile_s, 2))


def long_context(decoder) -> None:
    """The same cache of 8,192 cells with 250 and with 8,000 tokens."""
    runtime = Runtime(decoder, CacheConfig(n_ctx=8192))
    samples: dict[int, list[float]] = {250: [], 8000: []}
    for _ in range(_N_ROUNDS.value):
        for n, seconds in samples.items():
            measure.fill(runtime, n)
            seconds += measure.steps(runtime, 30)
    ratio = float(np.median(samples[8000]) / np.median(samples[250]))
    figures = {f"decode_ms_at_{n}": measure.quartiles(s) for n, s in samples.items()}
    measure.emit("long_context", n_ctx=8192, **figures, ratio=round(ratio, 3))


def large_cache(decoder) -> None:
    """250 tokens in caches of 512 and of 32,768 cells."""
    samples: dict[int, list[float]] = {512: [], 32768: []}
    runtimes = {n: Runtime(decoder, CacheConfig(n_ctx=n)) for n in samples}
    for _ in range(2 * _N_ROUNDS.value):
        for n, runtime in runtimes.items():
            measure.fill(runtime, 250)
            samples[n] += measure.steps(runtime, 30)
    ratio = float(np.median(samples[32768]) / np.median(samples[512]))
    figures = {f"decode_ms_in_{n}": measure.quartiles(s) for n, s in samples.items()}
    measure.emit("large_cache", tokens=250, **figures, ratio=round(ratio, 3))


if __name__ == "__main__":
    app.run(main)
