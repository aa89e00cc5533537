"""What windowed layers cost as the text grows: Gemma 3's decode at two lengths, and a long text.

    python -m scripts.bench.window --rounds 2
    python -m scripts.bench.window --model toy --lengths 100,400 --n_long 4096 --rounds 1

"windows" is the same model with a window in every layer, so that what grows with full attention is
left out.
"""

import gc
import os
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags
from flax import nnx

from kvrt import Attend, CacheConfig, Decoder, GroupSpec, Runtime
from scripts._lib import commands, measure, shapes

_LENGTHS = flags.DEFINE_list("lengths", ["600", "8000"], "Tokens of context to compare.")
_N_LONG = flags.DEFINE_integer("n_long", 100_000, "Tokens of the long text.", lower_bound=4096)
_MODEL = flags.DEFINE_string("model", "gemma3-270m", "Known model; toy is one of random weights.")
_N_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each side.", lower_bound=1)


class Windows(nnx.Module):
    """A decoder whose every layer sees what its windowed layers see."""

    recurrent = None

    def __init__(self, decoder: Decoder):
        """Takes the weights of a decoder with one kind of window."""
        self.decoder = decoder
        groups: tuple[GroupSpec, ...] = decoder.groups  # pyright: ignore[reportAttributeAccessIssue]
        (near,) = (g for g in groups if g.mask.kind == "window")
        self.n_vocab: int = decoder.n_vocab  # pyright: ignore[reportAttributeAccessIssue]
        layers = tuple(sorted(i for g in groups for i in g.layers))
        self.groups = (
            GroupSpec(
                layers=layers,
                n_kv_heads=near.n_kv_heads,
                head_dim=near.head_dim,
                rope=near.rope,
                mask=near.mask,
                scale=near.scale,
            ),
        )

    def __call__(self, tokens: jax.Array, attend: Attend, out_ids: jax.Array) -> jax.Array:
        """The decoder's logits."""
        return self.decoder(tokens, attend, out_ids)  # pyright: ignore[reportCallIssue]


def main() -> None:
    decoder = shapes.decoder(_MODEL.value)
    decode(decoder)
    long_text(Windows(decoder))


def decode(decoder: Decoder) -> None:
    """Decode steps at each length; interleaved."""
    lengths = [int(n) for n in _LENGTHS.value]
    config = CacheConfig(n_ctx=max(lengths) + 256, type_k="f32", type_v="f32")
    runtimes = {"model": Runtime(decoder, config), "windows": Runtime(Windows(decoder), config)}
    samples = {(kind, n): [] for kind in runtimes for n in lengths}
    for _ in range(_N_ROUNDS.value):
        for (kind, n), found in samples.items():
            measure.fill(runtimes[kind], n)
            found += measure.steps(runtimes[kind], 20)
    figures: dict[str, object] = {
        f"{kind}_{n}_ms": measure.quartiles(x) for (kind, n), x in samples.items()
    }
    for kind in runtimes:
        last, first = (float(np.median(samples[kind, n])) for n in (lengths[-1], lengths[0]))
        figures[f"{kind}_{lengths[-1]}_over_{lengths[0]}"] = round(last / first, 3)
    for kind, runtime in runtimes.items():
        figures[f"{kind}_cache_bytes"] = runtime.stats().cache_bytes
    measure.emit("window_decode", **figures)


def long_text(model: Decoder) -> None:
    """A text of any length in the cells of one window; memory before and after most of it."""
    runtime = Runtime(model, CacheConfig(n_ctx=4096, type_k="f32", type_v="f32"))
    tokens = np.random.default_rng(0).integers(0, runtime.n_vocab, _N_LONG.value).tolist()
    runtime.append(tokens[:2048])
    first = _held(runtime)
    start = time.perf_counter()
    runtime.append(tokens[2048:])
    seconds = time.perf_counter() - start
    last = _held(runtime)
    measure.emit(
        "window_long",
        n_tokens=runtime.seq_pos_max() + 1,
        n_cells=len(runtime.cells.pos),
        n_compiles=runtime.programs.n_compiles,
        tokens_per_s=round((len(tokens) - 2048) / seconds, 1),
        **{name: [first[name], last[name]] for name in first},
    )


def _held(runtime: Runtime) -> dict[str, int]:
    """Bytes that are held now: of the cache, of all arrays, by the process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "cache_bytes": runtime.stats().cache_bytes,
        "live_array_bytes": sum(x.nbytes for x in jax.live_arrays()),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


if __name__ == "__main__":
    commands.run(main)
