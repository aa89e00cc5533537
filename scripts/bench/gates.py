"""Weights of eight bits beside llama.cpp's, in interleaved runs: one row of the gates a command.

    python -m scripts.bench.gates --row decode
    python -m scripts.bench.gates --row long --rounds 2
    python -m scripts.bench.gates --row prefill-int8 --rounds 2
    python -m scripts.bench.gates --row prefill-int8 --prompt 512
    python -m scripts.bench.gates --row server-int8 --rounds 3

A side is kvrt or llama.cpp with a type of the weights, one of the cache, and "+fa" for llama.cpp's
flash attention: "llama.cpp:q8_0/f16+fa"; "file" is the fetched file as it is. Each round runs all
sides of a row once, and a gate is the ratio of medians; where it names several peers it is against
the fastest. llama.cpp's files are made once of the very float32 tensors that kvrt reads (1 GB).
--sides leaves some out.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from kvrt import CacheConfig, Decoder, Engine, Request, Runtime
from kvrt_models.load import load
from scripts._lib import measure, peer

_N_DECODE, _N_STEPS, _N_LONG, _N_SLOTS = 128, 64, 4000, 16
_ROUND_CELLS = 256  # of each slot, and what a long context has beside its prompt

Samples = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Side:
    """One of those that are compared; `name` as in the module's docstring."""

    name: str

    @property
    def ours(self) -> bool:
        """Whether it is kvrt."""
        return self.name.startswith("kvrt:")

    @property
    def types(self) -> tuple[str, str]:
        """Of weights and of the cache."""
        weights, _, cache = self.name.partition(":")[2].removesuffix("+fa").partition("/")
        return weights, cache

    def setting(self, n_ctx: int, n_slots: int = 1) -> peer.Setting:
        """Of llama.cpp."""
        weights, cache = self.types
        path: Path = peer.model_file(_MODEL.value, weights)
        flash = self.name.endswith("+fa")
        sizes = {"n_ctx": n_ctx, "n_slots": n_slots, "n_threads": _N_THREADS.value}
        return peer.Setting(path=path, flash=flash, cache=cache, **sizes)

    def config(self, n_ctx: int, **more: Any) -> CacheConfig:
        """Of kvrt."""
        kind: Any = self.types[1]
        return CacheConfig(n_ctx=n_ctx, type_k=kind, type_v=kind, **more)


@dataclasses.dataclass(frozen=True)
class Gate:
    """What is wanted: the first of the sides so many times as fast as the fastest of the others."""

    what: str
    ours: str
    others: tuple[str, ...]
    aim: float


@dataclasses.dataclass(frozen=True)
class Row:
    """What is timed, and what is wanted of it.

    Attributes:
      run: adds the samples of a round, in seconds, for each side.
      gates: with the sides that they compare.
    """

    run: Callable[[Sequence[Side], int, Samples], None]
    gates: tuple[Gate, ...]

    @property
    def sides(self) -> list[str]:
        """Sides of all gates, each once."""
        return list(dict.fromkeys(name for g in self.gates for name in (g.ours, *g.others)))


@functools.cache
def _decoder(weights: str) -> Decoder:
    dtype: Any = weights
    return load(_MODEL.value, dtype=dtype).decoder


@functools.cache
def _runtime(side: Side, n_ctx: int) -> Runtime:
    return Runtime(_decoder(side.types[0]), side.config(n_ctx))


def _prompt(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, 10_000, n).tolist()


def decode(sides: Sequence[Side], i: int, samples: Samples, n_tokens: int = _N_DECODE) -> None:
    """Steps of one sequence behind n_tokens."""
    n_ctx = n_tokens + _ROUND_CELLS
    for side in sides:
        if not side.ours:
            request = _prompt(n_tokens, 0), _N_STEPS
            (found,) = peer.time(side.setting(n_ctx), [request])
            samples[side.name].append(found.decode_s)
            continue
        at = _runtime(side, n_ctx)
        measure.fill(at, n_tokens)
        samples[side.name] += measure.steps(at, _N_STEPS)


def long_decode(sides: Sequence[Side], i: int, samples: Samples) -> None:
    """The same behind a long text."""
    decode(sides, i, samples, _N_LONG)


def prefill(sides: Sequence[Side], i: int, samples: Samples) -> None:
    """A long prompt, to its first token."""
    n = _N_PROMPT.value
    tokens = _prompt(n, i)
    for side in sides:
        if not side.ours:
            (found,) = peer.time(side.setting(n + _ROUND_CELLS), [(tokens, 1)])
            samples[side.name].append(found.prefill_s)
            continue
        at = _runtime(side, n + _ROUND_CELLS)
        if i == 0:
            measure.clock(lambda at=at: at.prefill(tokens), 1)  # compiles; waited for
        at.clear()
        samples[side.name] += measure.clock(lambda at=at: at.prefill(tokens), 1)


def together(sides: Sequence[Side], i: int, samples: Samples) -> None:
    """Requests of 128 and 64 tokens at once; the time of all."""
    requests = [(_prompt(_N_DECODE, 100 * i + j), _N_STEPS) for j in range(_N_SLOTS)]
    for side in sides:
        if side.ours:
            engine = _engine(side)
            if i == 0:  # compiles
                _serve(engine, [(_prompt(_N_DECODE, 10_000 + j), 4) for j in range(_N_SLOTS)])
            samples[side.name].append(_serve(engine, requests))
        else:
            setting = side.setting(_N_SLOTS * _ROUND_CELLS, _N_SLOTS)
            samples[side.name].append(peer.together(setting, requests))


@functools.cache
def _engine(side: Side) -> Engine:
    more = {"n_seq_max": _N_SLOTS, "block_size": 16}
    return Engine(_decoder(side.types[0]), side.config(_N_SLOTS * _ROUND_CELLS, **more))


def _serve(engine: Engine, requests: Sequence[peer.Prompt]) -> float:
    start = time.perf_counter()
    for i, (tokens, n_predict) in enumerate(requests):
        engine.add_request(Request(id=str(i), tokens=tuple(tokens), n_predict=n_predict))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def _settings(weights: str, caches: Sequence[str] = ("f32",)) -> tuple[str, ...]:
    """llama.cpp's sides of a type of weights, with flash attention and without."""
    return tuple(f"llama.cpp:{weights}/{cache}{fa}" for cache in caches for fa in ("", "+fa"))


_BOTH = ("f16", "f32")
ROWS: Mapping[str, Row] = {
    "decode": Row(
        decode,
        (
            Gate("int8 against our f32", "kvrt:int8/f32", ("kvrt:f32/f32",), 2.0),
            Gate("int8 against Q8_0", "kvrt:int8/f32", _settings("q8_0"), 0.85),
            Gate("int8 against the file as it is", "kvrt:int8/f32", _settings("file"), 0.9),
            Gate("f32 against F32", "kvrt:f32/f32", _settings("f32"), 0.95),
        ),
    ),
    "long": Row(
        long_decode,
        (
            Gate(
                "4,000 tokens of context, int8 weights and cache against Q8_0 and q8_0",
                "kvrt:int8/int8",
                ("llama.cpp:q8_0/q8_0+fa",),
                1.0,
            ),
        ),
    ),
    "prefill-int8": Row(
        prefill,
        (Gate("int8 against Q8_0", "kvrt:int8/f32", _settings("q8_0", _BOTH), 2.2),),
    ),
    "prefill-f32": Row(
        prefill, (Gate("f32 against F32", "kvrt:f32/f32", _settings("f32", _BOTH), 2.0),)
    ),
    "decode-bf16": Row(
        decode, (Gate("bf16 against BF16", "kvrt:bf16/f32", _settings("bf16"), 0.75),)
    ),
    "prefill-bf16": Row(
        prefill, (Gate("bf16 against BF16", "kvrt:bf16/f32", _settings("bf16", _BOTH), 1.6),)
    ),
    **{
        f"server-{ours}": Row(
            together,
            (Gate(f"16 requests, {ours}", f"kvrt:{ours}/f32", _settings(theirs), aim),),
        )
        for ours, theirs, aim in (("f32", "f32", 2.0), ("bf16", "bf16", 2.0), ("int8", "q8_0", 1.4))
    },
}

_ROW = flags.DEFINE_enum("row", "decode", list(ROWS), "What is timed.")
_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name.")
_SIDES = flags.DEFINE_list("sides", [], "Only these of the row; none is all.")
_N_ROUNDS = flags.DEFINE_integer("rounds", 5, "Runs of each side.", lower_bound=1)
_N_PROMPT = flags.DEFINE_integer(
    "prompt", _N_LONG, "Tokens of a prompt in the rows of prefill.", lower_bound=1
)
_N_THREADS = flags.DEFINE_integer("threads", 2, "llama.cpp's threads.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    row = ROWS[_ROW.value]
    if strange := sorted(set(_SIDES.value) - set(row.sides)):
        raise app.UsageError(f"--sides={','.join(strange)}; of {', '.join(row.sides)}")
    names = [name for name in row.sides if name in (_SIDES.value or row.sides)]
    samples: Samples = {name: [] for name in names}
    for i in range(_N_ROUNDS.value):
        # Nobody is always the one after another.
        order = names[i % len(names) :] + names[: i % len(names)]
        row.run([Side(name) for name in order], i, samples)
    for name, seconds in samples.items():
        lines = {"row": _ROW.value, "side": name, "ms": measure.quartiles(seconds)}
        measure.emit("gates", **lines, n_samples=len(seconds), rounds=_N_ROUNDS.value)
    for gate in row.gates:
        _judge(gate, samples)


def _judge(gate: Gate, samples: Samples) -> None:
    """A line of a table, where the gate's sides were timed."""
    others = {name: float(np.median(samples[name])) for name in gate.others if name in samples}
    if gate.ours not in samples or not others:
        return
    best = min(others, key=others.__getitem__)
    ratio = others[best] / float(np.median(samples[gate.ours]))
    figures = {"aim": gate.aim, "reached": round(ratio, 3), "against": best}
    measure.emit("gate", row=_ROW.value, what=gate.what, **figures)
    print(f"| {_ROW.value}: {gate.what} | {gate.aim} | {ratio:.2f}, against {best} |", flush=True)


if __name__ == "__main__":
    app.run(main)
