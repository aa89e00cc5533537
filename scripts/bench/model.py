"""A real model with settings that are compared, in interleaved runs: one row a command.

    python -m scripts.bench.model --row contexts
    python -m scripts.bench.model --row by_layer --weights int8,f32
    python -m scripts.bench.model --row windows --model toy --lengths 100,400 --n_long 4096

    contexts  decode behind 250 and behind 8,000 tokens in 8,192 cells
    cells     decode behind 250 tokens in 512 and in 32,768 cells
    windows   Gemma 3's decode behind 600 and 8,000 tokens, beside "near", the same model with a
              window in every layer, without what grows with full attention; then a text of --n_long
              tokens in one window's cells, and what is held before and after most of it
    extend    decode, and 512 tokens of a prompt, behind 4,000, by both kinds of SelfExtend, the
              paper's over keys that are stored rotated too
    by_layer  programs by layer beside whole ones: decode, a prefill of 512, 16 requests at once;
              rounds in which other processes took more than 4 % of the time are left out
    blend     the first token of a blend of four chunks in memory, beside a prefill of the text

Weights are --weights (by_layer: each of them), the cache f32, of by_layer the default. A line has
the quartiles of each side in milliseconds, and ratios of medians. The models are fetched.
"""

import dataclasses
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from flax import nnx

from kvrt import Attend, BlendSpec, CacheConfig, Decoder, Engine, GroupSpec, Request, Runtime
from kvrt import SelfExtend as Extend
from kvrt_models.load import load
from scripts._lib import commands, measure, rounds, shapes
from scripts._lib.rounds import Side, timed

_MODEL = flags.DEFINE_string("model", None, "Known name; toy is one of random weights.")
_WEIGHTS = flags.DEFINE_list("weights", ["f32"], "Of f32, bf16, f16, int8.")
_N_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each side.", lower_bound=1)
_N_STEPS = flags.DEFINE_integer("steps", 20, "Decode steps of a run.", lower_bound=1)
_LENGTHS = flags.DEFINE_list("lengths", [], "Tokens of context; the row's own where none is named.")
_N_LONG = flags.DEFINE_integer("n_long", 100_000, "windows: the long text.", lower_bound=4096)
_N_TOKENS = flags.DEFINE_integer("n_tokens", 2000, "blend: tokens of all chunks.", lower_bound=8)
_RATIOS = flags.DEFINE_list("ratios", ["0.15"], "blend: of the chunks' tokens.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """Sides, and of which of them ratios are wanted.

    Attributes:
      sides: by name.
      over: pairs of sides.
      about: what else the line says.
      how: arguments of `rounds.interleaved`.
    """

    sides: Mapping[str, Side]
    over: list[tuple[str, str]]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    how: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def main() -> None:
    for of in ROWS[_ROW.value]():
        times = rounds.interleaved(of.sides, _N_ROUNDS.value, **of.how)
        ratios = {f"{a}_over_{b}": times.over(a, b) for a, b in of.over if times[a]}
        left_out = {"n_rounds_left_out": times.n_left_out} if times.n_left_out else {}
        measure.emit(_ROW.value, **of.about, **times.figures(), **ratios, **left_out)
    if _ROW.value == "windows":
        measure.emit("window_long", **long_text(Near(_decoder("gemma3-270m"))))


def _decoder(name: str = "smollm2-135m", weights: str | None = None) -> Decoder:
    name = _MODEL.value or name
    dtype: Any = weights or _WEIGHTS.value[0]  # flags know no literal types
    return shapes.decoder(name) if name == "toy" else load(name, dtype=dtype).decoder


def _config(n_ctx: int, **more: Any) -> CacheConfig:
    return CacheConfig(n_ctx=n_ctx, **{"type_k": "f32", "type_v": "f32", **more})


def _lengths(*usual: int) -> list[int]:
    return [int(n) for n in _LENGTHS.value] or [*usual]


def _decoding(runtime: Runtime, n: int) -> Side:
    """Steps behind n tokens."""

    def steps() -> Iterator[float]:
        measure.fill(runtime, n)
        yield from measure.steps(runtime, _N_STEPS.value)

    return steps


def contexts() -> Iterator[Compared]:
    """One cache, more or less full."""
    short, long = _lengths(250, 8000)
    runtime = Runtime(_decoder(), _config(long + 192))
    sides = {f"decode_at_{n}": _decoding(runtime, n) for n in (short, long)}
    yield Compared(sides=sides, over=[(f"decode_at_{long}", f"decode_at_{short}")])
    temp_bytes = runtime.programs.temp_bytes("decode_steps")
    measure.emit("decode_program", temp_bytes=temp_bytes)


def cells() -> Iterator[Compared]:
    """The same tokens in a small cache and in a large one."""
    decoder = _decoder()
    runtimes = {n: Runtime(decoder, _config(n)) for n in (512, 32_768)}
    sides = {f"decode_in_{n}": _decoding(x, 250) for n, x in runtimes.items()}
    yield Compared(sides=sides, over=[("decode_in_32768", "decode_in_512")])


class Near(nnx.Module):
    """A decoder whose every layer sees what its windowed layers see."""

    recurrent = None

    def __init__(self, decoder: Any):
        """Takes the weights of a decoder with one kind of window."""
        self.decoder = decoder
        groups: tuple[GroupSpec, ...] = decoder.groups
        (near,) = (g for g in groups if g.mask.kind == "window")
        self.n_vocab: int = decoder.n_vocab
        layers = tuple(sorted(i for g in groups for i in g.layers))
        self.groups = (dataclasses.replace(near, layers=layers),)

    def __call__(self, tokens: jax.Array, attend: Attend, out_ids: jax.Array) -> jax.Array:
        """The decoder's logits."""
        return self.decoder(tokens, attend, out_ids)


def windows() -> Iterator[Compared]:
    """Two lengths, with full layers and without."""
    decoder, lengths = _decoder("gemma3-270m"), _lengths(600, 8000)
    config = _config(max(lengths) + 256)
    runtimes = {"model": Runtime(decoder, config), "near": Runtime(Near(decoder), config)}
    sides = {f"{x}_{n}": _decoding(at, n) for x, at in runtimes.items() for n in lengths}
    about = {f"{x}_cache_bytes": at.stats().cache_bytes for x, at in runtimes.items()}
    over = [(f"{x}_{lengths[-1]}", f"{x}_{lengths[0]}") for x in runtimes]
    yield Compared(sides=sides, over=over, about=about)


def long_text(model: Any) -> dict[str, Any]:
    """A text of any length in the cells of one window; memory before and after most of it."""
    runtime = Runtime(model, _config(4096))
    tokens = np.random.default_rng(0).integers(0, runtime.n_vocab, _N_LONG.value).tolist()
    runtime.append(tokens[:2048])
    first, start = _held(runtime), time.perf_counter()
    runtime.append(tokens[2048:])
    seconds, last = time.perf_counter() - start, _held(runtime)
    return {
        "n_tokens": runtime.seq_pos_max() + 1,
        "n_cells": len(runtime.cells.pos),
        "n_compiles": runtime.programs.n_compiles,
        "tokens_per_s": round((len(tokens) - 2048) / seconds, 1),
        **{name: [first[name], last[name]] for name in first},
    }


def _held(runtime: Runtime) -> dict[str, int]:
    """Bytes that are held now: of the cache, of all arrays, by the process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "cache_bytes": runtime.stats().cache_bytes,
        "live_array_bytes": sum(x.nbytes for x in jax.live_arrays()),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def extend() -> Iterator[Compared]:
    """Decode, and then a step of a prompt behind what was decoded."""
    (n,) = _lengths(4000)
    kinds: dict[str, dict[str, Any]] = {
        "write": {},
        "read": {"rope": "read"},
        "cache": {"self_extend": Extend(ga_n=4, ga_w=1024)},
        "paper": {"rope": "read", "self_extend": Extend(ga_n=4, ga_w=1024, kind="paper")},
        "paper_write": {"self_extend": Extend(ga_n=4, ga_w=1024, kind="paper")},
    }
    decoder = _decoder()
    part = _ids(np.random.default_rng(0), 512, decoder.n_vocab)
    sides: dict[str, Side] = {}
    for kind, more in kinds.items():
        runtime = Runtime(decoder, _config(8192, **more))
        sides[f"{kind}_decode"] = _decoding(runtime, n)
        sides[f"{kind}_prompt"] = timed(lambda r=runtime: r.append(part), 2)
    over = [
        (f"{kind}_{what}", f"{plain}_{what}")
        for kind in ("cache", "paper", "paper_write")
        for what in ("decode", "prompt")
        for plain in ("write", "read")
    ]
    yield Compared(sides=sides, over=over, about={"n_kv": n}, how={"in_order": True})


def by_layer() -> Iterator[Compared]:
    """Each way of dispatching, which is compiled before the first round."""
    usual: dict[str, Any] = {"type_k": "auto", "type_v": "auto"}
    ways: tuple[Any, ...] = ("whole", "by_layer")
    for weights in _WEIGHTS.value:
        decoder = _decoder(weights=weights)
        at = {x: Runtime(decoder, _config(8192, programs=x, **usual)) for x in ways}
        for n in _lengths(250, 4000):
            steps = {x: _going_on(runtime, n) for x, runtime in at.items()}
            yield _ways(f"decode behind {n} tokens, {weights}", steps)
        prefills = {x: _prefill(runtime) for x, runtime in at.items()}
        yield _ways(f"prefill of 512 tokens, {weights}", prefills)
        at.clear()
        sizes = {"n_seq_max": 16, **usual}
        engines = {x: Engine(decoder, _config(4096, programs=x, **sizes)) for x in ways}
        yield _ways(f"16 requests, {weights}", {x: _serving(e) for x, e in engines.items()})


def _ways(what: str, sides: Mapping[str, Side]) -> Compared:
    how = {"undisturbed": True}
    return Compared(sides=sides, over=[("by_layer", "whole")], about={"what": what}, how=how)


def _going_on(runtime: Runtime, n: int) -> Side:
    """Steps behind n tokens and those of the rounds before."""
    measure.fill(runtime, n)
    tokens = runtime.generate()
    next(tokens)
    return timed(lambda: next(tokens), _N_STEPS.value)


def _prefill(runtime: Runtime) -> Side:
    prompt = _ids(np.random.default_rng(0), 512, runtime.n_vocab)
    return timed(lambda: runtime.prefill(prompt), again=runtime.clear)


def _serving(engine: Engine) -> Side:
    rng, count = np.random.default_rng(0), iter(range(10**6))

    def serve() -> None:
        for i in range(16):
            tokens = tuple(_ids(rng, 32 + 4 * i))
            engine.add_request(Request(id=str(next(count)), tokens=tokens, n_predict=24))
        while engine.has_work:
            engine.step()

    return timed(serve)


def _ids(rng: np.random.Generator, n: int, n_vocab: int = 256) -> list[int]:
    """Tokens that mean nothing; every vocabulary has the first 256."""
    return rng.integers(100, min(n_vocab, 10_000), n).tolist()


def blend() -> Iterator[Compared]:
    """From an empty sequence to the logits of the suffix's last token: copied, moved, run."""
    n, n_chunks, n_suffix = _N_TOKENS.value, 4, 32
    config = _config(-(-(n + n_suffix) // 256) * 256, n_seq_max=2, swa_full=True)
    runtime, rng = Runtime(_decoder(), config), np.random.default_rng(0)
    texts = [_ids(rng, n // n_chunks, runtime.n_vocab) for _ in range(n_chunks)]
    suffix = _ids(rng, n_suffix, runtime.n_vocab)
    chunks = [runtime.chunk(x, [1]) for x in texts]
    whole = [1, *(token for x in texts for token in x), *suffix]
    sides = {"prefill": timed(lambda: runtime.prefill(whole), again=runtime.clear)}
    for ratio in _RATIOS.value:
        spec = BlendSpec(ratio=float(ratio))

        def run(spec: BlendSpec = spec) -> jax.Array:
            return runtime.blend(chunks, suffix, spec).logits

        sides[f"blend_{ratio}"] = timed(run, again=runtime.clear)
    about = {"n_tokens": len(whole), "n_chunks": n_chunks, "n_suffix": n_suffix}
    yield Compared(sides=sides, over=[(x, "prefill") for x in [*sides][1:]], about=about)


ROWS: Mapping[str, Callable[[], Iterator[Compared]]] = {
    **{"contexts": contexts, "cells": cells, "windows": windows},
    **{"extend": extend, "by_layer": by_layer, "blend": blend},
}
_ROW = flags.DEFINE_enum("row", "contexts", list(ROWS), "What is compared.")

if __name__ == "__main__":
    commands.run(main)
