"""A needle grid: which pass keys each way of reading finds, over length and depth.

Run it with `python -m scripts.experiments.passkey --plot passkey.png`. One JSON
line a cell of the grid: a mode, a length in tokens, a depth; the modes are those of `modes.py`.
Generation is greedy, and a key counts as found if it is the first number of the answer.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
from absl import flags

from kvrt import Runtime
from kvrt.errors import UsageError
from kvrt_models.load import Model, load
from kvrt_models.weights.types import WeightType
from scripts._lib import commands, measure
from scripts.experiments import modes, needle, plots, texts

_MODEL = flags.DEFINE_string("model", "gemma3-270m", "Known name, file or folder.")
_DTYPE = flags.DEFINE_enum("dtype", "f32", get_args(WeightType), "Type of the matrices.")
_LENGTHS = flags.DEFINE_list("lengths", ["900", "2600"], "Tokens of the prompts.")
_DEPTHS = flags.DEFINE_list("depths", ["0", "0.25", "0.5", "0.75", "1"], "Where the keys are.")
_WANTED = flags.DEFINE_list("modes", ["full", "shift", "sinks", "window", "paper"], "Which to run.")
_N_CTX = flags.DEFINE_integer("n_ctx", 1024, "Cells of the bounded modes.", lower_bound=256)
_N_UBATCH = flags.DEFINE_integer("n_ubatch", 128, "Tokens of a step.", lower_bound=1)
_GA_N = flags.DEFINE_integer("ga_n", 4, "SelfExtend's group.", lower_bound=1)
_GA_W = flags.DEFINE_integer("ga_w", 512, "SelfExtend's window.", lower_bound=1)
_FILLER = flags.DEFINE_enum("filler", "repeated", ["repeated", *texts.PLAYS], "What hides them.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the keys.")
_TRIALS = flags.DEFINE_integer("trials", 1, "Keys a cell.", lower_bound=1)
_PLOT = flags.DEFINE_string("plot", None, "Draw the grid into this file (extra [viz]).")

N_ANSWER = 12  # a space, five digits, and what follows
POSSIBLE = tuple(mode for mode in modes.MODES if mode != "recompute")

Told = dict[str, Any]
Grid = dict[tuple[int, float], list[needle.Needle]]


def main() -> None:
    """All modes over one grid.

    Raises:
      BadConfig: a mode that the model's layers cannot do; nothing was run.
      UsageError: a flag that cannot be used.
    """
    commands.check_names(_WANTED, POSSIBLE)
    lengths = [int(x) for x in numbers("lengths", _LENGTHS.value, most=1e6)]
    depths = numbers("depths", _DEPTHS.value, most=1)
    dtype: Any = _DTYPE.value  # flags know no literal types
    model = load(_MODEL.value, dtype=dtype)
    grid = needles(model, lengths, depths)
    sizes = modes.Sizes(
        n_tokens=max(lengths) + N_ANSWER,
        n_window=_N_CTX.value,
        n_ubatch=_N_UBATCH.value,
        ga_n=_GA_N.value,
        ga_w=_GA_W.value,
    )
    for mode in _WANTED.value:
        modes.runtime_of(mode, model.decoder, sizes)
    lines: list[Told] = []
    n_all = sum(len(n.tokens) for cell in grid.values() for n in cell) * len(_WANTED.value)
    with commands.bar("tokens", n_all) as done:
        for mode in _WANTED.value:
            runtime = modes.runtime_of(mode, model.decoder, sizes)
            for (length, depth), cell in grid.items():
                line = described(mode, length, depth) | asked(runtime, model, cell, done)
                lines.append(measure.emit("passkey", **line))
    if _PLOT.value:
        plot(lines, _PLOT.value)


def numbers(name: str, given: list[str], *, most: float) -> list[float]:
    """The numbers of a flag that is a list.

    Raises:
      UsageError: no number, or one outside [0, most].
    """
    try:
        read = [float(x) for x in given]
    except ValueError as error:
        raise UsageError(f"--{name} {','.join(given)}: {error}; give numbers") from error
    if not read or not all(0 <= x <= most for x in read):
        raise UsageError(f"--{name} {','.join(given)}: give numbers from 0 to {most:g}")
    return read


def needles(model: Model, lengths: Sequence[int], depths: Sequence[float]) -> Grid:
    """The prompts of each cell of the grid, the same for every mode.

    Raises:
      UsageError: a length without room for filler.
    """
    filler = _FILLER.value
    pieces = needle.FILLER if filler == "repeated" else texts.play(filler).splitlines(keepends=True)
    hay = needle.hay(pieces, model.tokenizer.encode)
    grid: Grid = {}
    for length, depth in itertools.product(lengths, depths):
        keys = [needle.key_of(_SEED.value, length, depth, t) for t in range(_TRIALS.value)]
        grid[length, depth] = [needle.hide(key, length, depth, hay) for key in keys]
    return grid


def asked(
    runtime: Runtime, model: Model, cell: Sequence[needle.Needle], done: Callable[[int], None]
) -> Told:
    """What a runtime answers to the prompts of a cell, and how often that was the key."""
    answers, start, n_dropped = [], time.perf_counter(), runtime.stats().n_dropped
    for hidden in cell:
        runtime.clear()
        runtime.prefill(hidden.tokens)
        drawn = runtime.generate(N_ANSWER, stop_ids=sorted(model.tokenizer.eos_ids))
        answers.append(model.tokenizer.decode(token.id for token in drawn))
        done(len(hidden.tokens))
    hits = [needle.found(a, n.key) for a, n in zip(answers, cell, strict=True)]
    return {
        "n_tokens": [len(n.tokens) for n in cell],
        "found": sum(hits),
        "trials": len(cell),
        "keys": [n.key for n in cell],
        "answers": answers,
        "n_dropped": runtime.stats().n_dropped - n_dropped,
        "seconds": round(time.perf_counter() - start, 1),
    }


def described(mode: str, length: int, depth: float) -> Told:
    """What was asked for."""
    told: Told = {"model": _MODEL.value, "dtype": _DTYPE.value}
    told |= {"mode": mode, "length": length, "depth": depth}
    told |= {"filler": _FILLER.value, "seed": _SEED.value, "n_ubatch": _N_UBATCH.value}
    if mode in modes.BOUNDED:
        told["n_ctx"] = _N_CTX.value
    if mode in modes.EXTENDED:
        told |= {"ga_n": _GA_N.value, "ga_w": _GA_W.value}
    return told


def plot(lines: Sequence[Told], path: str) -> None:
    """A heat map a mode: lengths across, depths down, the share of keys that was found."""
    maps = shares(lines)
    size = {"figsize": (1.2 + 1.9 * len(maps), 3), "sharey": True}
    with plots.panels(path, 1, len(maps), **size) as (_, (axes,)):
        for axis, (mode, share) in zip(axes, maps.items(), strict=True):
            lengths = sorted({length for length, _ in share})
            depths = sorted({depth for _, depth in share})
            values = [[share.get((n, depth), np.nan) for n in lengths] for depth in depths]
            axis.imshow(values, vmin=0, vmax=1, cmap="Blues", aspect="auto")
            axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
            axis.set_title(mode)
            for (row, column), value in np.ndenumerate(np.array(values)):
                color = "white" if value > 0.5 else "black"
                axis.text(column, row, f"{value:.2g}", ha="center", va="center", color=color)
        axes[0].set(xlabel="tokens", ylabel="depth of the key")


def shares(lines: Sequence[Told]) -> dict[str, dict[tuple[int, float], float]]:
    """The share of keys found, by mode, length and depth; a later line replaces an earlier one."""
    maps: dict[str, dict[tuple[int, float], float]] = {}
    for line in lines:
        cell = (line["length"], line["depth"])
        maps.setdefault(line["mode"], {})[cell] = line["found"] / line["trials"]
    return maps


if __name__ == "__main__":
    commands.run(main)
