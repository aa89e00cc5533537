"""Families with recurrent layers, from a Hugging Face config.json as transformers reads it."""

import math
from typing import Any

from kvrt.config import RopeSpec
from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models import spec
from kvrt_models.header import REMEDY, Header, brief
from kvrt_models.hf import rope
from kvrt_models.layers.ssm import SsmSpec
from kvrt_models.spec import DecoderSpec, Experts, Layers

ARCHS = ("jamba", "bamba")
_MAX_SIZE = 1 << 24
# As JSON of Python has it, and as transformers writes it.
_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
# transformers rotates half of Bamba's channels unless the rules of RoPE themselves say otherwise.
_BAMBA_ROTARY = 0.5


def recurrent_spec_from_config(keys: Header, arch: str) -> DecoderSpec:
    """Reads the spec of one of `ARCHS`.

    Raises:
      UnsupportedModel: the file asks for what is unknown here.
      BadModelFile: a key is missing, of the wrong type, or contradicts another.
    """
    keys.only("hidden_act", "silu", "swish")
    n_layers = keys.whole("num_hidden_layers", most=spec.MAX_LAYERS)
    n_embd, n_heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    head_dim = spec.head_dim_of(keys, "head_dim", n_embd, n_heads)
    # Null means as many as heads, a missing key what transformers takes.
    missing = "num_key_value_heads" not in keys.values
    family = _jamba if arch == "jamba" else _bamba
    return spec.build(
        arch=arch,
        n_vocab=keys.whole("vocab_size"),
        n_embd=n_embd,
        n_ff=keys.whole("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=keys.whole("num_key_value_heads", 8 if missing else n_heads),
        head_dim=head_dim,
        n_ctx_train=keys.whole("max_position_embeddings", 262144),
        tied=keys.flag("tie_word_embeddings", False),
        qk_norm=False,
        **family(keys, n_layers, n_embd, head_dim),
    )


def _jamba(keys: Header, n_layers: int, n_embd: int, head_dim: int) -> dict[str, Any]:
    """Mamba-1 with norms, and attention without positions."""
    keys.only("sliding_window")
    period, offset = keys.whole("attn_layer_period", 8), keys.whole("attn_layer_offset", 4, least=0)
    attention = tuple(i for i in range(n_layers) if i % period == offset)
    rank = keys.values.get("mamba_dt_rank", "auto")
    auto = rank is None or rank == "auto"
    return dict(
        layers=[Layers(ids=attention, rope=None)],
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        experts=_experts(keys, n_layers),
        ssm=_ssm(
            keys,
            n_layers,
            attention,
            kind="mamba1",
            d_inner=keys.whole("mamba_expand", 2, most=_MAX_SIZE) * n_embd,
            d_state=keys.whole("mamba_d_state", 16, most=_MAX_SIZE),
            dt_rank=math.ceil(n_embd / 16) if auto else keys.whole("mamba_dt_rank"),
            norms=True,
        ),
    )


def _experts(keys: Header, n_layers: int) -> Experts | None:
    """Jamba's mixtures, in every layer of a period; one expert is a plain network."""
    n_experts = keys.whole("num_experts", 16, most=spec.MAX_EXPERTS)
    period = keys.whole("expert_layer_period", 2)
    offset = keys.whole("expert_layer_offset", 1, least=0)
    layers = tuple(i for i in range(n_layers) if i % period == offset)
    if n_experts == 1 or not layers:
        return None
    return Experts(
        layers=layers,
        n_experts=n_experts,
        n_used=keys.whole("num_experts_per_tok", 2, most=n_experts),
        n_ff=keys.whole("intermediate_size"),
        scoring="share",
    )


def _bamba(keys: Header, n_layers: int, n_embd: int, head_dim: int) -> dict[str, Any]:
    """Mamba-2, and attention that rotates a part of each head."""
    limits = keys.values.get("time_step_limit")
    if limits is not None and limits not in _NO_LIMITS:
        raise UnsupportedModel(
            f"'time_step_limit' is {brief(limits)}, which is not supported; only [0.0, Infinity]"
        )
    attention = _attention_layers(keys, n_layers)
    n_heads = keys.whole("mamba_n_heads", 128, most=_MAX_SIZE)
    d_inner = keys.whole("mamba_expand", 2, most=_MAX_SIZE) * n_embd
    width = keys.values.get("mamba_d_head")
    if width not in (None, "auto") and keys.whole("mamba_d_head") * n_heads != d_inner:
        raise BadModelFile(
            f"the model's header names {n_heads} heads of {width} for {d_inner} channels of "
            f"Mamba-2; {REMEDY}"
        )
    bias = keys.flag("attention_bias", False)
    return dict(
        layers=[Layers(ids=attention, rope=_bamba_rope(keys, head_dim))],
        norm_eps=keys.number("rms_norm_eps", 1e-5),
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=keys.flag("mlp_bias", False),
        ssm=_ssm(
            keys,
            n_layers,
            attention,
            kind="mamba2",
            d_inner=d_inner,
            d_state=keys.whole("mamba_d_state", 256, most=_MAX_SIZE),
            n_heads=n_heads,
            n_groups=keys.whole("mamba_n_groups", 1, most=_MAX_SIZE),
        ),
    )


def _attention_layers(keys: Header, n_layers: int) -> tuple[int, ...]:
    ids = keys.values.get("attn_layer_indices")
    ids = [] if ids is None else ids
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < n_layers for i in ids):
        raise BadModelFile(
            f"the model's header is damaged: 'attn_layer_indices' is {brief(ids)}, a list of "
            f"layers below {n_layers} is wanted; {REMEDY}"
        )
    return tuple(sorted(set(ids)))


def _bamba_rope(keys: Header, head_dim: int) -> RopeSpec:
    found = rope.plain_rope(keys, head_dim, "bamba", _BAMBA_ROTARY)
    keys.only("partial_rotary_factor", _BAMBA_ROTARY)
    return found


def _ssm(keys: Header, n_layers: int, attention: tuple[int, ...], **sizes: Any) -> SsmSpec | None:
    """The recurrent layers, all that are not attention; None where there are none."""
    layers = tuple(i for i in range(n_layers) if i not in attention)
    if not layers:
        return None
    return SsmSpec(
        layers=layers,
        d_conv=keys.whole("mamba_d_conv", 4, least=2, most=_MAX_SIZE),
        conv_bias=keys.flag("mamba_conv_bias", True),
        proj_bias=keys.flag("mamba_proj_bias", False),
        **sizes,
    )
