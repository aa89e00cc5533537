r"""What weight types cost: perplexity, divergence from f32 weights, agreement.

Run it with `python -m scripts.experiments.weights`. One JSON line a kind, over three plays as in
`quality.py`, with an f32 cache. The kinds are the types that a model can be loaded as, and
"int8/N": weights of eight bits of which at most N share a scale, multiplied in float32. "int8/32"
has the weights of llama.cpp's Q8_0, which rounds the activations to eight bits as well.

    python -m scripts.experiments.weights --model gemma3-270m --kinds int8,int8/32 --chunk 8
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from absl import app
from flax import nnx

from kvrt import CacheConfig, Runtime
from kvrt_models.decoder import Decoder
from kvrt_models.layers import int8
from kvrt_models.layers.linear import Linear
from kvrt_models.load import load
from kvrt_models.weights.types import WeightType
from scripts.experiments import kinds
from scripts.experiments.divergence import N_TOKENS, compared, logits_of, pieces

KINDS = ["bf16", "int8", "int8/96", "int8/64", "int8/32"]

DEFAULT = kinds.Asked(kinds=KINDS, chunk=512)


def main(argv: Sequence[str]) -> int:
    asked = kinds.asked(argv, DEFAULT)
    if strange := [kind for kind in asked.kinds if not known(kind)]:
        types = ", ".join(get_args(WeightType))
        raise app.UsageError(f"--kinds {','.join(strange)}: {types}, or int8/N")
    return kinds.ended("weights", run, asked)


def known(kind: str) -> bool:
    """Whether there is such a kind; groups of fewer than 16 are none that anybody has."""
    name, slash, most = kind.partition("/")
    grouped = name == "int8" and most.isdecimal() and int(most) >= 16
    return grouped if slash else kind in get_args(WeightType)


def run(asked: kinds.Asked) -> None:
    """All kinds over all texts."""
    model, config = (
        load(asked.model, dtype="f32"),
        CacheConfig(n_ctx=N_TOKENS, n_ubatch=asked.chunk, type_k="f32", type_v="f32"),
    )
    read = [pieces(model.tokenizer, name) for name in asked.plays]
    wide = Runtime(model.decoder, config)
    exact = [logits_of(wide, tokens) for tokens in read]
    base = compared(exact, exact, read).perplexity
    for kind in asked.with_f32:
        if kind == "f32" or "/" in kind:
            decoder = model.decoder if kind == "f32" else rounded(model.decoder, most(kind))
            runtime = wide
            runtime.bind(decoder)
        else:
            dtype: Any = kind  # flags know no literal types
            runtime = Runtime(load(asked.model, dtype=dtype).decoder, config)
        quality = compared(exact, [logits_of(runtime, tokens) for tokens in read], read)
        told: dict[str, Any] = {"model": asked.model, "kind": kind, "n_texts": len(read)}
        told |= {"chunk": asked.chunk, **dataclasses.asdict(quality)}
        told |= {"change": quality.perplexity / base - 1}
        print(json.dumps(told), flush=True)


def most(kind: str) -> int:
    """N of "int8/N"."""
    return int(kind.partition("/")[2])


def rounded(decoder: Decoder, n_most: int) -> Decoder:
    """The decoder with every matrix rounded to eight bits a weight, in float32.

    Args:
      decoder: of float32 weights, without experts.
      n_most: inputs that share a scale, at most.
    """
    other = nnx.clone(decoder)
    for module in linears(other):
        weight = np.asarray(module.weight[...])
        sizes = range(min(n_most, weight.shape[1]), 0, -1)
        group = next(g for g in sizes if weight.shape[1] % g == 0)
        matrix = jax.tree.map(jnp.asarray, int8.quantize(weight, group))
        module.weight = nnx.Param(int8.dequantize(matrix))
    return other


def linears(decoder: Decoder) -> list[Linear]:
    """All matrices of a decoder."""
    return [module for _, module in nnx.iter_modules(decoder) if isinstance(module, Linear)]


if __name__ == "__main__":
    app.run(main)
