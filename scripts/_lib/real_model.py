"""Decode and prefill of the default model beside llama.cpp, in interleaved runs.

`bench/decode.py` runs it. Contexts: 128 to 512 tokens with the peer; then 250 against 8,000 of
8,192 cells, and 512 against 32,768 cells that hold 250. Like is compared with like: f32 weights
with llama.cpp's F32 and bf16 with its BF16, each with its flash attention and without; both keep
the KV cache in f32.
"""

import dataclasses
from pathlib import Path

import numpy as np

from kvrt import CacheConfig, Runtime
from kvrt_models.load import load
from scripts._lib import measure, peer

_MODEL = "smollm2-135m"
_N_PROMPT, _N_STEPS = 128, 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """What is timed.

    Attributes:
      peer: llama.cpp too, whose weights are written once (1 GB) beside the fetched model.
      long: long contexts and large caches too.
      bf16: bf16 weights too.
      n_threads: llama.cpp's.
      n_rounds: runs of each side.
    """

    peer: bool
    long: bool
    bf16: bool
    n_threads: int
    n_rounds: int


def run(asked: Compared) -> None:
    """Emits a line a comparison.

    Raises:
      FetchError: the model is not there and cannot be fetched.
    """
    # Warmth of the machine matters more than order: runs are interleaved, medians are compared.
    decoder = load(_MODEL, dtype="f32").decoder
    beside_peer("f32", Runtime(decoder, CacheConfig(n_ctx=1024, type_k="f32", type_v="f32")), asked)
    if asked.long:
        long_context(decoder, asked.n_rounds)
        large_cache(decoder, asked.n_rounds)
    if asked.bf16:
        decoder = load(_MODEL, dtype="bf16").decoder
        beside_peer(
            "bf16", Runtime(decoder, CacheConfig(n_ctx=1024, type_k="f32", type_v="f32")), asked
        )


def peers(dtype: str) -> dict[str, tuple[Path, bool]]:
    """llama.cpp's files of a type by the name of a side, and whether flash attention is on."""
    path = peer.model_file(_MODEL, dtype)
    return {f"llama_cpp_{dtype}": (path, False), f"llama_cpp_{dtype}_flash": (path, True)}


def beside_peer(dtype: str, runtime: Runtime, asked: Compared) -> None:
    """Decode from 128 tokens of context, and prefill of 512."""
    sides = peers(dtype) if asked.peer else {}
    rng = np.random.default_rng(0)
    prompt, long = rng.integers(100, 10000, _N_PROMPT), rng.integers(100, 10000, 512).tolist()
    ours, ours_prefill = [], []
    theirs: dict[str, list[float]] = {name: [] for name in sides}
    theirs_prefill: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(asked.n_rounds + 1):
        runtime.clear()
        prefill = measure.clock(lambda: runtime.prefill(long), 1)
        measure.fill(runtime, _N_PROMPT)
        decode = list(measure.steps(runtime, _N_STEPS))
        if i > 0:  # the first compiles
            ours, ours_prefill = ours + decode, ours_prefill + prefill
        requests = [(prompt.tolist(), _N_STEPS), (long, 1)]
        for name, (path, flash) in sides.items():
            setting = peer.Setting(path=path, n_threads=asked.n_threads, flash=flash)
            decoded, read = peer.time(setting, requests)
            theirs[name].append(decoded.decode_s)
            theirs_prefill[name].append(read.prefill_s)
    figures = {"dtype": dtype, "decode_ms": measure.quartiles(ours)}
    figures["prefill_512_ms"] = measure.quartiles(ours_prefill)
    for name in sides:
        figures[f"{name}_decode_ms"] = measure.quartiles(theirs[name])
        figures[f"{name}_prefill_512_ms"] = measure.quartiles(theirs_prefill[name])
        ratio = float(np.median(theirs[name]) / np.median(ours))
        figures[f"tps_over_{name}"] = round(ratio, 3)
        ratio = float(np.median(theirs_prefill[name]) / np.median(ours_prefill))
        figures[f"prefill_over_{name}"] = round(ratio, 3)
    figures["decode_temp_bytes"] = runtime.programs.temp_bytes("decode_steps")
    measure.emit("decode", **figures, compile_s=round(runtime.programs.compile_s, 2))


def long_context(decoder, n_rounds: int) -> None:
    """The same cache of 8,192 cells with 250 and with 8,000 tokens."""
    runtime = Runtime(decoder, CacheConfig(n_ctx=8192, type_k="f32", type_v="f32"))
    samples: dict[int, list[float]] = {250: [], 8000: []}
    for _ in range(n_rounds):
        for n, seconds in samples.items():
            measure.fill(runtime, n)
            seconds += measure.steps(runtime, 30)
    ratio = float(np.median(samples[8000]) / np.median(samples[250]))
    figures = {f"decode_ms_at_{n}": measure.quartiles(s) for n, s in samples.items()}
    measure.emit("long_context", n_ctx=8192, **figures, ratio=round(ratio, 3))


def large_cache(decoder, n_rounds: int) -> None:
    """250 tokens in caches of 512 and of 32,768 cells."""
    samples: dict[int, list[float]] = {512: [], 32768: []}
    runtimes = {
        n: Runtime(decoder, CacheConfig(n_ctx=n, type_k="f32", type_v="f32")) for n in samples
    }
    for _ in range(2 * n_rounds):
        for n, runtime in runtimes.items():
            measure.fill(runtime, 250)
            samples[n] += measure.steps(runtime, 30)
    ratio = float(np.median(samples[32768]) / np.median(samples[512]))
    figures = {f"decode_ms_in_{n}": measure.quartiles(s) for n, s in samples.items()}
    measure.emit("large_cache", tokens=250, **figures, ratio=round(ratio, 3))
