"""Perplexity over positions, for the ways of reading a text that is longer than the window.

Run it with `python scripts/perplexity.py --plot docs/perplexity.png`. One JSON line a mode:
`full` is plain attention; `shift` a context shift in --n_window cells; `cache` and `paper` the two
kinds of SelfExtend; `grouped` the paper's without a window of exact positions, as a control.
"""

import json
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import texts
from absl import app, flags
from rich import progress
from rich.console import Console

from kvrt import CacheConfig, ContextShift, Runtime, SelfExtend
from models.load import load

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_N_TOKENS = flags.DEFINE_integer("n_tokens", 11264, "Tokens of the text.", lower_bound=2)
_SEGMENT = flags.DEFINE_integer("segment", 1024, "Tokens of one figure.", lower_bound=1)
_N_WINDOW = flags.DEFINE_integer("n_window", 4096, "Cells of the mode shift.", lower_bound=1024)
_GA_N = flags.DEFINE_integer("ga_n", 4, "SelfExtend's group.", lower_bound=1)
_GA_W = flags.DEFINE_integer("ga_w", 1024, "SelfExtend's window.", lower_bound=1)
_MODES = ("full", "shift", "cache", "paper", "grouped")
_WANTED = flags.DEFINE_list("modes", list(_MODES), "Which to run.")
_PLOT = flags.DEFINE_string("plot", None, "Draw the figures into this file (extra [viz]).")

N_UBATCH = 512


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    unknown = set(_WANTED.value) - set(_MODES)
    if unknown:
        raise app.UsageError(f"--modes {', '.join(sorted(unknown))}: one of {', '.join(_MODES)}")
    model = load(_MODEL.value)
    tokens = model.tokenizer.encode(texts.play("hamlet"))[: _N_TOKENS.value]
    if len(tokens) < _N_TOKENS.value:
        raise app.UsageError(f"--n_tokens {_N_TOKENS.value}: the text has {len(tokens)}")
    results = {}
    for mode in _WANTED.value:
        start = time.perf_counter()
        runtime = runtime_of(mode, model.decoder, len(tokens))
        losses = np.concatenate(list(negative_log_likelihoods(runtime, tokens, mode)))
        results[mode] = by_segment(losses)
        stats = runtime.stats()
        told = dict(mode=mode, perplexity=results[mode], whole=perplexity(losses))
        told |= dict(segment=_SEGMENT.value, n_tokens=len(tokens), ga_n=_GA_N.value)
        told |= dict(ga_w=_GA_W.value, n_shift=stats.n_shift, n_extend=stats.n_extend)
        print(json.dumps(told | dict(seconds=round(time.perf_counter() - start, 1))), flush=True)
    if _PLOT.value:
        plot(results, _PLOT.value)


def runtime_of(mode: str, decoder, n_tokens: int) -> Runtime:
    """A runtime that reads as the mode says."""
    paper = mode in ("paper", "grouped")
    window = 1 if mode == "grouped" else _GA_W.value
    extend = None
    if mode in ("cache", "paper", "grouped"):
        extend = SelfExtend(ga_n=_GA_N.value, ga_w=window, kind="paper" if paper else "cache")
    config = CacheConfig(
        n_ctx=_N_WINDOW.value if mode == "shift" else n_tokens,
        n_ubatch=N_UBATCH,
        rope="read" if paper else "write",
        self_extend=extend,
    )
    shift = ContextShift(n_keep=4) if mode == "shift" else None
    return Runtime(decoder, config, policy=shift)


@jax.jit
def losses_of(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihoods of the tokens that came next."""
    found = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - found


def negative_log_likelihoods(
    runtime: Runtime, tokens: Sequence[int], mode: str
) -> Iterator[np.ndarray]:
    """Of each token but the first, step by step."""
    columns = (
        progress.TextColumn(mode),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(mode, total=len(tokens))
        for start in range(0, len(tokens), N_UBATCH):
            part = tokens[start : start + N_UBATCH]
            logits = runtime.append(part, out_ids=range(len(part)))
            targets = np.asarray(tokens[start + 1 : start + 1 + len(part)], np.int32)
            yield np.asarray(losses_of(logits[: len(targets)], targets))  # sync: a figure a step
            bars.update(task, advance=len(part))


def perplexity(losses: np.ndarray) -> float:
    """Of these tokens together."""
    return round(float(np.exp(losses.mean())), 3)


def by_segment(losses: np.ndarray) -> list[float]:
    """Perplexity of each segment, the last as long as it is."""
    cuts = range(_SEGMENT.value, len(losses), _SEGMENT.value)
    return [perplexity(part) for part in np.split(losses, list(cuts))]


def plot(results: dict[str, list[float]], path: str) -> None:
    """Lines over positions."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for mode, values in results.items():
        ends = (np.arange(len(values)) + 1) * _SEGMENT.value
        axes.plot(ends, values, marker="o", label=mode)
    axes.set(xlabel="tokens", ylabel=f"perplexity of {_SEGMENT.value} tokens", yscale="log")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    app.run(main)
