"""What SelfExtend costs beside plain attention at equal context: decode, and a step of a prompt.

Run it with `python -m scripts.bench.extend`. All runtimes hold the same tokens; runs are
interleaved.
"""

import numpy as np
from absl import flags

from kvrt import CacheConfig, Runtime, SelfExtend
from kvrt_models.load import load
from scripts._lib import commands, measure

_N_KV = flags.DEFINE_integer("n_kv", 4000, "Tokens of context.", lower_bound=1)
_N_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each side.", lower_bound=1)
_GA_N, _GA_W = 4, 1024

KINDS = {
    "write": CacheConfig(n_ctx=8192, type_k="f32", type_v="f32"),
    "read": CacheConfig(n_ctx=8192, rope="read", type_k="f32", type_v="f32"),
    "cache": CacheConfig(
        n_ctx=8192, self_extend=SelfExtend(ga_n=_GA_N, ga_w=_GA_W), type_k="f32", type_v="f32"
    ),
    "paper": CacheConfig(
        n_ctx=8192,
        rope="read",
        self_extend=SelfExtend(ga_n=_GA_N, ga_w=_GA_W, kind="paper"),
        type_k="f32",
        type_v="f32",
    ),
}


def main() -> None:
    decoder = load("smollm2-135m", dtype="f32").decoder
    runtimes = {kind: Runtime(decoder, config) for kind, config in KINDS.items()}
    decode: dict[str, list[float]] = {kind: [] for kind in KINDS}
    prompt: dict[str, list[float]] = {kind: [] for kind in KINDS}
    part = np.random.default_rng(0).integers(100, 10000, 512).tolist()
    for _ in range(_N_ROUNDS.value):
        for kind, runtime in runtimes.items():
            measure.fill(runtime, _N_KV.value)
            decode[kind] += measure.steps(runtime, 20)
            prompt[kind] += measure.clock(lambda r=runtime: r.append(part), 2)
    figures: dict[str, object] = {
        f"{kind}_decode_ms": measure.quartiles(x) for kind, x in decode.items()
    }
    figures |= {f"{kind}_prompt_512_ms": measure.quartiles(x) for kind, x in prompt.items()}
    for kind in ("cache", "paper"):
        for name, samples in (("decode", decode), ("prompt_512", prompt)):
            for plain in ("write", "read"):
                ratio = float(np.median(samples[kind]) / np.median(samples[plain]))
                figures[f"{kind}_over_{plain}_{name}"] = round(ratio, 3)
    measure.emit("self_extend", n_kv=_N_KV.value, ga_n=_GA_N, ga_w=_GA_W, **figures)


if __name__ == "__main__":
    commands.run(main)
