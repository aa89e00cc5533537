r"""What is lost when layers keep tokens by score: a table and a plot, for a model and texts.

    python -m scripts.press_bench --plot press.png
    python -m scripts.press_bench --methods h2o,snapkv --budgets 128,192,384 --n_keys 6

One JSON line a method and budget, and a table at the end. A prompt of --n_prompt tokens of each of
three plays is read, then --n_next more; KL (nats) and perplexity are those of the latter, beside a
cache that keeps all. A pass key is hidden in --n_keys prompts of --n_passkey tokens of each play,
at depths from 0.1 to 0.7, where no method has it among the newest; its figure is minus the
logarithm of the probability of the key's tokens, in sum. Bytes are those of the cache's arrays.
`--kept` draws which positions each layer and head has kept.

A method is a policy by score, and behind it how, as in `snapkv:once:shared`:
  once     a prompt is compressed when it was read whole, a pass key's question too
  shared   heads share the budget, a fifth of which each has for itself (Ada-KV)
  refresh  of sparse_window: all tokens stay, and the budget is read, chosen by queries that read
           all, one every --interval
Others: whole_cells evicts the same tokens in all heads and layers. quest, and double_sparsity with
--channels, read sparsely, which is of pass keys alone here: their KL and perplexity, of tokens read
one by one, are those of `scripts.experiments.select_quality`. duo needs --heads of
`scripts.streaming_heads`, and duo_reversed is its control: the other half of the heads streams.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags

from kvrt import CacheConfig, DoubleSparsity, Quest, Runtime, Select
from kvrt.errors import UsageError
from kvrt.policies import SCORED, ScoredPolicy
from kvrt.policies.scored import DuoAttention
from kvrt.runtime.compress import REPEAT, compress_prompt
from kvrt.runtime.heavy_channels import read_channels
from kvrt.runtime.whole_cells import CellEviction
from kvrt_models.load import Model, load
from scripts._lib import commands, measure
from scripts.experiments import needle, plots, texts
from scripts.experiments.divergence import kl, log_probs

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_METHODS = flags.DEFINE_list("methods", [*SCORED, "recent_without_sinks"], "Which policies.")
_BUDGETS = flags.DEFINE_list("budgets", ["192"], "Tokens a kv head holds at most.")
_INTERVAL = flags.DEFINE_integer("interval", 32, "Tokens between evictions.", lower_bound=1)
_N_PROMPT = flags.DEFINE_integer("n_prompt", 768, "Tokens of a prompt.", lower_bound=2)
_N_NEXT = flags.DEFINE_integer("n_next", 255, "Tokens behind it.", lower_bound=2)
_N_TEXTS = flags.DEFINE_integer(
    "n_texts", len(texts.PLAYS), "Plays; 0 leaves out KL and perplexity.", lower_bound=0
)
_CHANNELS = flags.DEFINE_string("channels", None, "Heavy channels of double_sparsity.")
_HEADS = flags.DEFINE_string("heads", None, "Streaming heads of duo, and the others.")
_N_KEYS = flags.DEFINE_integer("n_keys", 3, "Pass keys a play; 0 leaves out.", lower_bound=0)
_N_PASSKEY = flags.DEFINE_integer("n_passkey", 780, "Tokens of their prompts.", lower_bound=100)
_PLOT = flags.DEFINE_string("plot", None, "Draw KL over budgets into this file (extra [viz]).")
_KEPT = flags.DEFINE_string("kept", None, "Draw kept positions into this file (extra [viz]).")

Method = ScoredPolicy | Select | CellEviction
Line = dict[str, Any]


def run() -> None:
    """All methods at all budgets.

    Raises:
      UsageError: an unknown method, a budget below its interval, or a plot without matplotlib.
    """
    if _PLOT.value or _KEPT.value:
        plots.check_viz()
    wanted = [(name, int(n)) for name in _METHODS.value for n in _BUDGETS.value]
    methods = [method_of(name, n) for name, n in wanted]
    if not _N_KEYS.value and (not _N_TEXTS.value or not all(map(_reads_texts, wanted))):
        raise UsageError("--n_keys 0 leaves nothing to measure; give one, or --n_texts")
    model = load(_MODEL.value, dtype="f32")
    config = CacheConfig(n_ctx=-(-_longest() // 256) * 256, type_k="f32", type_v="f32")
    plays, keys = _plays(model), _keys(model)
    dense = Reader(Runtime(model.decoder, config), model, "dense", None)
    exact = [dense.logits(text) for text in plays]
    lines, panels = [measured("dense", 0, dense, (plays, exact), keys)], []
    for (name, budget), method in zip(wanted, methods, strict=True):
        policy = method if isinstance(method, ScoredPolicy) else None
        select = method if isinstance(method, Quest | DoubleSparsity) else None
        reads = dataclasses.replace(config, select=select)
        reader = Reader(Runtime(model.decoder, reads, policy=policy), model, name, method)
        those = (plays, exact) if _reads_texts((name, budget)) else ([], [])
        lines.append(measured(name, budget, reader, those, keys))
        if _KEPT.value and policy is not None:
            text = (plays or [x.tokens for x in keys])[0]
            panels.append((f"{name} {budget}", _kept(reader, text), len(text)))
    if _PLOT.value:
        _draw(lines, _PLOT.value)
    if _KEPT.value:
        _draw_kept(panels, _KEPT.value)


def _longest() -> int:
    """Tokens of the longest text, and some that follow it."""
    return max(_N_PROMPT.value + _N_NEXT.value, _N_PASSKEY.value) + 64


def _plays(model: Model) -> list[list[int]]:
    """The prompts, and what follows them."""
    n = _N_PROMPT.value + _N_NEXT.value
    names = list(texts.PLAYS)[: _N_TEXTS.value]
    return [model.tokenizer.encode(texts.play(x))[3000 : 3000 + n] for x in names]


def _keys(model: Model) -> list[needle.Needle]:
    """Prompts with pass keys."""
    n, found = _N_PASSKEY.value, []
    depths = np.linspace(0.1, 0.7, max(_N_KEYS.value, 1))[: _N_KEYS.value]
    for trial, name in enumerate(texts.PLAYS if _N_KEYS.value else ()):
        hay = needle.hay(texts.play(name).splitlines(keepends=True), model.tokenizer.encode)
        for depth in map(float, depths):
            found.append(needle.hide(needle.key_of(1, n, depth, trial), n, depth, hay))
    return found


def _reads_texts(wanted: tuple[str, int]) -> bool:
    return wanted[0] not in ("quest", "double_sparsity")


def method_of(name: str, n_slots: int) -> Method:
    """A method that holds, or reads, n_slots tokens a head at most.

    Raises:
      UsageError: there is no such method, or it would keep nothing.
    """
    interval = _INTERVAL.value
    name, *how = name.split(":")
    if wrong := set(how) - {"once", "shared", "refresh"}:
        raise UsageError(f"--methods {name}:{wrong.pop()}: once, shared or refresh")
    if n_slots <= interval:
        raise UsageError(f"--budgets {n_slots}: more than --interval {interval} is wanted")
    sizes: dict[str, Any] = {"budget": n_slots - interval, "interval": interval}
    if name == "whole_cells":
        return CellEviction(n_keep=n_slots - interval, window=interval)
    if "refresh" in how:
        sizes |= {"budget": _longest(), "n_read": n_slots, "refresh_every": interval}
    if "shared" in how:
        sizes["head_share"] = 0.2
    if name == "recent_without_sinks":
        return SCORED["recent_only"](**sizes, n_sink=0)
    if name == "random_tokens":
        return SCORED[name](**sizes, n_sink=0, n_recent=1)
    if name in ("duo", "duo_reversed"):
        if _HEADS.value is None:
            raise UsageError(f"--methods {name} needs --heads of scripts.streaming_heads")
        found = json.loads(pathlib.Path(_HEADS.value).read_text())
        heads = tuple(map(tuple, found["streaming" if name == "duo" else "others"]))
        n_stream = n_slots - interval
        return DuoAttention(
            streaming=heads, budget=_longest(), n_stream=n_stream, interval=interval
        )
    if name == "quest":
        return Quest(n_cells=n_slots)
    if name == "double_sparsity":
        if _CHANNELS.value is None:
            raise UsageError("--methods double_sparsity needs --channels of calibrate_channels")
        channels, weights = read_channels(_CHANNELS.value)
        return DoubleSparsity(n_cells=n_slots, channels=channels, weights=weights, by_cell=True)
    if name not in SCORED:
        more = ("recent_without_sinks", "whole_cells", "duo", "duo_reversed")
        known = (*SCORED, *more, "quest", "double_sparsity")
        raise UsageError(f"--methods {name}: one of {', '.join(known)}")
    return SCORED[name](**sizes)


class Reader:
    """A runtime that reads prompts, and what follows them, by one method."""

    def __init__(self, runtime: Runtime, model: Model, name: str, method: Method | None):
        """The name says whether prompts are compressed once."""
        self.runtime, self.model = runtime, model
        self.cells = method if isinstance(method, CellEviction) else None
        self.once = "once" in name.split(":")
        self.repeats = isinstance(method, ScoredPolicy) and method.reads_whole

    def read(self, tokens: Sequence[int]) -> np.ndarray:
        """Reads a prompt; logits of its last token."""
        if self.once or self.repeats:
            ask = self.model.tokenizer.encode(REPEAT, add_special=False) if self.repeats else ()
            return np.asarray(compress_prompt(self.runtime, tokens, ask=ask).logits)
        logits = np.asarray(self.runtime.append(tokens))[-1]
        self._evict()
        return logits

    def _evict(self) -> None:
        if self.cells is not None:
            self.runtime.evict_cells(0, self.cells.n_keep, window=self.cells.window)

    def asked(self, runtime: Runtime, tokens: Sequence[int], n_asked: int) -> np.ndarray:
        """Reads a prompt whose last n_asked tokens ask: one by one, unless it is compressed."""
        assert runtime is self.runtime, "its own"
        if self.once:
            return self.read(tokens)
        self.read(tokens[:-n_asked])
        return np.asarray([runtime.append([x]) for x in tokens[-n_asked:]][-1])[0]

    def logits(self, text: Sequence[int]) -> np.ndarray:
        """Those of the tokens behind the prompt, as many at once as lie between evictions."""
        n, end = _N_PROMPT.value, _N_PROMPT.value + _N_NEXT.value
        self.runtime.clear()
        self.read(text[:n])
        found, size = [], end - n if self.cells is None else _INTERVAL.value
        for start in range(n, end, size):
            part = text[start : min(start + size, end)]
            found.append(np.asarray(self.runtime.append(part, out_ids=range(len(part)))))
            self._evict()
        return np.concatenate(found)


def measured(
    name: str,
    budget: int,
    reader: Reader,
    plays: tuple[list[list[int]], list[np.ndarray]],
    keys: Sequence[needle.Needle],
) -> Line:
    """A line of the table, which is printed."""
    kls, nlls, runtime = [], [], reader.runtime
    for text, exact in zip(*plays, strict=True):
        p, q = log_probs(exact), log_probs(reader.logits(text))
        kls.append(float(kl(p, q).mean()))
        rest = text[_N_PROMPT.value + 1 :][: len(q) - 1]
        nlls.append(-float(np.mean(q[np.arange(len(rest)), rest])))
    encode = reader.model.tokenizer.encode
    found = [needle.key_nll(runtime, encode, x, reader.asked) for x in keys]
    start = time.perf_counter()
    n_new = sum(1 for _ in runtime.generate(64))
    seconds = time.perf_counter() - start
    line: Line = {
        "method": name,
        "budget": budget,
        "kl": _rounded(kls, 4),
        "kls": [round(x, 4) for x in kls],
        "perplexity": _rounded([float(np.exp(np.mean(nlls)))] if nlls else [], 2),
        "passkey_nll": _rounded(found, 2),
        "passkeys": [round(x, 2) for x in found],
        "bytes": runtime.stats().cache_bytes,
        "tokens_per_s": round(n_new / seconds, 1),
    }
    return measure.emit("press", **line)


def _rounded(figures: Sequence[float], digits: int) -> float | None:
    """Their mean; None of none."""
    return round(float(np.mean(figures)), digits) if len(figures) else None


def _draw(lines: Sequence[Line], path: str) -> None:
    """KL over the budget, a line a method."""
    with plots.panels(path, figsize=(7, 4.5)) as (_, ((axis,),)):
        for name in _METHODS.value:
            own = [x for x in lines if x["method"] == name and x["kl"] is not None]
            if own:
                points = sorted((x["budget"], x["kl"]) for x in own)
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(xlabel="tokens a kv head", ylabel="KL from all tokens (nats)", yscale="log")
        axis.legend(fontsize=7)


def _kept(reader: Reader, text: list[int]) -> list[np.ndarray]:
    """Positions that each kv head of each layer keeps of a text."""
    reader.runtime.clear()
    reader.read(text)
    return [np.asarray(x) for heads in reader.runtime.kept_positions().values() for x in heads]


def _draw_kept(kept: Sequence[tuple[str, list[np.ndarray], int]], path: str) -> None:
    """Which positions of a text (across) each layer and head (down) keeps, by method."""
    n_down = -(-len(kept) // 2)
    size = {"figsize": (10, 2.2 * n_down + 0.6), "sharex": True, "sharey": True}
    with plots.panels(path, n_down, min(len(kept), 2), **size) as (figure, axes):
        for axis, (name, heads, n_tokens) in zip(axes.flat, kept, strict=False):
            picture = np.zeros((len(heads), n_tokens))
            for i, positions in enumerate(heads):
                picture[i, positions] = 1
            axis.imshow(picture, aspect="auto", cmap="Greys", interpolation="none")
            axis.set_title(name, fontsize=8)
        figure.supxlabel("position")
        figure.supylabel("layer and kv head, first layer above")


if __name__ == "__main__":
    commands.run(run)
