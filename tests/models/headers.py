"""Headers of small models for the tests of this folder, and how a refusal must look."""

import dataclasses
import json
from pathlib import Path

import pytest
from flax import nnx

from kvrt.errors import BadModelFile, KvrtError, UnsupportedModel
from kvrt.program.programs import layer_params
from kvrt_models.decoder import Decoder
from kvrt_models.families.shared import registry
from kvrt_models.weights.shapes import weight_shapes

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"


@dataclasses.dataclass
class Shaped:
    """Stands for a tensor of the file."""

    shape: tuple[int, ...]


TENSORS = {"token_embd.weight": Shaped((300, 64)), "output.weight": Shaped((300, 64))}


def hf(arch="llama", *, without=(), **change):
    """A spec from the config.json of a golden folder with changes."""
    config = json.loads((GOLDEN / arch / "config.json").read_text()) | change
    return registry.spec_from_config({k: v for k, v in config.items() if k not in without})


def metadata(arch="llama", **change):
    """Metadata of a small model; `rope__freq_base=1.0` stands for `llama.rope.freq_base`."""
    keys = {
        "block_count": 2,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    keys |= {key.replace("__", "."): value for key, value in change.items()}
    named = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": arch, **named}


def gguf(arch="llama", tensors=None, **change):
    return registry.spec_from_gguf(metadata(arch, **change), TENSORS | (tensors or {}))


_LATENT = {
    "attention__head_count_kv": 1,
    "attention__key_length": 40,
    "attention__value_length": 32,
    "attention__key_length_mla": 24,
    "attention__value_length_mla": 20,
    "attention__kv_lora_rank": 32,
    "rope__dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 24,
    "expert_shared_count": 2,
}
# Of small models by architecture, beside what `metadata` has.
BASES = {
    "llama": {},
    "gemma2": dict(block_count=5, attention__key_length=16),
    "gemma3": dict(block_count=13, attention__key_length=16, attention__sliding_window=32),
    "gpt-oss": dict(
        block_count=3,
        attention__sliding_window=32,
        expert_count=4,
        expert_used_count=2,
        expert_feed_forward_length=48,
    ),
    "deepseek2": _LATENT,
}
_OWN_TENSORS = {
    "gpt-oss": {f"blk.0.{x}.bias": Shaped((64,)) for x in ("attn_q", "attn_output")},
    "deepseek2": {"blk.0.attn_k_b.weight": Shaped((4, 32, 16))},
}


def like(arch, tensors=None, **change):
    """A spec from the GGUF of a small model with changes."""
    tensors = _OWN_TENSORS.get(arch, {}) | (tensors or {})
    return gguf(arch, tensors, **(BASES[arch] | change))


def numbered_kinds(of):
    """The kinds of a spec's layers, numbered in the order in which they come."""
    decoder = Decoder(of, weight_shapes(of, "f32"))
    kinds = layer_params(decoder, nnx.split(decoder)[1]).kinds
    numbers = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    return [numbers[kind] for kind in kinds]


def refused(words, call):
    with pytest.raises(KvrtError) as caught:
        call()
    assert type(caught.value) in (BadModelFile, UnsupportedModel)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
