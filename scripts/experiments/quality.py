r"""What KV dtypes cost: perplexity, divergence from an f32 cache, agreement, bytes a token.

Run it with `python -m scripts.experiments.quality`. One JSON line a kind, over three plays: tokens
3,000 to 4,023 of each, of which the first 512 are not scored. Tokens come in --chunk at a time, and
see each other as they are; all that came before is read from the cache. So a small chunk costs time
and shows what decoding shows: --chunk 1 reads all but a token's own keys and values as they are
stored.

    python -m scripts.experiments.quality --kinds q8_0,int4,int4+hadamard --n_texts 1 --chunk 8
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any, get_args

import jax
import numpy as np
from absl import app, flags

from kvrt import CacheConfig, Runtime
from kvrt.errors import KvrtError
from kvrt.kv_types import KeyDtype, KVDtype
from kvrt_models.load import load
from scripts._lib import texts

FIRST, N_TOKENS, N_UNSCORED, CHUNK = 3000, 1024, 512, 64
# Keys and values by name; "+hadamard" transforms what is quantized before it is quantized.
TYPES: dict[str, tuple[KeyDtype, KVDtype]] = {
    **{name: (name, name) for name in get_args(KVDtype)},
    "K8V4": ("q8_0", "int4"),
    "K4V8": ("int4", "q8_0"),
    "kivi4": ("kivi4", "int4"),
    "kivi2": ("kivi2", "int2"),
}
KINDS = [*TYPES, *(f"{name}+hadamard" for name in list(TYPES)[3:])]

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_KINDS = flags.DEFINE_list("kinds", KINDS, "Which to measure, beside f32.")
_CHUNK = flags.DEFINE_integer(
    "chunk", CHUNK, "Tokens that come in at once, a divisor of 512.", lower_bound=1, upper_bound=512
)
_N_TEXTS = flags.DEFINE_integer("n_texts", 3, "Plays.", lower_bound=1, upper_bound=3)

Logits = np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """What a KV dtype gives beside an f32 cache, over all scored tokens.

    Attributes:
      perplexity: of the scored tokens.
      kl: mean divergence of its distributions from those of an f32 cache, in nats.
      top1: share of tokens whose most probable one is the same.
    """

    perplexity: float
    kl: float
    top1: float


def main(argv: Sequence[str]) -> int:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if unknown := set(_KINDS.value) - set(KINDS):
        raise app.UsageError(f"--kinds {', '.join(sorted(unknown))}: one of {KINDS}")
    if N_UNSCORED % _CHUNK.value:
        raise app.UsageError(f"--chunk {_CHUNK.value} does not divide {N_UNSCORED}")
    try:
        run()
    except KvrtError as error:
        print(f"quality: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run() -> None:
    """All kinds over all texts."""
    model = load(_MODEL.value)
    read = [pieces(model.tokenizer, name) for name in list(texts.PLAYS)[: _N_TEXTS.value]]
    plain = runtime_of(model.decoder, "f32", _CHUNK.value)
    exact = [logits_of(plain, tokens) for tokens in read]
    base = compared(exact, exact, read).perplexity
    for kind in dict.fromkeys(["f32", *_KINDS.value]):
        runtime = plain if kind == "f32" else runtime_of(model.decoder, kind, _CHUNK.value)
        found = exact if kind == "f32" else [logits_of(runtime, tokens) for tokens in read]
        quality = compared(exact, found, read)
        told: dict[str, Any] = {"model": _MODEL.value, "kind": kind, "n_texts": len(read)}
        told["chunk"] = _CHUNK.value
        told |= dataclasses.asdict(quality)
        told |= {"change": quality.perplexity / base - 1, "bytes_a_token": bytes_a_token(runtime)}
        print(json.dumps(told), flush=True)


def pieces(tokenizer: Any, name: str) -> list[int]:
    """Tokens of a play that are read."""
    return tokenizer.encode(texts.play(name))[FIRST : FIRST + N_TOKENS]


def runtime_of(decoder: Any, kind: str, chunk: int = CHUNK) -> Runtime:
    """An empty cache of a kind, to which tokens come in `chunk` at a time."""
    name, _, turned = kind.partition("+")
    type_k, type_v = TYPES[name]
    config = CacheConfig(
        n_ctx=N_TOKENS,
        n_ubatch=chunk,
        type_k=type_k,
        type_v=type_v,
        hadamard=bool(turned),
    )
    return Runtime(decoder, config)


def logits_of(runtime: Runtime, tokens: Sequence[int], n_first: int = 0) -> Logits:
    """Logits of the tokens from the unscored ones on, without the last: [n, V].

    Args:
      runtime: holds the first n_first of the tokens, or something else where that is 0.
      tokens: of a text.
      n_first: how many it holds.
    """
    if not n_first:
        runtime.clear()
    out, chunk = [], runtime.config.n_ubatch
    for start in range(n_first, len(tokens), chunk):
        part = tokens[start : start + chunk]
        logits = runtime.append(part, out_ids=range(len(part)))
        if start >= N_UNSCORED:
            out.append(np.asarray(logits))  # sync: what a chunk gives is kept on the host
    return np.concatenate(out)[:-1]


def compared(
    exact: Sequence[Logits], found: Sequence[Logits], read: Sequence[Sequence[int]]
) -> Quality:
    """Logits of each text beside those of an f32 cache."""
    losses, kls, same = [], [], []
    for a, b, tokens in zip(exact, found, read, strict=True):
        for at in range(0, len(a), CHUNK):
            p, q = (log_probs(x[at : at + CHUNK]) for x in (a, b))
            targets = np.asarray(tokens[N_UNSCORED + at + 1 :][: len(p)])
            losses.append(-q[np.arange(len(q)), targets])
            kls.append((np.exp(p) * (p - q)).sum(axis=1))
            same.append(p.argmax(axis=1) == q.argmax(axis=1))
    mean = [float(np.concatenate(x).mean()) for x in (losses, kls, same)]
    return Quality(perplexity=float(np.exp(mean[0])), kl=mean[1], top1=mean[2])


def log_probs(logits: Logits) -> np.ndarray:
    """In float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def bytes_a_token(runtime: Runtime) -> int:
    """Bytes of the cells in use, by KV dtype."""
    n_bytes = sum(x.nbytes for x in jax.tree.leaves(runtime.cache.stores))
    return n_bytes // N_TOKENS


if __name__ == "__main__":
    app.run(main)
