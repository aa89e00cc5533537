r"""What KV dtypes and types of weights cost: perplexity, divergence from f32, agreement.

    python -m scripts.experiments.quality
    python -m scripts.experiments.quality --kinds q8_0,int4,int4+hadamard --n_texts 1 --chunk 8
    python -m scripts.experiments.quality --of weights --model gemma3-270m --kinds int8,int8/32
    python -m scripts.experiments.quality --of weights --kinds int8 --texts licence.txt,records.json

One JSON line a kind, over three plays: tokens 3,000 to 4,023 of each, of which the first 512 are
not scored. Of the cache (--of cache) a kind is a KV dtype, "+hadamard" transforms what is quantized
before it is quantized. Tokens come in --chunk at a time, and see each other as they are; all that
came before is read from the cache. So a small chunk costs time and shows what decoding shows:
--chunk 1 reads all but a token's own keys and values as they are stored. --texts names files that
are read in the plays' place, the first 1,024 tokens of each, with a line for each.

Of weights, beside an f32 cache, a kind is a type that a model can be loaded as, or "int8/N":
weights of eight bits of which at most N share a scale, multiplied in float32. "int8/32" has the
weights of llama.cpp's Q8_0, which rounds the activations to eight bits as well.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from kvrt import CacheConfig, Decoder, Runtime
from kvrt.kv_types import KeyDtype, KVDtype
from kvrt_models.layers import int8
from kvrt_models.layers.linear import Linear
from kvrt_models.load import load
from kvrt_models.weights.types import WeightType
from scripts._lib import commands, measure
from scripts.experiments import texts
from scripts.experiments.divergence import (
    CHUNK,
    N_TOKENS,
    N_UNSCORED,
    compared,
    logits_of,
    pieces,
)

# Keys and values by name.
TYPES: dict[str, tuple[KeyDtype, KVDtype]] = {
    **{name: (name, name) for name in get_args(KVDtype)},
    "K8V4": ("q8_0", "int4"),
    "K4V8": ("int4", "q8_0"),
    "kivi4": ("kivi4", "int4"),
    "kivi2": ("kivi2", "int2"),
}
# By what is made cheaper.
KINDS = {
    "cache": [*TYPES, *(f"{name}+hadamard" for name in list(TYPES)[3:])],
    "weights": ["bf16", "int8", "int8/96", "int8/64", "int8/32"],
}
_CHUNKS = {"cache": CHUNK, "weights": N_UNSCORED}

_OF = flags.DEFINE_enum("of", "cache", list(KINDS), "What is made cheaper.")
_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_KINDS = flags.DEFINE_list("kinds", [], "Which to measure, beside f32; all if left out.")
_CHUNK = flags.DEFINE_integer(
    "chunk", None, f"Tokens that come in at once, a divisor of {N_UNSCORED}.", 1, N_UNSCORED
)
_N_TEXTS = flags.DEFINE_integer("n_texts", 3, "Plays.", lower_bound=1, upper_bound=3)
_TEXTS = flags.DEFINE_list("texts", [], "Files of text that are read in place of plays.")


def main() -> None:
    kinds, chunk = asked()
    model = load(_MODEL.value, dtype="f32")
    read = readings(model.tokenizer)
    plain = runtime_of(model.decoder, "f32", chunk)
    exact = {name: [logits_of(plain, x) for x in of] for name, of in read.items()}
    cheaper: Callable[[str], Runtime] = {
        "cache": lambda kind: runtime_of(model.decoder, kind, chunk),
        "weights": lambda kind: with_weights(plain, model.decoder, kind),
    }[_OF.value]
    for kind in kinds:
        runtime = plain if kind == "f32" else cheaper(kind)
        for name, of in read.items():
            found = exact[name] if kind == "f32" else [logits_of(runtime, x) for x in of]
            cost, base = (compared(exact[name], x, of) for x in (found, exact[name]))
            change = cost.perplexity / base.perplexity - 1
            figures = {**dataclasses.asdict(cost), "change": change}
            if _OF.value == "cache":
                figures["bytes_a_token"] = bytes_a_token(runtime)
            sizes = {"model": _MODEL.value, "kind": kind, "n_texts": len(of), "chunk": chunk}
            sizes |= {"text": name} if _TEXTS.value else {}
            measure.emit(f"quality of {_OF.value}", **sizes, **figures)


def readings(tokenizer: Any) -> dict[str, list[list[int]]]:
    """Tokens of the plays together, or of each text that is asked for.

    Raises:
      UsageError: a text that cannot be read, or has too few tokens.
    """
    if not _TEXTS.value:
        return {"plays": [pieces(tokenizer, name) for name in list(texts.PLAYS)[: _N_TEXTS.value]]}
    found = {}
    for name in _TEXTS.value:
        try:
            tokens = tokenizer.encode(Path(name).read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise app.UsageError(f"--texts: {name} cannot be read as text: {error}") from error
        if len(tokens) < N_TOKENS:
            raise app.UsageError(f"--texts: {name} has {len(tokens)} tokens, {N_TOKENS} are read")
        found[name] = [tokens[:N_TOKENS]]
    return found


def asked() -> tuple[list[str], int]:
    """Kinds, each once and f32 first, and tokens that come in at once.

    Raises:
      UsageError: an unknown kind, or a chunk that does not divide what is not scored.
    """
    kinds = _KINDS.value or KINDS[_OF.value]
    chunk = _CHUNKS[_OF.value] if _CHUNK.value is None else _CHUNK.value
    if N_UNSCORED % chunk:
        raise app.UsageError(f"--chunk {chunk} does not divide {N_UNSCORED}")
    if unknown := [x for x in kinds if x not in KINDS[_OF.value] and not is_weights(x)]:
        known = ", ".join(KINDS[_OF.value])
        raise app.UsageError(f"--kinds {','.join(unknown)}: of {known}")
    return list(dict.fromkeys(["f32", *kinds])), chunk


def is_weights(kind: str) -> bool:
    """Whether weights can be so; groups of fewer than 16 are none that anybody has."""
    name, slash, most = kind.partition("/")
    grouped = name == "int8" and most.isdecimal() and int(most) >= 16
    return _OF.value == "weights" and (grouped if slash else kind in get_args(WeightType))


def runtime_of(decoder: Decoder, kind: str, chunk: int = CHUNK) -> Runtime:
    """An empty cache of a kind, to which tokens come in `chunk` at a time."""
    name, _, hadamard = kind.partition("+")
    type_k, type_v = TYPES[name]
    config = CacheConfig(
        n_ctx=N_TOKENS, n_ubatch=chunk, type_k=type_k, type_v=type_v, hadamard=bool(hadamard)
    )
    return Runtime(decoder, config)


def bytes_a_token(runtime: Runtime) -> int:
    """Bytes of the cells in use, by KV dtype."""
    n_bytes = sum(x.nbytes for x in jax.tree.leaves(runtime.cache.stores))
    return n_bytes // N_TOKENS


def with_weights(plain: Runtime, decoder: Any, kind: str) -> Runtime:
    """A runtime with weights of a kind, `plain` itself where its programs serve these too."""
    name, _, most = kind.partition("/")
    if most:
        plain.bind(rounded(decoder, int(most)))
        return plain
    dtype: Any = name  # flags know no literal types
    return Runtime(load(_MODEL.value, dtype=dtype).decoder, plain.config)


def rounded(decoder: Any, n_most: int) -> Any:
    """The decoder with every matrix rounded to eight bits a weight, in float32.

    Args:
      decoder: of float32 weights, without experts.
      n_most: inputs that share a scale, at most.
    """
    other = nnx.clone(decoder)
    for _, module in nnx.iter_modules(other):
        if not isinstance(module, Linear):
            continue
        weight = np.asarray(module.weight[...])
        sizes = range(min(n_most, weight.shape[1]), 0, -1)
        group = next(g for g in sizes if weight.shape[1] % g == 0)
        matrix = jax.tree.map(jnp.asarray, int8.quantize(weight, group))
        module.weight = nnx.Param(int8.dequantize(matrix))
    return other


if __name__ == "__main__":
    commands.run(main)
