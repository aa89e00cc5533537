r"""Perplexity over positions, for the ways of reading a text that is longer than the window.

Run it with `python -m scripts.experiments.perplexity --plot perplexity.png`. One JSON line a mode;
the modes are those of `modes.py`. Tokens come in --chunk at a time, which is also how many go at
once when --n_window cells are full: a token sees between n_window - chunk and n_window - 1 others,
with `recompute` as with `sinks` and `window`.

    python -m scripts.experiments.perplexity --modes sinks,window,shift,recompute --n_tokens 20000 \
        --n_window 1024 --chunk 64 --segment 2000
"""

from typing import Any

import numpy as np
from absl import flags

from kvrt.errors import UsageError
from kvrt_models.load import load
from scripts._lib import commands, measure
from scripts.experiments import modes, plots, reading, texts

N_UBATCH = 512

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_TEXT = flags.DEFINE_enum("text", "hamlet", list(texts.PLAYS), "What is read.")
_N_TOKENS = flags.DEFINE_integer("n_tokens", 11264, "Tokens of the text.", lower_bound=2)
_SEGMENT = flags.DEFINE_integer("segment", 1024, "Tokens of one figure.", lower_bound=1)
_CHUNK = flags.DEFINE_integer(
    "chunk", N_UBATCH, "Tokens that come in at once.", lower_bound=1, upper_bound=N_UBATCH
)
_N_WINDOW = flags.DEFINE_integer(
    "n_window", 4096, "Cells of the bounded modes.", lower_bound=2 * N_UBATCH
)
_GA_N = flags.DEFINE_integer("ga_n", 4, "SelfExtend's group.", lower_bound=1)
_GA_W = flags.DEFINE_integer("ga_w", 1024, "SelfExtend's window.", lower_bound=1)
_WANTED = flags.DEFINE_list("modes", ["full", "shift", *modes.EXTENDED], "Which to run.")
_PLOT = flags.DEFINE_string("plot", None, "Draw the figures into this file (extra [viz]).")

Told = dict[str, Any]


def main() -> None:
    """All modes over one text.

    Raises:
      BadConfig: a mode that the model's layers cannot do; nothing was run.
      UsageError: the text is too short.
    """
    commands.check_names(_WANTED, modes.MODES)
    model = load(_MODEL.value, dtype="f32")
    tokens = model.tokenizer.encode(texts.play(_TEXT.value))[: _N_TOKENS.value]
    if len(tokens) < _N_TOKENS.value:
        raise UsageError(f"--n_tokens {_N_TOKENS.value}: {_TEXT.value} has {len(tokens)}")
    sizes = modes.Sizes(
        n_tokens=len(tokens),
        n_window=_N_WINDOW.value,
        n_ubatch=N_UBATCH,
        ga_n=_GA_N.value,
        ga_w=_GA_W.value,
    )
    for mode in _WANTED.value:
        modes.runtime_of(mode, model.decoder, sizes)
    results: dict[str, list[float]] = {}
    for mode in _WANTED.value:
        runtime = modes.runtime_of(mode, model.decoder, sizes)
        afresh = sizes.n_window if mode == "recompute" else None
        with commands.bar(mode, len(tokens)) as done:
            read = reading.read(runtime, tokens, _CHUNK.value, afresh=afresh, done=done)
        stats = runtime.stats()
        told = described(mode) | reading.figures(read, _SEGMENT.value)
        told |= {"n_shift": stats.n_shift, "n_extend": stats.n_extend}
        if len(read.losses) > sizes.n_window:
            told["beyond_window"] = reading.perplexity(read.losses[sizes.n_window :])
        measure.emit("perplexity", **told)
        results[mode] = told["perplexity"]
    if _PLOT.value:
        plot(results, _SEGMENT.value, _PLOT.value)


def described(mode: str) -> Told:
    """What was asked for."""
    told: Told = {"model": _MODEL.value, "text": _TEXT.value, "mode": mode}
    told |= {"n_tokens": _N_TOKENS.value, "segment": _SEGMENT.value, "chunk": _CHUNK.value}
    if mode in modes.BOUNDED:
        told["n_window"] = _N_WINDOW.value
    if mode in modes.EXTENDED:
        told |= {"ga_n": _GA_N.value, "ga_w": 1 if mode == "grouped" else _GA_W.value}
    return told


def plot(results: dict[str, list[float]], segment: int, path: str) -> None:
    """Lines over positions."""
    with plots.panels(path, figsize=(8, 4.5)) as (_, ((axes,),)):
        for mode, values in results.items():
            ends = (np.arange(len(values)) + 1) * segment
            axes.plot(ends, values, marker="o", label=mode)
        axes.set(xlabel="tokens", ylabel=f"perplexity of {segment} tokens", yscale="log")
        axes.legend()


if __name__ == "__main__":
    commands.run(main)
