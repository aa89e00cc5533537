"""A `DecoderSpec` from a Hugging Face config.json, as transformers reads it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvrt.errors import UnsupportedModel
from kvrt_models import spec
from kvrt_models.header import Header, brief, check_known
from kvrt_models.hf import experts as hf_experts
from kvrt_models.hf import hybrid as hf_hybrid
from kvrt_models.hf import latent as hf_latent
from kvrt_models.hf import recurrent as hf_recurrent
from kvrt_models.hf import rope as hf_rope
from kvrt_models.hf.gemma.gemma3n import ARCH as GEMMA3N
from kvrt_models.hf.gemma.gemma3n import gemma3n, one_width
from kvrt_models.hf.gemma.gemma4 import ARCH as GEMMA4
from kvrt_models.hf.gemma.gemma4 import gemma4
from kvrt_models.hf.hybrid import FULL, WINDOWED
from kvrt_models.hf.kimi_linear import ARCH as KIMI_LINEAR
from kvrt_models.hf.kimi_linear import kimi_linear_spec_from_config
from kvrt_models.hf.qwen3_next import ARCH as QWEN3_NEXT
from kvrt_models.hf.qwen3_next import qwen3_next_spec_from_config
from kvrt_models.hf.yoco import ARCH as YOCO
from kvrt_models.hf.yoco import yoco
from kvrt_models.spec import DecoderSpec, Layers

# Families whose layers are all alike, and the others by what reads them.
_PLAIN = ("llama", "mistral", "qwen2", "qwen3")
_HYBRID = {
    "gemma2": hf_hybrid.gemma2,
    "gemma3_text": hf_hybrid.gemma3,
    GEMMA3N: gemma3n,
    GEMMA4: gemma4,
    "gpt_oss": hf_experts.gpt_oss,
    "llama4_text": hf_experts.llama4,
    "deepseek_v2": hf_latent.deepseek,
    "deepseek_v3": hf_latent.deepseek,
    hf_latent.INDEXED: hf_latent.deepseek,
    YOCO: yoco,
}
# Models of several kinds of input, of which the text part alone is read.
_TEXT_PARTS = {"llama4": "llama4_text"}
# Such models of which no part is read, and what their text models are called.
_WITH_PICTURES = {"gemma3n": GEMMA3N, "gemma4": GEMMA4}
ARCHS = (*_PLAIN, *_HYBRID, *_TEXT_PARTS, *hf_recurrent.ARCHS, QWEN3_NEXT, KIMI_LINEAR)
# Families whose files hold the weights of norms less one.
NORMS_LESS_ONE = ("gemma2", "gemma3_text", QWEN3_NEXT)
# Channels of a head where a file does not say; the others divide the width by the heads.
_HEAD_DIMS = {
    **dict.fromkeys(("gemma2", "gemma3_text", GEMMA3N, GEMMA4), 256),
    **{"gpt_oss": 64, "llama4_text": 128},
}


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a spec from a Hugging Face config.json.

    Raises:
      UnsupportedModel: the model type is not one of `ARCHS`, or uses what is unknown here.
      BadModelFile: a key is missing, of the wrong type, or contradicts another.
    """
    keys = Header(config)
    arch = keys.text("model_type")
    if arch in _WITH_PICTURES:
        raise UnsupportedModel(
            f"model type {arch!r} of config.json has parts for pictures and sound, which are not "
            f"supported; take its text model, of type {_WITH_PICTURES[arch]}"
        )
    check_known(arch, "model type {} of config.json", ARCHS)
    _refuse_quantized(keys)
    if arch in hf_recurrent.ARCHS:
        return hf_recurrent.recurrent_spec_from_config(keys, arch)
    if arch == QWEN3_NEXT:
        return qwen3_next_spec_from_config(keys)
    if arch == KIMI_LINEAR:
        return kimi_linear_spec_from_config(keys)
    if arch in _TEXT_PARTS:
        keys = keys.inner("text_config")
        keys.only("model_type", _TEXT_PARTS[arch])
        _refuse_quantized(keys)
        return dataclasses.replace(_described(keys, _TEXT_PARTS[arch]), arch=arch)
    return _described(one_width(keys) if arch == GEMMA3N else keys, arch)


def _described(keys: Header, arch: str) -> DecoderSpec:
    bias = _bias(keys, arch)
    n_layers = keys.whole("num_hidden_layers", most=spec.MAX_LAYERS)
    n_embd, n_heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    usual = _HEAD_DIMS.get(arch)
    head_dim = (
        keys.whole("head_dim", usual, most=spec.MAX_HEAD_DIM)
        if usual
        else spec.head_dim_of(keys, "head_dim", n_embd, n_heads)
    )
    family = _HYBRID.get(arch, _plain)
    shared: dict[str, Any] = dict(
        arch=arch,
        n_vocab=keys.whole("vocab_size"),
        n_embd=n_embd,
        n_ff=keys.whole("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=_kv_heads(keys, arch, n_heads),
        head_dim=head_dim,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        n_ctx_train=keys.whole("max_position_embeddings"),
        tied=keys.flag("tie_word_embeddings", arch in NORMS_LESS_ONE),
        qkv_bias=bias or arch == "qwen2",
        out_bias=bias,
        ffn_bias=keys.flag("mlp_bias", False),
        qk_norm=arch == "qwen3",
    )
    return spec.build(**(shared | family(keys, arch, n_layers, head_dim)))


def _kv_heads(keys: Header, arch: str, n_heads: int) -> int:
    """Null means as many as heads; a missing key means that for llama only."""
    may_lack = arch == "llama" or "num_key_value_heads" in keys.values
    return keys.whole("num_key_value_heads", n_heads if may_lack else None)


def _bias(keys: Header, arch: str) -> bool:
    """Whether all four projections have biases; qwen2's three stand whatever the key says."""
    if arch == "mistral":
        keys.only("attention_bias", False)
    if arch != "llama":
        keys.only("mlp_bias", False)
    return keys.flag("attention_bias", arch == "gpt_oss") and arch != "qwen2"


def _refuse_quantized(keys: Header) -> None:
    method = keys.inner("quantization_config").values.get("quant_method")
    if method is not None:
        raise UnsupportedModel(
            f"weights quantized by {brief(method)} are not supported; take the model in bf16 or "
            "f32, or as a GGUF"
        )
    keys.only("quantization_config")


def _plain(keys: Header, arch: str, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Families whose layers are all alike."""
    keys.only("hidden_act", "silu", "swish")
    kind = Layers(
        ids=tuple(range(n_layers)),
        rope=hf_rope.shared_rope(keys, head_dim),
        window=_window(keys, arch, n_layers),
    )
    return dict(layers=[kind])


def _window(keys: Header, arch: str, n_layers: int) -> int:
    """Tokens that every layer sees, 0 for all; windows in some layers only are refused."""
    if arch == "llama":
        return 0
    off = "sliding_window" in keys.values and not keys.has("sliding_window")
    # No token would see anything in a Mistral with a window of 0; others may say 0 for none.
    size = 0 if off else keys.whole("sliding_window", 4096, least=int(arch == "mistral"))
    if arch == "mistral":
        kinds, usual = [], WINDOWED if size else FULL
    else:
        first = keys.whole("max_window_layers", 28, least=0)
        windowed = keys.flag("use_sliding_window", False) and size and first < n_layers
        kinds, usual = [WINDOWED] if windowed else [], FULL
    kinds = keys.values.get("layer_types") or kinds
    if not isinstance(kinds, list) or any(kind != usual for kind in kinds):
        raise UnsupportedModel(
            f"{arch} with layer_types or a sliding window that differ by layer is not supported; "
            f"every layer must be {usual!r}"
        )
    return size if arch == "mistral" else 0
