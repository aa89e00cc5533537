"""LayerSkip: what a round costs beside the steps that it is made of, and how often an exit agrees.

    python -m scripts.bench.drafts.layer_skip --what speed --exit_layers 10 --n_drafts 4
    python -m scripts.bench.drafts.layer_skip --what agreement,exact --exit_layers 10,20,24

"speed": a model whose layers behind the exit are silenced, so that every draft stays: the speed of
the mechanism, not of a method, for no model was trained. Plain decoding and rounds in interleaved
runs, beside what the times of their steps promise, measured in the same run:
(d+1) t(1, L + head) / (d t(1, E + head) + t(1, E) + t(d+1, L - E + head)).
"agreement": drafts of the model as it is that stay. "exact": whether greedy text is that without
drafts; where it differs, the gap between the two best logits there. The default model is fetched.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from kvrt import CacheConfig, LayerSkip, Runtime, Sampling, Speculation
from kvrt.arrays import Array
from kvrt.program import sample, step
from kvrt.program.batch import Batch
from kvrt.program.programs import ModelKind, Program
from kvrt.program.step import Cache
from kvrt_models.load import load
from scripts._lib import commands, measure

_WHAT = flags.DEFINE_list("what", ["speed", "agreement", "exact"], "Of speed, agreement, exact.")
_EXITS = flags.DEFINE_list("exit_layers", ["10", "20"], "E: layers that draft.")
_N_DRAFTS = flags.DEFINE_list("n_drafts", ["4"], "d: drafts a round.")
_N_PREDICT = flags.DEFINE_integer("n_predict", 64, "Tokens of a text.", lower_bound=2)
_N_PROMPTS = flags.DEFINE_integer("n_prompts", 4, "agreement, exact: texts.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "speed: runs of each side.", lower_bound=1)

BEGINNINGS = (
    *("Once upon a time", "The capital of France", "def main():", "Dear Sir,", "In 1969"),
    *("Water boils at", "1, 2, 3,", "The quick brown fox", "To make bread", "My favourite book"),
    *("The cell is", "It was a dark night", "import numpy as np", "Roses are red", "Our company"),
    *("The war began", "A good friend", "Chapter 1", "She opened the door", "Winter came"),
)


def main() -> None:
    model = load("smollm2-135m", dtype="f32")
    exits, drafts = ([int(x) for x in f.value] for f in (_EXITS, _N_DRAFTS))
    if {"agreement", "exact"} & {*_WHAT.value}:
        runtime = _runtime(model.decoder)
        for e in exits:
            for d in drafts:
                measure.emit("layer_skip texts", e=e, d=d, **_texts(runtime, model.tokenizer, e, d))
    if "speed" in _WHAT.value:
        ids = model.tokenizer.encode(BEGINNINGS[0])
        for e in sorted(exits, reverse=True):
            # Layers are silenced for good, so the deepest exit comes first.
            _silence(model.decoder, e)
            for d in drafts:
                runtime = _runtime(model.decoder)
                measure.emit("layer_skip speed", e=e, d=d, **_speed(runtime, ids, e, d))


def _runtime(decoder: Any) -> Runtime:
    return Runtime(decoder, CacheConfig(n_ctx=512, type_k="f32", type_v="f32"))


def _spec(e: int, d: int) -> Speculation:
    return Speculation(drafter=LayerSkip(exit_layer=e), n_draft=d)


def _silence(decoder: Any, e: int) -> None:
    """Layers from e on add nothing to the stream; they are computed all the same."""
    for block in list(decoder.blocks)[e:]:
        for out in (block.out, block.ffn.down):
            out.weight[...] = jnp.zeros_like(out.weight[...])


def _timed(runtime: Runtime, ids: list[int], **asked: Any) -> float:
    """Seconds a token behind the first, without the prompt."""
    runtime.clear()
    np.asarray(runtime.prefill(ids))
    tokens = runtime.generate(_N_PREDICT.value + 1, **asked)
    next(tokens)
    start = time.perf_counter()
    n = sum(1 for _ in tokens)
    return (time.perf_counter() - start) / n


def _speed(runtime: Runtime, ids: list[int], e: int, d: int) -> dict[str, Any]:
    n_layers = sum(len(g.all_layers) for g in runtime.programs.spec.layout.groups)
    sides: dict[str, dict] = {"plain": {}, "drafts": {"speculation": _spec(e, d)}}
    steps = {
        "all": _part(runtime, 1, (0, n_layers), head=True),
        "draft": _part(runtime, 1, (0, e), head=True),
        "last": _part(runtime, 1, (0, e), head=False),
        "verify": _part(runtime, d + 1, (e, n_layers), head=True),
    }
    for asked in sides.values():
        _timed(runtime, ids, **asked)
    before, samples = runtime.stats(), {name: [] for name in (*sides, *steps)}
    for _ in range(_ROUNDS.value):
        for name, asked in sides.items():
            samples[name].append(_timed(runtime, ids, **asked))
            for part, run in steps.items():
                samples[part] += measure.clock(run, 10)
    after = runtime.stats()
    t = {name: float(np.median(x)) for name, x in samples.items()}
    promised = (d + 1) * t["all"] / (d * t["draft"] + t["last"] + t["verify"])
    speed = t["plain"] / t["drafts"]
    return {
        "accepted": (after.n_accepted - before.n_accepted) / (after.n_drafted - before.n_drafted),
        "tokens_s": {name: round(1 / t[name], 1) for name in sides},
        "steps_ms": {name: round(1e3 * t[name], 2) for name in steps},
        "speed": round(speed, 3),
        "promised": round(promised, 3),
        "of_promised": round(speed / promised, 3),
    }


def _part(
    runtime: Runtime, n: int, layers: tuple[int, int], *, head: bool
) -> Callable[[], jax.Array]:
    """A step of n tokens through some layers, whose slots are nowhere, over what is cached."""
    device = runtime._cache.device
    batch = device.empty_round(n, (), sample.create(Sampling(), [[]])).batch
    programs, size = device.programs, device.spec.config.block_size
    # As many blocks as the text of the other sides fills.
    n_blocks = np.asarray(-(-_N_PREDICT.value // size), np.int32)
    batch = dataclasses.replace(
        batch,
        pos=np.arange(n, dtype=np.int32) + _N_PREDICT.value,
        seq_ids=np.zeros(n, np.int32),
        places=tuple(dataclasses.replace(p, n_blocks=n_blocks) for p in batch.places),
        out_ids=np.arange(n, dtype=np.int32),
    )

    def once() -> jax.Array:
        args = programs.params, device.cache, batch
        program = Program(_through, (programs.kind, (*layers, head)), args, donate=(1,), n_known=2)
        found, device.cache = programs.run(program)
        return found

    once()
    return once


def _through(
    kind: ModelKind, part: tuple[int, int, bool], params: tuple, cache: Cache, batch: Batch
) -> tuple[Array, Cache]:
    """A step through layers [first, last), and then the head if that is the third of `part`."""
    decoder, (first, last, head) = kind.in_parts(params), part

    def run(tokens: Array, attend: Any) -> Array:
        x = decoder.layers(decoder.embed(tokens), attend, first, last)
        return decoder.head(x).argmax(1).astype(jnp.float32) if head else x

    return step.step(run, cache, batch, kind.spec)


def _texts(runtime: Runtime, tokenizer: Any, e: int, d: int) -> dict[str, Any]:
    """Drafts that stay, and where text with drafts differs from that without, and by how much."""
    differ, before = [], runtime.stats()
    for words in BEGINNINGS[: _N_PROMPTS.value]:
        ids, texts = tokenizer.encode(words), []
        for spec in (None, _spec(e, d)):
            runtime.clear()
            runtime.prefill(ids)
            asked = {"n_best": 2, "speculation": spec}
            texts.append(list(runtime.generate(_N_PREDICT.value, **asked)))
        both = enumerate(zip(*texts, strict=True))
        at = next((i for i, (a, b) in both if a.id != b.id), None)
        if at is not None:
            (_, first), (_, second) = texts[0][at].best
            differ.append({"prompt": words[:20], "at": at, "gap": first - second})
    stats = runtime.stats()
    n = {x: getattr(stats, x) - getattr(before, x) for x in ("n_rounds", "n_drafted", "n_accepted")}
    return {"differ": differ, **n, "tokens_a_round": round(1 + n["n_accepted"] / n["n_rounds"], 3)}


if __name__ == "__main__":
    commands.run(main)
