"""DeepSeek-V2 and V3 from the metadata of a GGUF file, as llama.cpp reads it (`deepseek2.cpp`)."""

from collections.abc import Callable, Mapping
from typing import Any

from kvrt.config import RopeSpec
from kvrt.errors import UnsupportedModel
from kvrt_models import spec
from kvrt_models.header import Header
from kvrt_models.layers.latent_sizes import Latent
from kvrt_models.spec import DecoderSpec, Experts, Layers

ARCH = "deepseek2"
# Of gating functions; 1 is softmax, and so is 0, which names none.
_SIGMOID = 2


def latent_spec_from_gguf(
    keys: Header, tensors: Mapping[str, Any], n_vocab: int, rope_of: Callable[[int], RopeSpec]
) -> DecoderSpec:
    """Reads the spec of a model whose layers keep latents.

    Args:
      keys: the metadata, asked for what is the architecture's own.
      tensors: tensor descriptions by name.
      n_vocab: rows of the embedding.
      rope_of: reads the rotation of so many channels.

    Raises:
      UnsupportedModel: the file has keys and values in one tensor, or asks for the unknown.
      BadModelFile: a key is missing, of the wrong type, or contradicts another.
    """
    n_layers = keys.whole("block_count", most=spec.MAX_LAYERS)
    latent, rope = _latent(keys, tensors), rope_of(keys.whole("rope.dimension_count"))
    experts = _experts(keys, tensors, n_layers)
    return spec.build(
        layers=[Layers(ids=tuple(range(n_layers)), rope=rope, latent_rank=latent.rank)],
        n_kv_heads=1,
        head_dim=latent.rank + latent.n_rope,
        scale=_scale(keys, rope, latent),
        arch=ARCH,
        n_vocab=n_vocab,
        n_embd=keys.whole("embedding_length"),
        n_ff=keys.whole("feed_forward_length"),
        n_heads=keys.whole("attention.head_count"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        n_ctx_train=keys.whole("context_length"),
        tied="output.weight" not in tensors,
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        qk_norm=False,
        latent=latent,
        experts=experts,
    )


def _latent(keys: Header, tensors: Mapping[str, Any]) -> Latent:
    if "blk.0.attn_k_b.weight" not in tensors:
        raise UnsupportedModel(
            "a deepseek2 without the tensors 'attn_k_b' and 'attn_v_b' is not supported; convert "
            "the model with a llama.cpp of April 2025 or later"
        )
    most = spec.MAX_HEAD_DIM
    rank, n_rope = (
        keys.whole("attention.kv_lora_rank", most=most),
        keys.whole("rope.dimension_count", most=most),
    )
    head = keys.whole("attention.key_length_mla", least=n_rope + 1, most=2 * most)
    for name, wanted in (("attention.key_length", rank + n_rope), ("attention.value_length", rank)):
        keys.only(name, wanted)
    keys.only("attention.head_count_kv", 1)
    # Mistral Large 3, which goes by the same name.
    keys.only("attention.temperature_scale", 0.0)
    return Latent(
        rank=rank,
        n_rope=n_rope,
        n_nope=head - n_rope,
        n_value=keys.whole("attention.value_length_mla", most=most),
        q_rank=keys.whole("attention.q_lora_rank", 0, least=0),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
    )


def _scale(keys: Header, rope: RopeSpec, latent: Latent) -> float:
    """1 / sqrt of a head's channels; with YaRN times the square of its growth."""
    width = latent.n_nope + latent.n_rope
    if rope.scaling != "yarn":
        return width**-0.5
    # Converters write a tenth of `mscale_all_dim`.
    growth = keys.number("rope.scaling.yarn_log_multiplier", 0.0, zero=True) / 0.1
    own = 1.0 if rope.magnitude is None else rope.magnitude
    return width**-0.5 * (own * spec.yarn_magnitude(rope.factor, growth)) ** 2


def _experts(keys: Header, tensors: Mapping[str, Any], n_layers: int) -> Experts | None:
    """Softmax of all scores, or sigmoids with biases and groups."""
    first = keys.whole("leading_dense_block_count", 0, least=0)
    if first >= n_layers:
        return None
    n = keys.whole("expert_count", most=spec.MAX_EXPERTS)
    n_ff, shared = keys.whole("expert_feed_forward_length"), keys.whole("expert_shared_count")
    sigmoid = keys.whole("expert_gating_func", 0, least=0, most=_SIGMOID) == _SIGMOID
    shares = keys.flag("expert_weights_norm", False)
    n_groups = keys.whole("expert_group_count", 1, least=0) or 1
    n_used = keys.whole("expert_used_count", most=n)
    if n_groups > 1 and not sigmoid:
        raise UnsupportedModel(
            f"a deepseek2 that chooses by softmax among {n_groups} groups of experts is not "
            "supported from a GGUF; load the model's Hugging Face folder"
        )
    n_open = keys.whole("expert_group_used_count", n_groups, most=n_groups) if n_groups > 1 else 1
    spec.check_expert_groups(n, n_groups, n_open, n_used, 2 if n_groups > 1 else 1)
    by_softmax = "softmax" if shares else "share"
    return Experts(
        layers=tuple(range(first, n_layers)),
        n_experts=n,
        n_used=n_used,
        n_ff=n_ff,
        scoring=("sigmoid_share" if shares else "sigmoid_each") if sigmoid else by_softmax,
        n_ff_shared=n_ff * shared,
        scale=keys.number("expert_weights_scale", 1.0, zero=True) or 1.0,
        n_groups=n_groups,
        n_groups_used=n_open,
        choice_bias=f"blk.{first}.exp_probs_b.bias" in tensors,
    )
