"""Time to the first token of a blend beside that of a prefill of the same text.

    python -m scripts.bench.reuse.blend
    python -m scripts.bench.reuse.blend --n_tokens 1000 --ratios 0,0.15,0.3

Chunks of equal length, computed beforehand and in memory, and a suffix; weights and cache in f32.
Both sides are timed from an empty sequence to the logits of the suffix's last token: for a blend
that is copying the chunks, moving them, and both of its programs. Runs are interleaved.
"""

import time
from collections.abc import Callable

import jax
import numpy as np
from absl import flags

from kvrt import BlendSpec, CacheConfig, Runtime
from kvrt_models.load import load
from scripts._lib import commands, measure

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_N_TOKENS = flags.DEFINE_integer("n_tokens", 2000, "Tokens of all chunks.", lower_bound=8)
_N_CHUNKS = flags.DEFINE_integer("n_chunks", 4, "Chunks.", lower_bound=1)
_N_SUFFIX = flags.DEFINE_integer("n_suffix", 32, "Tokens behind them.", lower_bound=1)
_RATIOS = flags.DEFINE_list("ratios", ["0.15"], "Of the chunks' tokens.")
_N_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of each side.", lower_bound=1)


def main() -> None:
    decoder = load(_MODEL.value, dtype="f32").decoder
    n, n_suffix = _N_TOKENS.value, _N_SUFFIX.value
    config = CacheConfig(
        n_ctx=-(-(n + n_suffix) // 256) * 256,
        n_seq_max=2,
        swa_full=True,
        type_k="f32",
        type_v="f32",
    )
    runtime = Runtime(decoder, config)
    rng = np.random.default_rng(0)
    size = n // _N_CHUNKS.value
    texts = [rng.integers(100, 10000, size).tolist() for _ in range(_N_CHUNKS.value)]
    suffix = rng.integers(100, 10000, n_suffix).tolist()
    chunks = [runtime.chunk(x, [1]) for x in texts]
    whole = [1, *(token for x in texts for token in x), *suffix]
    sides: dict[str, Callable[[], jax.Array]] = {"prefill": lambda: runtime.prefill(whole)}
    for ratio in _RATIOS.value:
        spec = BlendSpec(ratio=float(ratio))
        sides[f"blend_{ratio}"] = lambda s=spec: runtime.blend(chunks, suffix, s).logits
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(_N_ROUNDS.value + 1):
        for name, side in sides.items():
            runtime.clear()
            start = time.perf_counter()
            jax.block_until_ready(side())
            if i:  # the first run compiles
                taken[name].append(time.perf_counter() - start)
    figures: dict[str, object] = {f"{k}_ms": measure.quartiles(x) for k, x in taken.items()}
    for name in list(sides)[1:]:
        over = float(np.median(taken[name]) / np.median(taken["prefill"]))
        figures[f"{name}_over_prefill"] = round(over, 3)
    measure.emit("blend", n_tokens=len(whole), n_chunks=len(chunks), n_suffix=n_suffix, **figures)


if __name__ == "__main__":
    commands.run(main)
