"""Qwen3-Next from a Hugging Face config.json, as transformers reads it."""

from typing import Any

from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models import spec
from kvrt_models.header import REMEDY, Header, brief
from kvrt_models.hf import rope
from kvrt_models.layers.ssm import SsmSpec
from kvrt_models.spec import DecoderSpec, Experts, Layers

ARCH = "qwen3_next"
_DELTA, _FULL = "linear_attention", "full_attention"
_MAX_SIZE = 1 << 20


def qwen3_next_spec_from_config(keys: Header) -> DecoderSpec:
    """Reads the spec: Gated DeltaNet and gated attention, a mixture of experts in most layers.

    Raises:
      UnsupportedModel: the file asks for what is unknown here.
      BadModelFile: a key is missing, of the wrong type, or contradicts another.
    """
    keys.only("hidden_act", "silu", "swish")
    n_layers = keys.whole("num_hidden_layers", most=spec.MAX_LAYERS)
    head_dim = keys.whole("head_dim", 256, most=spec.MAX_HEAD_DIM)
    bias = keys.flag("attention_bias", False)
    attention = _attention_layers(keys, n_layers)
    return spec.build(
        arch=ARCH,
        layers=[Layers(ids=attention, rope=rope.plain_rope(keys, head_dim, ARCH, 0.25))],
        n_vocab=keys.whole("vocab_size"),
        n_embd=keys.whole("hidden_size"),
        n_ff=keys.whole("intermediate_size", 5632),
        n_heads=keys.whole("num_attention_heads"),
        n_kv_heads=keys.whole("num_key_value_heads", 2),
        head_dim=head_dim,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        n_ctx_train=keys.whole("max_position_embeddings", 32768),
        tied=keys.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=False,
        qk_norm=True,
        attn_gate=True,
        experts=_experts(keys, n_layers),
        ssm=_delta(keys, tuple(i for i in range(n_layers) if i not in attention)),
    )


def _attention_layers(keys: Header, n_layers: int) -> tuple[int, ...]:
    """Layers with attention: as `layer_types` says, or the last of each few."""
    period = keys.whole("full_attention_interval", 4)
    usual = [_DELTA if (i + 1) % period else _FULL for i in range(n_layers)]
    kinds = keys.values.get("layer_types") or usual
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        raise BadModelFile(
            f"the model's header is damaged: 'layer_types' is {brief(kinds)}, a list of "
            f"{n_layers} names is wanted; {REMEDY}"
        )
    for kind in kinds:
        if kind not in (_DELTA, _FULL):
            raise UnsupportedModel(
                f"layers of kind {brief(kind)} are not supported in {ARCH}; only {_DELTA} and "
                f"{_FULL}"
            )
    return tuple(i for i, kind in enumerate(kinds) if kind == _FULL)


def _experts(keys: Header, n_layers: int) -> Experts | None:
    n_experts = keys.whole("num_experts", 512, least=0, most=spec.MAX_EXPERTS)
    period, dense = keys.whole("decoder_sparse_step", 1), keys.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(i) is not int for i in dense):
        raise BadModelFile(
            f"the model's header is damaged: 'mlp_only_layers' is {brief(dense)}, a list of layers "
            f"is wanted; {REMEDY}"
        )
    layers = tuple(i for i in range(n_layers) if i not in dense and (i + 1) % period == 0)
    if not n_experts or not layers:
        return None
    return Experts(
        layers=layers,
        n_experts=n_experts,
        n_used=keys.whole("num_experts_per_tok", 10, most=n_experts),
        n_ff=keys.whole("moe_intermediate_size", 512),
        scoring="softmax" if keys.flag("norm_topk_prob", True) else "share",
        n_ff_shared=keys.whole("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def _delta(keys: Header, layers: tuple[int, ...]) -> SsmSpec | None:
    """The layers of the gated delta rule; None where there are none."""
    if not layers:
        return None
    sizes: dict[str, Any] = dict(most=_MAX_SIZE)
    n_heads = keys.whole("linear_num_value_heads", 32, **sizes)
    return SsmSpec(
        kind="delta",
        layers=layers,
        d_inner=n_heads * keys.whole("linear_value_head_dim", 128, **sizes),
        d_state=keys.whole("linear_key_head_dim", 128, **sizes),
        d_conv=keys.whole("linear_conv_kernel_dim", 4, least=2, most=_MAX_SIZE),
        n_heads=n_heads,
        n_groups=keys.whole("linear_num_key_heads", 16, **sizes),
        conv_bias=False,
    )
