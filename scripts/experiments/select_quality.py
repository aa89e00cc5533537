"""What sparse reads cost in quality: recall, KL, perplexity and pass keys, beside two controls.

    python -m scripts.experiments.select_quality --keys 4

Each text is read densely up to --n_prompt tokens and then token by token, and each method reads
n_cells of them. Channels come from a text that is not judged. The controls choose units at random,
and the most recent ones; both have to be worse. One JSON line a text and method.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from kvrt import CacheConfig, Runtime
from kvrt.attention.select import choose
from kvrt.options.select import DoubleSparsity, Quest, Select
from kvrt.runtime.heavy_channels import heavy_channels
from kvrt_models.load import Model, load
from scripts._lib import commands, measure
from scripts.experiments import divergence, needle, texts

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_CALIBRATION = flags.DEFINE_string("calibration", "docs/concepts.md", "Text for the channels.")
_N_PROMPT = flags.DEFINE_integer("n_prompt", 896, "Tokens read densely.", lower_bound=64)
_N_STEPS = flags.DEFINE_integer("n_steps", 127, "Tokens read one by one.", lower_bound=1)
_N_CELLS = flags.DEFINE_list("n_cells", ["128", "256"], "Cells read.")
_N_CHANNELS = flags.DEFINE_integer("n_channels", 16, "Channels a head.", lower_bound=1)
_N_KEYS = flags.DEFINE_integer("keys", 6, "Pass keys.", lower_bound=0)
_METHODS = flags.DEFINE_list("methods", [], "Only these; empty is all.")

_SHIPPED = choose.unit_weights


@dataclasses.dataclass(frozen=True)
class Method:
    """A way of reading, and whether chance chooses instead."""

    name: str
    select: Select | None
    random: bool = False


def main() -> None:
    model = load(_MODEL.value, dtype="f32")
    n = _N_PROMPT.value + _N_STEPS.value + 1
    plays = {name: divergence.pieces(model.tokenizer, name, n) for name in texts.PLAYS}
    keys = _needles(model)
    dense: dict[str, Any] = {}
    for method in _methods(model):
        if _METHODS.value and method.select and method.name not in _METHODS.value:
            continue
        choose.unit_weights = _by_chance if method.random else _SHIPPED
        jax.clear_caches()  # what was traced chooses as the method before
        reads = _runtime(model, method)
        for name, tokens in plays.items():
            log_probs = _teacher_forced(reads, tokens)
            dense.setdefault(name, log_probs)
            _emit(method, name, log_probs, dense[name], tokens[_N_PROMPT.value + 1 :])
        nll = [needle.key_nll(reads, model.tokenizer.encode, x) for x in keys]
        _line(method, text="pass keys", n=len(keys), nll=[round(x, 3) for x in nll])
        if nll:
            _line(method, text="pass keys", mean_nll=round(float(np.mean(nll)), 3))


def _by_chance(select: Any, layer: int, q: jax.Array, labels: Any, units: Any, group: Any):
    """Weights that depend on nothing but the query's bits."""
    n_heads, n_tokens = q.shape[:2]
    seed = jax.lax.bitcast_convert_type(jnp.sum(q), jnp.int32)
    shape = n_heads, n_tokens, units.seen.shape[1]
    return jax.random.uniform(jax.random.key(seed), shape)


def _methods(model: Model) -> list[Method]:
    text = pathlib.Path(_CALIBRATION.value).read_text()
    pieces = texts.in_pieces(model.tokenizer.encode(text), 512)[:16]
    channels, weights = heavy_channels(model.decoder, pieces, _N_CHANNELS.value)
    heavy: dict[str, Any] = {"channels": channels, "weights": weights}
    found = [Method("dense", None)]
    for n in map(int, _N_CELLS.value):
        found += [
            Method(f"quest {n}", Quest(n_cells=n)),
            Method(f"double sparsity {n}", DoubleSparsity(n_cells=n, **heavy)),
            Method(f"by cell {n}", DoubleSparsity(n_cells=n, by_cell=True, **heavy)),
            Method(
                f"by cell, int4 {n}",
                DoubleSparsity(n_cells=n, by_cell=True, label_type="int4", **heavy),
            ),
            Method(f"random {n}", Quest(n_cells=n), random=True),
            Method(f"recent {n}", Quest(n_cells=n, n_sink=0, n_recent=n - 32)),
        ]
    return found


def _runtime(model: Model, method: Method) -> Runtime:
    n = max(_N_PROMPT.value + _N_STEPS.value + 1, 1024)
    return Runtime(
        model.decoder, CacheConfig(n_ctx=n, select=method.select, type_k="f32", type_v="f32")
    )


def _teacher_forced(runtime: Runtime, tokens: Sequence[int]) -> np.ndarray:
    """Logarithms of probabilities behind each token that was read alone, [n_steps, V]."""
    runtime.clear()
    runtime.prefill(tokens[: _N_PROMPT.value])
    rest = tokens[_N_PROMPT.value : -1]
    return divergence.log_probs(np.concatenate([np.asarray(runtime.append([t])) for t in rest]))


def _needles(model: Model) -> list[needle.Needle]:
    hay = needle.hay(texts.play("hamlet").splitlines(keepends=True), model.tokenizer.encode)
    depths = np.linspace(0.1, 0.8, max(_N_KEYS.value, 1))[: _N_KEYS.value]
    size = 780
    return [needle.hide(needle.key_of(1, size, d, 0), size, d, hay) for d in map(float, depths)]


def _emit(
    method: Method, text: str, log_probs: np.ndarray, dense: np.ndarray, tokens: Sequence[int]
) -> None:
    kl = float(divergence.kl(dense, log_probs).mean())
    rows = np.arange(len(tokens))
    ppl, base = (float(np.exp(-x[rows, tokens].mean())) for x in (log_probs, dense))
    top1 = float(np.mean(log_probs.argmax(1) == dense.argmax(1)))
    figures = {"kl": round(kl, 4), "ppl": round(ppl, 3), "dense_ppl": round(base, 3)}
    _line(method, text=text, **figures, d_ppl=round(ppl / base - 1, 4), top1=round(top1, 3))


def _line(method: Method, **figures: Any) -> None:
    measure.emit("sparse reads", method=method.name, **figures)


if __name__ == "__main__":
    commands.run(main)
