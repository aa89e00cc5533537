"""What evictions leave of the keys: rotated in place at each, or stored without a rotation.

Run it with `python -m scripts.experiments.evictions`. Runtimes with attention sinks read the same
text in turn. Once their window is full a quarter of it is dropped at a time, and what stays moves
down: with rope="write" by a rotation of the keys in their own dtype, four times for a key that
stays to the end of the window; with rope="read" by none. One JSON line a KV dtype, the two compared
over all chunks behind the first window and over the last tenth of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from absl import app, flags

from kvrt import AttentionSinks, CacheConfig, Runtime
from kvrt.kv_types import FLOAT_DTYPES, KVDtype
from kvrt_models.load import load
from scripts._lib import commands, measure
from scripts.experiments import texts
from scripts.experiments.divergence import kl, log_probs

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_TYPES = flags.DEFINE_multi_enum(
    "type", list(FLOAT_DTYPES), list(FLOAT_DTYPES), "KV dtype; repeat it."
)
_N_CHUNKS = flags.DEFINE_integer("n_chunks", 300, "Behind the window.", lower_bound=10)
_CHUNK = flags.DEFINE_integer("chunk", 4, "Tokens of each.", lower_bound=1, upper_bound=512)
_N_WINDOW = flags.DEFINE_integer("n_window", 1024, "Cells, sinks too.", lower_bound=1024)

N_SINK = 4


def main() -> None:
    model = load(_MODEL.value, dtype="f32")
    n_tokens = _N_WINDOW.value + _N_CHUNKS.value * _CHUNK.value + 1
    tokens = model.tokenizer.encode(texts.play("hamlet"))[:n_tokens]
    if len(tokens) < n_tokens:
        raise app.UsageError(f"{n_tokens} tokens are wanted, the text has {len(tokens)}")
    n_window = _N_WINDOW.value - N_SINK
    policy = AttentionSinks(n_sink=N_SINK, n_window=n_window, n_drop=-(-n_window // 4))
    for kind in _TYPES.value:
        dtype = cast(KVDtype, kind)
        config = CacheConfig(n_ctx=_N_WINDOW.value, type_k=dtype, type_v=dtype)
        write = Runtime(model.decoder, config, policy=policy)
        read = Runtime(model.decoder, dataclasses.replace(config, rope="read"), policy=policy)
        chunks = compared(read, write, tokens)
        tenth = max(_N_CHUNKS.value // 10, 1)
        measure.emit(
            "evictions",
            **{"model": _MODEL.value, "type": kind, "n_window": _N_WINDOW.value},
            **{"chunk": _CHUNK.value, "n_evictions": write.stats().n_shift},
            n_kshift=write.stats().n_kshift,
            all=figures(chunks),
            last_tenth=figures(chunks[-tenth:]),
        )


def compared(read: Runtime, write: Runtime, tokens: Sequence[int]) -> list[dict[str, np.ndarray]]:
    """How both read each chunk behind a full window, token by token, `[T]`.

    `logits` is the greatest difference of a logit, `kl` the divergence of "write" from "read" in
    nats, `same` whether the likeliest token is the same, and the losses are those of the token that
    came next.
    """
    chunks = []
    with commands.bar(str(read.config.type_k), len(tokens)) as done:
        for runtime in (read, write):
            runtime.append(tokens[: _N_WINDOW.value])
        for first in range(_N_WINDOW.value, len(tokens) - 1, _CHUNK.value):
            part = tokens[first : first + _CHUNK.value]
            at = np.arange(len(part)), np.asarray(tokens[first + 1 : first + 1 + len(part)])
            a, b = (np.asarray(r.append(part, out_ids=range(len(part)))) for r in (read, write))
            p, q = log_probs(a), log_probs(b)
            same = a.argmax(axis=1) == b.argmax(axis=1)
            chunk = {"logits": np.abs(a - b).max(axis=1), "kl": kl(p, q), "same": same}
            chunks.append(chunk | {"losses_read": -p[at], "losses_write": -q[at]})
            done(len(part))
    return chunks


def figures(chunks: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Of all tokens of some chunks."""
    part = {name: np.concatenate([c[name] for c in chunks]) for name in chunks[0]}
    return {
        "logits_max": round(float(part["logits"].max()), 6),
        "kl_mean": float(f"{part['kl'].mean():.3g}"),
        "same_top": round(float(part["same"].mean()), 4),
        "perplexity_read": round(float(np.exp(part["losses_read"].mean())), 4),
        "perplexity_write": round(float(np.exp(part["losses_write"].mean())), 4),
    }


if __name__ == "__main__":
    commands.run(main)
