"""What evictions leave of the keys: rotated in place at each, or stored without a rotation.

Run it with `python -m scripts.experiments.evictions`. Runtimes with attention sinks read the same
text in turn. Once their window is full a quarter of it is dropped at a time, and what stays moves
down: with rope="write" by a rotation of the keys in their own dtype, four times for a key that
stays to the end of the window; with rope="read" by none. One JSON line a KV dtype, the two compared
over all chunks behind the first window and over the last tenth of them.
"""

import dataclasses
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from kvrt import AttentionSinks, CacheConfig, Runtime
from kvrt.kv_types import FLOAT_DTYPES, KVDtype
from kvrt_models.load import load
from scripts._lib import commands, measure
from scripts.experiments import texts

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_TYPES = flags.DEFINE_multi_enum(
    "type", list(FLOAT_DTYPES), list(FLOAT_DTYPES), "KV dtype; repeat it."
)
_N_CHUNKS = flags.DEFINE_integer("n_chunks", 300, "Behind the window.", lower_bound=10)
_CHUNK = flags.DEFINE_integer("chunk", 4, "Tokens of each.", lower_bound=1, upper_bound=512)
_N_WINDOW = flags.DEFINE_integer("n_window", 1024, "Cells, sinks too.", lower_bound=1024)

N_SINK = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Differences:
    """How two readings of a chunk differ, token by token, `[T]`.

    Attributes:
      logits: greatest difference of a logit.
      kl: divergence of "write" from "read", in nats.
      same: whether the likeliest token is the same.
      losses_read: negative log-likelihood of the token that came next.
      losses_write: the same, for "write".
    """

    logits: np.ndarray
    kl: np.ndarray
    same: np.ndarray
    losses_read: np.ndarray
    losses_write: np.ndarray


def main() -> None:
    model = load(_MODEL.value, dtype="f32")
    n_tokens = _N_WINDOW.value + _N_CHUNKS.value * _CHUNK.value + 1
    tokens = model.tokenizer.encode(texts.play("hamlet"))[:n_tokens]
    if len(tokens) < n_tokens:
        raise app.UsageError(f"{n_tokens} tokens are wanted, the text has {len(tokens)}")
    n_window = _N_WINDOW.value - N_SINK
    policy = AttentionSinks(n_sink=N_SINK, n_window=n_window, n_drop=-(-n_window // 4))
    for kind in _TYPES.value:
        rows = cast(KVDtype, kind)
        config = CacheConfig(n_ctx=_N_WINDOW.value, type_k=rows, type_v=rows)
        write = Runtime(model.decoder, config, policy=policy)
        config = dataclasses.replace(config, rope="read")
        read = Runtime(model.decoder, config, policy=policy)
        found = compared(read, write, tokens)
        counts = {"n_evictions": write.stats().n_shift, "n_kshift": write.stats().n_kshift}
        told = {"model": _MODEL.value, "type": kind, "n_window": _N_WINDOW.value}
        tenth = _CHUNK.value * max(_N_CHUNKS.value // 10, 1)
        told |= {"chunk": _CHUNK.value, **counts, "all": figures(found)}
        measure.emit("evictions", **told, last_tenth=figures(found, tenth))


def compared(read: Runtime, write: Runtime, tokens: Sequence[int]) -> Differences:
    """Both read the tokens; what is compared is what comes behind a full window."""
    chunks = []
    with commands.bar(str(read.config.type_k), len(tokens)) as done:
        for runtime in (read, write):
            runtime.append(tokens[: _N_WINDOW.value])
        for first in range(_N_WINDOW.value, len(tokens) - 1, _CHUNK.value):
            part = tokens[first : first + _CHUNK.value]
            targets = np.asarray(tokens[first + 1 : first + 1 + len(part)], np.int32)
            logits = [r.append(part, out_ids=range(len(part))) for r in (read, write)]
            chunks.append(jax.tree.map(np.asarray, differences(*logits, targets)))  # sync: figures
            done(len(part))
    return Differences(**{name: np.concatenate([c[name] for c in chunks]) for name in chunks[0]})


@jax.jit
def differences(read: jax.Array, write: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """The fields of `Differences`, of one chunk's logits, `[T, V]`."""
    log_read, log_write = jax.nn.log_softmax(read), jax.nn.log_softmax(write)
    at = targets[:, None]
    return {
        "logits": jnp.abs(read - write).max(axis=1),
        "kl": (jnp.exp(log_read) * (log_read - log_write)).sum(axis=1),
        "same": read.argmax(axis=1) == write.argmax(axis=1),
        "losses_read": -jnp.take_along_axis(log_read, at, axis=1)[:, 0],
        "losses_write": -jnp.take_along_axis(log_write, at, axis=1)[:, 0],
    }


def figures(found: Differences, last: int | None = None) -> dict[str, float]:
    """Of all tokens, or of the last."""
    part = {
        f.name: getattr(found, f.name)[-last if last else 0 :] for f in dataclasses.fields(found)
    }
    return {
        "logits_max": round(float(part["logits"].max()), 6),
        "kl_mean": float(f"{part['kl'].mean():.3g}"),
        "same_top": round(float(part["same"].mean()), 4),
        "perplexity_read": round(float(np.exp(part["losses_read"].mean())), 4),
        "perplexity_write": round(float(np.exp(part["losses_write"].mean())), 4),
    }


if __name__ == "__main__":
    commands.run(main)
