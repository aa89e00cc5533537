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
from collections.abc import Sequence
from typing import Any, get_args

import jax
from absl import app

from kvrt import CacheConfig, Runtime
from kvrt.kv_types import KeyDtype, KVDtype
from kvrt_models.load import load
from scripts.experiments import kinds
from scripts.experiments.divergence import CHUNK, N_TOKENS, compared, logits_of, pieces

# Keys and values by name; "+hadamard" transforms what is quantized before it is quantized.
TYPES: dict[str, tuple[KeyDtype, KVDtype]] = {
    **{name: (name, name) for name in get_args(KVDtype)},
    "K8V4": ("q8_0", "int4"),
    "K4V8": ("int4", "q8_0"),
    "kivi4": ("kivi4", "int4"),
    "kivi2": ("kivi2", "int2"),
}
KINDS = [*TYPES, *(f"{name}+hadamard" for name in list(TYPES)[3:])]

DEFAULT = kinds.Asked(kinds=KINDS, chunk=CHUNK)


def main(argv: Sequence[str]) -> int:
    asked = kinds.asked(argv, DEFAULT)
    if unknown := set(asked.kinds) - set(KINDS):
        raise app.UsageError(f"--kinds {', '.join(sorted(unknown))}: one of {KINDS}")
    return kinds.ended("quality", run, asked)


def run(asked: kinds.Asked) -> None:
    """All kinds over all texts."""
    model = load(asked.model, dtype="f32")
    read = [pieces(model.tokenizer, name) for name in asked.plays]
    plain = runtime_of(model.decoder, "f32", asked.chunk)
    exact = [logits_of(plain, tokens) for tokens in read]
    base = compared(exact, exact, read).perplexity
    for kind in asked.with_f32:
        runtime = plain if kind == "f32" else runtime_of(model.decoder, kind, asked.chunk)
        found = exact if kind == "f32" else [logits_of(runtime, tokens) for tokens in read]
        quality = compared(exact, found, read)
        told: dict[str, Any] = {"model": asked.model, "kind": kind, "n_texts": len(read)}
        told["chunk"] = asked.chunk
        told |= dataclasses.asdict(quality)
        told |= {"change": quality.perplexity / base - 1, "bytes_a_token": bytes_a_token(runtime)}
        print(json.dumps(told), flush=True)


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


def bytes_a_token(runtime: Runtime) -> int:
    """Bytes of the cells in use, by KV dtype."""
    n_bytes = sum(x.nbytes for x in jax.tree.leaves(runtime.cache.stores))
    return n_bytes // N_TOKENS


if __name__ == "__main__":
    app.run(main)
