"""Speculative decoding beside plain decoding: whether the text is the same, and how fast it comes.

    python -m scripts.bench.drafts --what speed --rounds 3
    python -m scripts.bench.drafts --what exact --n_prompts 20 --n_predict 128
    python -m scripts.bench.drafts --what engine --n_seqs 4 --n_predict 64 --n_draft 7
    python -m scripts.bench.drafts --what skip,exact --exit_layers 10,20,24 --n_draft 4

    speed   a prompt that asks for its own text again ("repeats"), and one sampled so hot that next
            to nothing repeats itself ("no match"): plain steps, --stride steps a program and drafts
            by prompt lookup, in interleaved runs, with tokens a round
    engine  the same of --n_seqs requests at once in an engine with drafts and in one without,
            prompts included, which are hits from the second run on
    exact   greedy text of many beginnings with and without drafts; where two differ, the gap
            between the two best logits there; drafts of LayerSkip where --exit_layers are named
    kl      how far logits of a round's tokens are from those of single steps, over these texts
    skip    LayerSkip in a model whose layers behind the exit E are silenced, so that each of d
            drafts stays: the speed of the mechanism, not of a method, for no model was trained.
            Beside what the times of its steps, measured in the same rounds, promise:
            (d+1) t(1, L + head) / (d t(1, E + head) + t(1, E) + t(d+1, L - E + head))

The model is fetched.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from kvrt import (
    CacheConfig,
    Engine,
    EngineConfig,
    LayerSkip,
    PromptLookup,
    Request,
    Runtime,
    Sampling,
    Speculation,
)
from kvrt.arrays import Array
from kvrt.program import sample, step
from kvrt.program.batch import Batch
from kvrt.program.programs import ModelKind, Program
from kvrt.program.step import Cache
from kvrt_models.load import Model, load
from scripts._lib import commands, measure, rounds
from scripts._lib.rounds import Side, timed
from scripts.experiments import divergence

_KINDS = ["speed", "engine", "exact", "kl", "skip"]
_WHAT = flags.DEFINE_list("what", ["speed", "exact"], f"Of {', '.join(_KINDS)}.")
_MODEL = flags.DEFINE_string("model", "smollm2-135m", "A model's name, or its file.")
_DTYPE = flags.DEFINE_enum("dtype", "f32", ["f32", "bf16", "f16", "int8"], "Of the weights.")
_N_DRAFT = flags.DEFINE_integer("n_draft", 8, "Drafts a round.", lower_bound=1)
_N_PREDICT = flags.DEFINE_integer("n_predict", 128, "Tokens of a text.", lower_bound=2)
_N_PROMPTS = flags.DEFINE_integer("n_prompts", 20, "exact, kl: texts.", lower_bound=1)
_EXITS = flags.DEFINE_list("exit_layers", [], "E of skip and exact: layers that draft.")
_STRIDE = flags.DEFINE_integer("stride", 8, "speed: steps a program.", lower_bound=1)
_MODE = flags.DEFINE_enum("mode", "paged", ["paged", "cell"], "engine: blocks, or cells.")
_N_SEQS = flags.DEFINE_integer("n_seqs", 4, "engine: requests at once.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of each side.", lower_bound=1)

NEWS = (
    "The committee met on Tuesday to discuss the budget. Mr. Hale asked whether the bridge over "
    "the river could be repaired before winter, and Mrs. Ortiz said that the stones had been "
    "ordered in May. After a long silence the mayor read the letter from the county aloud, and it "
    "was agreed to write again. "
)
REPEATS = "Copy this text word by word, again and again.\n\n" + NEWS * 3
BEGINNINGS = (
    *("Once upon a time", "The capital of France", "def main():", "Dear Sir,", "In 1969"),
    *("Water boils at", "1, 2, 3,", "The quick brown fox", "To make bread", "My favourite book"),
    *("The cell is", "It was a dark night", "import numpy as np", "Roses are red", "Our company"),
    *("The war began", "A good friend", "Chapter 1", "She opened the door", NEWS * 2),
)
TEXTS = {"repeats": Sampling(temp=0.0, seed=1), "no match": Sampling(temp=2.0, seed=1)}
_COUNTS = ("n_rounds", "n_drafted", "n_accepted")

Line = dict[str, Any]


def main() -> None:
    commands.check_names(_WHAT, _KINDS)
    dtype: Any = _DTYPE.value  # flags know no literal types
    model = load(_MODEL.value, dtype=dtype)
    kinds = {"speed": speed, "engine": in_engine, "exact": exact, "kl": divergences, "skip": skip}
    for what in sorted(_WHAT.value, key=lambda x: x == "skip"):  # which silences layers for good
        for line in kinds[what](model):
            measure.emit(f"drafts {what}", model=_MODEL.value, dtype=dtype, **line)


def _runtime(model: Model) -> Runtime:
    return Runtime(model.decoder, CacheConfig(n_ctx=2048, type_k="f32", type_v="f32"))


def _lookup() -> Speculation:
    return Speculation(drafter=PromptLookup(), n_draft=_N_DRAFT.value)


def _text(runtime: Runtime, ids: list[int], **how: Any) -> tuple[list[int], float]:
    """The text behind a prompt, and its seconds without the prompt's."""
    runtime.clear()
    np.asarray(runtime.prefill(ids))
    start = time.perf_counter()
    found = [token.id for token in runtime.generate(_N_PREDICT.value, **how)]
    return found, time.perf_counter() - start


def _counts(runtime: Runtime, before: Any) -> Line:
    """Rounds and drafts since some stats were taken."""
    now = runtime.stats()
    n = {x: getattr(now, x) - getattr(before, x) for x in _COUNTS}
    per_round = (n["n_accepted"] + n["n_rounds"]) / n["n_rounds"] if n["n_rounds"] else None
    return n | {"tokens_a_round": per_round and round(per_round, 3)}


def speed(model: Model) -> Iterator[Line]:
    """One sequence of a runtime."""
    runtime = _runtime(model)
    sides = {"plain": {}, "stride": {"stride": _STRIDE.value}, "drafts": {"speculation": _lookup()}}
    for name, sampling in TEXTS.items():
        ids = model.tokenizer.encode(REPEATS if name == "repeats" else BEGINNINGS[0])
        before = runtime.stats()
        texts = {x: _text(runtime, ids, sampling=sampling, **how)[0] for x, how in sides.items()}
        counts = _counts(runtime, before)

        def run(how: Line, ids: list[int] = ids, sampling: Sampling = sampling) -> Side:
            return lambda: [_text(runtime, ids, sampling=sampling, **how)[1]]

        times = rounds.interleaved({x: run(how) for x, how in sides.items()}, _ROUNDS.value)
        same = texts["plain"] == texts["drafts"]
        yield {"text": name, "same_text": same, **counts, **_speeds(times, _N_PREDICT.value)}


def _speeds(times: rounds.Times, n_tokens: int) -> Line:
    return {
        "tokens_s": {x: round(n_tokens / times.median(x), 1) for x in times},
        "times_plain": {x: times.over("plain", x) for x in times},
    }


def in_engine(model: Model) -> Iterator[Line]:
    """Requests at once."""
    n, mode = _N_SEQS.value, _MODE.value
    sizes: Any = {"n_ctx": 1024 * n, "n_seq_max": n, "block_size": 16, "n_ubatch": 256}
    config = CacheConfig(**sizes, type_k="f32", type_v="f32")
    engines: dict[str, Engine] = {}
    for name, spec in (("plain", None), ("drafts", _lookup())):
        options: Any = {"mode": mode, "speculation": spec}
        engines[name] = Engine(model.decoder, config, EngineConfig(**options))
    for name, sampling in TEXTS.items():
        words = [f"{x}\n\n{REPEATS}" if name == "repeats" else x for x in BEGINNINGS[:n]]
        prompts = [tuple(model.tokenizer.encode(x)) for x in words]
        texts = {x: _served(engine, prompts, sampling) for x, engine in engines.items()}
        before = dict(engines["drafts"].stats().drafts)
        sides = {
            x: timed(lambda e=e, p=prompts, s=sampling: _served(e, p, s))
            for x, e in engines.items()
        }
        times = rounds.interleaved(sides, _ROUNDS.value, n_warm=0)
        after = engines["drafts"].stats().drafts
        counts = {f"n_{x}": (after[x] - before[x]) // _ROUNDS.value for x in after}
        same = {"mode": mode, "n_seqs": n, "same_text": texts["plain"] == texts["drafts"]}
        yield {"text": name, **same, **counts, **_speeds(times, n * _N_PREDICT.value)}


def _served(engine: Engine, prompts: list[tuple[int, ...]], sampling: Sampling) -> Line:
    """The texts behind some prompts."""
    for i, tokens in enumerate(prompts):
        n = _N_PREDICT.value
        engine.add_request(Request(id=str(i), tokens=tokens, n_predict=n, sampling=sampling))
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_work:
        for out in engine.step():
            found[out.id] += out.tokens
    return found


def exact(model: Model) -> Iterator[Line]:
    """Where text with drafts differs from that without."""
    runtime = _runtime(model)
    skips = {int(e): LayerSkip(exit_layer=int(e)) for e in _EXITS.value}
    specs = {e: Speculation(drafter=x, n_draft=_N_DRAFT.value) for e, x in skips.items()}
    for e, spec in (specs or {None: _lookup()}).items():
        for words in BEGINNINGS[: _N_PROMPTS.value]:
            ids = model.tokenizer.encode(words)
            runtime.clear()
            runtime.prefill(ids)
            plain = list(runtime.generate(_N_PREDICT.value, n_best=2))
            before = runtime.stats()
            drafted, _ = _text(runtime, ids, speculation=spec)
            at = next((i for i, t in enumerate(plain) if t.id != drafted[i]), None)
            gap = None if at is None else plain[at].best[0][1] - plain[at].best[1][1]
            line: Line = {"prompt": words[:30], "same": at is None, "differs_at": at, "gap": gap}
            yield line | ({} if e is None else {"exit_layer": e}) | _counts(runtime, before)


def divergences(model: Model) -> Iterator[Line]:
    """Steps of as many tokens as a round has, beside single ones, both of the plain text."""
    runtime = _runtime(model)
    for words in BEGINNINGS[: _N_PROMPTS.value]:
        ids = model.tokenizer.encode(words)
        text, _ = _text(runtime, ids)
        single, many = (_log_probs(runtime, ids, text, n) for n in (1, 1 + _N_DRAFT.value))
        kl = divergence.kl(single, many)
        other = int((single.argmax(axis=1) != many.argmax(axis=1)).sum())
        figures = {"kl": float(kl.mean()), "greatest_kl": float(kl.max()), "n_other_best": other}
        yield {"prompt": words[:30], **figures}


def _log_probs(runtime: Runtime, ids: list[int], text: list[int], n: int) -> np.ndarray:
    """Those of what follows each token of a text behind a prompt, n tokens a step."""
    runtime.clear()
    runtime.prefill(ids)
    parts = [text[i : i + n] for i in range(0, len(text), n)]
    logits = [np.asarray(runtime.append(x, out_ids=range(len(x)))) for x in parts]
    return divergence.log_probs(np.concatenate(logits))


# --- LayerSkip ------------------------------------------------------------------------------------


def skip(model: Model) -> Iterator[Line]:
    """A round beside the steps that it is made of, the deepest exit first."""
    ids, d = model.tokenizer.encode(BEGINNINGS[0]), _N_DRAFT.value
    for e in sorted(map(int, _EXITS.value or ("10", "20")), reverse=True):
        decoder: Any = model.decoder
        for block in list(decoder.blocks)[e:]:
            # They add nothing to the stream, and are computed all the same.
            for out in (block.out, block.ffn.down):
                out.weight[...] = jnp.zeros_like(out.weight[...])
        runtime = _runtime(model)
        n_layers = sum(len(g.all_layers) for g in runtime.programs.spec.layout.groups)
        spec = Speculation(drafter=LayerSkip(exit_layer=e), n_draft=d)
        parts = {
            "all": _part(runtime, 1, (0, n_layers), head=True),
            "draft": _part(runtime, 1, (0, e), head=True),
            "last": _part(runtime, 1, (0, e), head=False),
            "verify": _part(runtime, d + 1, (e, n_layers), head=True),
        }
        before = runtime.stats()
        sides: dict[str, Side] = {
            "plain": lambda r=runtime: [_text(r, ids)[1] / _N_PREDICT.value],
            "drafts": lambda r=runtime, s=spec: [
                _text(r, ids, speculation=s)[1] / _N_PREDICT.value
            ],
        }
        sides |= {name: timed(run, 10) for name, run in parts.items()}
        times = rounds.interleaved(sides, _ROUNDS.value)
        n, t = _counts(runtime, before), times.median
        promised = (d + 1) * t("all") / (d * t("draft") + t("last") + t("verify"))
        yield {
            **{"exit_layer": e, "n_draft": d, "accepted": n["n_accepted"] / n["n_drafted"]},
            "tokens_s": {x: round(1 / t(x), 1) for x in ("plain", "drafts")},
            "steps_ms": {x: round(1e3 * t(x), 2) for x in parts},
            "speed": times.over("plain", "drafts"),
            "promised": round(promised, 3),
            "of_promised": round(times.over("plain", "drafts") / promised, 3),
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


if __name__ == "__main__":
    commands.run(main)
