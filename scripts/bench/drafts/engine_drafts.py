"""An engine with drafts beside one without: the same texts, and how fast they come.

    python -m scripts.bench.drafts.engine_drafts --n_seqs 4 --runs 3

"repeats": prompts that ask for their own text again; "no match": sampled so hot that next to
nothing repeats itself. Both engines serve the same requests in interleaved runs, prompts included,
which are hits from the second run on. The default model is fetched.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from kvrt import CacheConfig, Engine, EngineConfig, PromptLookup, Request, Sampling, Speculation
from kvrt_models.load import load
from scripts._lib import commands, measure
from scripts.bench.drafts.speculation import BEGINNINGS, REPEATS

_MODE = flags.DEFINE_enum("mode", "paged", ["paged", "cell"], "Blocks, or cells.")
_WEIGHTS = flags.DEFINE_enum("weights", "f32", ["f32", "bf16", "f16", "int8"], "Their dtype.")
_N_SEQS = flags.DEFINE_integer("n_seqs", 4, "Requests at once.", lower_bound=1)
_N_DRAFTS = flags.DEFINE_integer("n_drafts", 7, "Drafts a round.", lower_bound=1)
_N_TOKENS = flags.DEFINE_integer("n_tokens", 64, "Tokens of a text.", lower_bound=2)
_RUNS = flags.DEFINE_integer("runs", 3, "Runs of each engine.", lower_bound=1)


def main() -> None:
    dtype: Any = _WEIGHTS.value  # flags know no literal types
    model = load("smollm2-135m", dtype=dtype)
    spec = Speculation(drafter=PromptLookup(), n_draft=_N_DRAFTS.value)
    n = _N_SEQS.value
    config = CacheConfig(
        n_ctx=1024 * n, n_seq_max=n, block_size=16, n_ubatch=256, type_k="f32", type_v="f32"
    )
    mode: Any = _MODE.value
    sides = {"plain": None, "drafts": spec}
    engines = {
        name: Engine(model.decoder, config, EngineConfig(mode=mode, speculation=x))
        for name, x in sides.items()
    }
    for text, temp in (("repeats", 0.0), ("no match", 2.0)):
        words = BEGINNINGS[: _N_SEQS.value]
        if text == "repeats":
            words = [f"{x}\n\n{REPEATS}" for x in words]
        prompts = [tuple(model.tokenizer.encode(x)) for x in words]
        line = _speed(engines, prompts, Sampling(temp=temp, seed=1))
        measure.emit("engine drafts", text=text, mode=_MODE.value, dtype=dtype, **line)


def _speed(
    engines: dict[str, Engine], prompts: Sequence[tuple[int, ...]], sampling: Sampling
) -> dict[str, Any]:
    texts = {name: _timed(engine, prompts, sampling)[0] for name, engine in engines.items()}
    before = dict(engines["drafts"].stats().drafts)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(_RUNS.value):
        for name, engine in engines.items():
            seconds[name].append(_timed(engine, prompts, sampling)[1])
    after = engines["drafts"].stats().drafts
    n = {x: (after[x] - before[x]) // _RUNS.value for x in after}
    medians = {name: float(np.median(x)) for name, x in seconds.items()}
    n_tokens = len(prompts) * _N_TOKENS.value
    return {
        "n_seqs": len(prompts),
        "same_text": texts["plain"] == texts["drafts"],
        **{f"n_{name}": x for name, x in n.items()},
        "tokens_s": {name: round(n_tokens / x, 1) for name, x in medians.items()},
        "times_plain": round(medians["plain"] / medians["drafts"], 3),
    }


def _timed(
    engine: Engine, prompts: Sequence[tuple[int, ...]], sampling: Sampling
) -> tuple[dict[str, list[int]], float]:
    """The texts behind some prompts, and seconds of all of it."""
    for i, tokens in enumerate(prompts):
        engine.add_request(
            Request(id=str(i), tokens=tokens, n_predict=_N_TOKENS.value, sampling=sampling)
        )
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    start = time.perf_counter()
    while engine.has_work:
        for out in engine.step():
            found[out.id] += out.tokens
    return found, time.perf_counter() - start


if __name__ == "__main__":
    commands.run(main)
