"""Programs of a small decoder by the type of its weights, compiled without weights.

Its matrices are far larger than all else that a decode step holds.
"""

import json
import math
import tempfile
from pathlib import Path

import jax

from kvrt import CacheConfig, Runtime, Sampling
from kvrt.program import sample
from kvrt.program.decode_loop import LoopSpec
from kvrt_models.decoder import Decoder
from kvrt_models.layers.int8 import Int8Matrix
from kvrt_models.load import Described, describe_model

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
# Eight groups of inputs for each output of `down`, three for the others.
SIZES = {
    "hidden_size": 288,
    "intermediate_size": 512,
    "num_attention_heads": 9,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
}


def described(dtype: str, arch: str = "llama", **change) -> Described:
    """A decoder of the family, with other sizes."""
    config = json.loads((GOLDEN / arch / "config.json").read_text()) | change
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        return describe_model(path, dtype=dtype)


def small(dtype: str, n_layers: int = 1) -> Described:
    return described(dtype, **SIZES, num_hidden_layers=n_layers)


def decode_program(of: Described) -> jax.stages.Compiled:
    """The decode step as a `Runtime` compiles it."""
    device = _runtime(of, 16)._cache.device
    sampler = sample.create(Sampling(), [[]])
    return _compiled(device, lambda begin: device.begin_decode(begin, LoopSpec(), sampler))


def prompt_program(of: Described, n_tokens: int) -> jax.stages.Compiled:
    """A step of so many tokens of a prompt."""
    device = _runtime(of, n_tokens)._cache.device
    return _compiled(device, lambda begin: device.begin_prompt(begin, n_tokens))


def smallest_product(of: Described) -> int:
    """Numbers of the smallest matrix."""
    weights = [w.values if isinstance(w, Int8Matrix) else w for w in of.weights.values()]
    return min(math.prod(w.shape) for w in weights if len(w.shape) > 1)


def matrices(of: Described) -> list[Int8Matrix]:
    """Every matrix that a token is multiplied with: the head too, where it is the embedding."""
    found = [w for w in of.weights.values() if isinstance(w, Int8Matrix)]
    return found if of.spec.tied else found[:-1]


def _runtime(of: Described, n_ubatch: int) -> Runtime:
    sizes = {"n_ctx": 2 * n_ubatch, "block_size": 16, "n_ubatch": n_ubatch}
    types = {"type_k": "f32", "type_v": "f32", "programs": "whole"}
    return Runtime(Decoder(of.spec, of.weights), CacheConfig(**sizes, **types))


def _compiled(device, wanted) -> jax.stages.Compiled:
    device.programs.compile_all(wanted, lambda _: None)
    (program,) = device.programs.compiled().values()
    return program
