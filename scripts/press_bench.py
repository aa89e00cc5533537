r"""What is lost when layers keep tokens by score: a table and a plot, for a model and texts.

    python -m scripts.press_bench --plot press.png
    python -m scripts.press_bench --methods h2o,snapkv --budgets 128,192,384 --n_keys 6

One JSON line a method and budget, and a table at the end. A prompt of --n_prompt tokens of each of
three plays is read, then --n_next more; KL (nats) and perplexity are those of the latter, beside a
cache that keeps all. A pass key of --n_keys prompts of --n_passkey tokens is hidden at half of
their depth; its figure is minus the logarithm of the probability of the key's tokens, in sum. Bytes
are those of the cache's arrays. `--kept` draws which positions each layer and head has kept.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import app, flags

from kvrt import CacheConfig, Runtime
from kvrt.errors import KvrtError, UsageError
from kvrt.policies import SCORED, ScoredPolicy
from kvrt_models.load import Model, load
from scripts._lib import texts
from scripts._lib.measure import log_probs
from scripts.experiments import needle

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_METHODS = flags.DEFINE_list("methods", [*SCORED, "recent_without_sinks"], "Which policies.")
_BUDGETS = flags.DEFINE_list("budgets", ["192"], "Tokens a kv head holds at most.")
_INTERVAL = flags.DEFINE_integer("interval", 32, "Tokens between evictions.", lower_bound=1)
_N_PROMPT = flags.DEFINE_integer("n_prompt", 768, "Tokens of a prompt.", lower_bound=2)
_N_NEXT = flags.DEFINE_integer("n_next", 255, "Tokens behind it.", lower_bound=2)
_N_KEYS = flags.DEFINE_integer("n_keys", 3, "Pass keys; 0 leaves them out.", lower_bound=0)
_N_PASSKEY = flags.DEFINE_integer("n_passkey", 780, "Tokens of their prompts.", lower_bound=100)
_PLOT = flags.DEFINE_string("plot", None, "Draw KL over budgets into this file (extra [viz]).")
_KEPT = flags.DEFINE_string("kept", None, "Draw kept positions into this file (extra [viz]).")

Line = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    try:
        run()
    except KvrtError as error:
        print(f"press_bench: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run() -> None:
    """All methods at all budgets.

    Raises:
      UsageError: an unknown method, a budget below its interval, or a plot without matplotlib.
    """
    if (_PLOT.value or _KEPT.value) and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot and --kept draw with matplotlib; pip install 'kvrt[viz]'")
    wanted = [(name, int(n)) for name in _METHODS.value for n in _BUDGETS.value]
    policies = [policy_of(name, n) for name, n in wanted]
    model = load(_MODEL.value)
    n = max(_N_PROMPT.value + _N_NEXT.value, _N_PASSKEY.value) + 64
    config = CacheConfig(n_ctx=-(-n // 256) * 256)
    n_text = _N_PROMPT.value + _N_NEXT.value
    plays = [model.tokenizer.encode(texts.play(x))[3000 : 3000 + n_text] for x in texts.PLAYS]
    hay = needle.hay(texts.play("hamlet").splitlines(keepends=True), model.tokenizer.encode)
    keys = [
        needle.hide(needle.key_of(0, _N_PASSKEY.value, 0.5, t), _N_PASSKEY.value, 0.5, hay)
        for t in range(_N_KEYS.value)
    ]
    dense = Runtime(model.decoder, config)
    exact = [_logits(dense, text) for text in plays]
    lines = [measured("dense", 0, dense, model, (plays, exact), keys)]
    for (name, budget), policy in zip(wanted, policies, strict=True):
        runtime = Runtime(model.decoder, config, policy=policy)
        lines.append(measured(name, budget, runtime, model, (plays, exact), keys))
        if _KEPT.value and policy is not None and (name, budget) == wanted[0]:
            _draw_kept(runtime, plays[0], _KEPT.value)
    _table(lines)
    if _PLOT.value:
        _draw(lines, _PLOT.value)


def policy_of(name: str, n_slots: int) -> ScoredPolicy:
    """A method that holds n_slots tokens a head at most.

    Raises:
      UsageError: there is no such method, or it would keep nothing.
    """
    interval = _INTERVAL.value
    if n_slots <= interval:
        raise UsageError(f"--budgets {n_slots}: more than --interval {interval} is wanted")
    sizes: dict[str, Any] = {"budget": n_slots - interval, "interval": interval}
    if name == "recent_without_sinks":
        return SCORED["recent_only"](**sizes, n_sink=0)
    if name == "random_tokens":
        return SCORED[name](**sizes, n_sink=0, n_recent=1)
    if name not in SCORED:
        raise UsageError(f"--methods {name}: one of {', '.join(SCORED)}, recent_without_sinks")
    return SCORED[name](**sizes)


def measured(
    name: str,
    budget: int,
    runtime: Runtime,
    model: Model,
    plays: tuple[list[list[int]], list[np.ndarray]],
    keys: Sequence[needle.Needle],
) -> Line:
    """A line of the table, which is printed."""
    kls, nlls = [], []
    for text, exact in zip(*plays, strict=True):
        found = _logits(runtime, text)
        p, q = log_probs(exact), log_probs(found)
        kls.append(float((np.exp(p) * (p - q)).sum(axis=1).mean()))
        rest = text[_N_PROMPT.value + 1 :][: len(q) - 1]
        nlls.append(-float(np.mean(q[np.arange(len(rest)), rest])))
    start = time.perf_counter()
    n_new = sum(1 for _ in runtime.generate(64))
    seconds = time.perf_counter() - start
    line: Line = {
        "method": name,
        "budget": budget,
        "kl": round(float(np.mean(kls)), 4),
        "kls": [round(x, 4) for x in kls],
        "perplexity": round(float(np.exp(np.mean(nlls))), 2),
        "passkey_nll": round(float(np.mean([_key_nll(runtime, model, x) for x in keys])), 2)
        if keys
        else None,
        "bytes": runtime.stats().cache_bytes,
        "tokens_per_s": round(n_new / seconds, 1),
    }
    print(json.dumps(line), flush=True)
    return line


def _logits(runtime: Runtime, text: list[int]) -> np.ndarray:
    """Those of the tokens behind the prompt."""
    n = _N_PROMPT.value
    runtime.clear()
    runtime.append(text[:n])
    rest = text[n : n + _N_NEXT.value]
    return np.asarray(runtime.append(rest, out_ids=range(len(rest))))


def _key_nll(runtime: Runtime, model: Model, hidden: needle.Needle) -> float:
    asked = model.tokenizer.encode(needle.QUESTION)
    answer = model.tokenizer.encode(f"{needle.QUESTION} {hidden.key}")[len(asked) :]
    runtime.clear()
    logits = [np.asarray(runtime.append(hidden.tokens))]
    logits.append(np.asarray(runtime.append(answer, out_ids=range(len(answer))))[:-1])
    q = log_probs(np.concatenate(logits))
    return -float(q[np.arange(len(answer)), answer].sum())


def _table(lines: Sequence[Line]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = ("method", "budget", "kl", "perplexity", "passkey_nll", "bytes", "tokens_per_s")
    table = Table(*names)
    for line in sorted(lines, key=lambda line: (line["budget"], line["kl"])):
        table.add_row(*(str(line[name]) for name in names))
    Console(stderr=True).print(table)


def _draw(lines: Sequence[Line], path: str) -> None:
    """KL over the budget, a line a method."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for name in _METHODS.value:
        mine = sorted((x["budget"], x["kl"]) for x in lines if x["method"] == name)
        axis.plot(*zip(*mine, strict=True), marker="o", label=name)
    axis.set(xlabel="tokens a kv head", ylabel="KL from all tokens (nats)", yscale="log")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _draw_kept(runtime: Runtime, text: list[int], path: str) -> None:
    """Which positions each layer (down) and head keeps of a text (across)."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    runtime.clear()
    runtime.append(text)
    kept = runtime.kept_positions()
    rows = [(layer, head) for layer, by_head in kept.items() for head in range(len(by_head))]
    picture = np.zeros((len(rows), len(text)))
    for i, (layer, head) in enumerate(rows):
        picture[i, kept[layer][head]] = 1
    figure, axis = pyplot.subplots(figsize=(9, 5))
    axis.imshow(picture, aspect="auto", cmap="Greys", interpolation="none")
    axis.set(xlabel="position", ylabel="layer and kv head, first layer above")
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    app.run(main)
