"""A `DecoderSpec` from a Hugging Face config.json, as transformers reads it."""

import math
from collections.abc import Mapping
from typing import Any

from kvrt.config import RopeSpec
from kvrt.errors import BadModelFile, UnsupportedModel
from models import hf_recurrent, spec
from models.header import REMEDY, Header, show
from models.spec import DecoderSpec, Layers

ARCHS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", *hf_recurrent.ARCHS)
# Families whose files hold the weights of norms less one.
NORMS_LESS_ONE = ("gemma3_text",)
_NEAR, _FAR = "sliding_attention", "full_attention"
# RoPE scaling by transformers' names, and ours.
_SCALINGS = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "dynamic": "dynamic_ntk",
    "yarn": "yarn",
    "longrope": "longrope",
}


def from_hf(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a spec from a Hugging Face config.json.

    Raises:
      UnsupportedModel: the model type is not one of `ARCHS`, or uses what is unknown here.
      BadModelFile: a key is missing, of the wrong type, or contradicts another.
    """
    keys = Header(config)
    arch = keys.text("model_type")
    spec.check_known(arch, "model type {} of config.json", ARCHS)
    keys.only("quantization_config")
    if arch in hf_recurrent.ARCHS:
        return hf_recurrent.from_hf(keys, arch)
    bias = _bias(keys, arch)
    n_layers = keys.whole("num_hidden_layers", most=spec.MAX_LAYERS)
    n_embd, n_heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    gemma = arch == "gemma3_text"
    head_dim = (
        keys.whole("head_dim", 256, most=spec.MAX_HEAD_DIM)
        if gemma
        else spec.head_dim_of(keys, "head_dim", n_embd, n_heads)
    )
    family = _gemma3 if gemma else _plain
    return spec.build(
        arch=arch,
        n_vocab=keys.whole("vocab_size"),
        n_embd=n_embd,
        n_ff=keys.whole("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=_kv_heads(keys, arch, n_heads),
        head_dim=head_dim,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        n_ctx_train=keys.whole("max_position_embeddings"),
        tied=keys.flag("tie_word_embeddings", gemma),
        qkv_bias=bias or arch == "qwen2",
        out_bias=bias,
        ffn_bias=keys.flag("mlp_bias", False),
        qk_norm=gemma or arch == "qwen3",
        **family(keys, arch, n_layers, head_dim),
    )


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
    return keys.flag("attention_bias", False) and arch != "qwen2"


def _plain(keys: Header, arch: str, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Families whose layers are all alike."""
    keys.only("hidden_act", "silu", "swish")
    rules = keys.inner("rope_scaling")
    if not rules.values:
        rules = keys.inner("rope_parameters")
    if any(isinstance(value, Mapping) for value in rules.values.values()):
        raise UnsupportedModel("RoPE that differs by kind of layer is not supported; only one rule")
    base = rules.number("rope_theta", keys.number("rope_theta", 10000.0))
    kind = Layers(
        ids=tuple(range(n_layers)),
        rope=_rope(keys, rules, base, head_dim, tuple(_SCALINGS)),
        window=_window(keys, arch, n_layers),
    )
    return dict(layers=[kind])


def _window(keys: Header, arch: str, n_layers: int) -> int:
    """Tokens that every layer sees, 0 for all; windows in some layers only are refused."""
    if arch == "llama":
        return 0
    missing = "sliding_window" not in keys.values
    size = 4096 if missing else keys.whole("sliding_window", 0, least=0)
    if arch == "mistral":
        kinds, usual = [], _NEAR if size else _FAR
    else:
        first = keys.whole("max_window_layers", 28, least=0)
        windowed = keys.flag("use_sliding_window", False) and size and first < n_layers
        kinds, usual = [_NEAR] if windowed else [], _FAR
    kinds = keys.values.get("layer_types") or kinds
    if not isinstance(kinds, list) or any(kind != usual for kind in kinds):
        raise UnsupportedModel(
            f"{arch} with layer_types or a sliding window that differ by layer is not supported; "
            f"every layer must be {usual!r}"
        )
    return size if arch == "mistral" else 0


def _gemma3(keys: Header, arch: str, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Windowed layers and full ones, each kind with RoPE of its own."""
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    keys.only("use_bidirectional_attention", False)
    keys.only("attn_logit_softcapping")
    kinds = _layer_kinds(keys, arch, n_layers)
    near, far = (tuple(i for i in range(n_layers) if kinds[i] == k) for k in (_NEAR, _FAR))
    missing = "sliding_window" not in keys.values
    window = 4096 if missing or not near else keys.whole("sliding_window")
    own, full = _gemma3_ropes(keys, head_dim)
    return dict(
        layers=[Layers(ids=near, rope=own, window=window), Layers(ids=far, rope=full)],
        scale=1 / math.sqrt(keys.number("query_pre_attn_scalar", 256.0)),
        **spec.gemma(
            keys.whole("hidden_size"), keys.number("final_logit_softcapping", 0.0, zero=True)
        ),
    )


def _layer_kinds(keys: Header, arch: str, n_layers: int) -> list[str]:
    """The kind of each layer: as listed, or every sixth full where an old file says nothing."""
    period = keys.whole("sliding_window_pattern", 6)
    kinds = keys.values.get("layer_types")
    if kinds is None:
        return [_NEAR if (i + 1) % period else _FAR for i in range(n_layers)]
    if not isinstance(kinds, list) or len(kinds) != n_layers:
        raise BadModelFile(
            f"the model's header is damaged: 'layer_types' is {show(kinds)}, a list of {n_layers} "
            f"names is wanted; {REMEDY}"
        )
    for kind in kinds:
        if kind not in (_NEAR, _FAR):
            raise UnsupportedModel(
                f"{arch} with a layer of kind {show(kind)} is not supported; one of {_NEAR}, {_FAR}"
            )
    return kinds


def _gemma3_ropes(keys: Header, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """RoPE of windowed and of full layers; rope_scaling of older files is for the full ones."""
    rules = keys.inner("rope_parameters")
    unknown = sorted(rules.values.keys() - {_NEAR, _FAR})
    if unknown:
        raise UnsupportedModel(
            f"'rope_parameters' with {show(unknown[0])} is not supported; only {_NEAR}, {_FAR}"
        )
    own = rules.inner(_NEAR)
    full = Header({**rules.inner(_FAR).values, **keys.inner("rope_scaling").values})
    near_base = own.number("rope_theta", keys.number("rope_local_base_freq", 1e4))
    far_base = full.number("rope_theta", keys.number("rope_theta", 1e6))
    known = ("default", "linear")
    return (
        _rope(keys, own, near_base, head_dim, known),
        _rope(keys, full, far_base, head_dim, known),
    )


def _rope(
    keys: Header, rules: Header, base: float, head_dim: int, known: tuple[str, ...]
) -> RopeSpec:
    """RoPE as transformers reads it from one set of rules."""
    kind = rules.text("rope_type", rules.text("type", "default"))
    if kind not in known:
        raise UnsupportedModel(
            f"RoPE scaling {show(kind)} of config.json is not supported; one of {', '.join(known)}"
        )
    rules.only("mrope_section")
    # None of these families rotates a part of a head in transformers.
    for source in (keys, rules):
        source.only("partial_rotary_factor", 1.0)
    trained = keys.whole("max_position_embeddings")
    scaling = _SCALINGS[kind]
    rule = {} if scaling == "none" else _rule(keys, rules, scaling, head_dim // 2)
    return spec.make_rope(
        n_rot=head_dim, base=base, scaling=scaling, **({"n_ctx_orig": trained} | rule)
    )


def _rule(keys: Header, rules: Header, scaling: str, n_pairs: int) -> dict[str, Any]:
    """What a rule needs beside the base; linear and dynamic know only the trained length."""
    if scaling in ("linear", "dynamic_ntk"):
        return dict(factor=rules.number("factor"))
    name, trained = "original_max_position_embeddings", keys.whole("max_position_embeddings")
    original = keys.whole(name, rules.whole(name, trained))
    if scaling == "llama3":
        low, high = rules.number("low_freq_factor"), rules.number("high_freq_factor")
        if low >= high:
            raise BadModelFile(f"low_freq_factor {low} must be below {high}, the high; {REMEDY}")
        return dict(
            factor=rules.number("factor"),
            n_ctx_orig=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = rules.number("factor", trained / original)
    rule: dict[str, Any] = dict(factor=factor, n_ctx_orig=original)
    if scaling == "longrope":
        rule |= dict(
            short_factors=rules.numbers("short_factor", n_pairs),
            long_factors=rules.numbers("long_factor", n_pairs),
        )
    else:
        rule |= _yarn(rules, factor)
    return rule | (
        dict(magnitude=rules.number("attention_factor")) if rules.has("attention_factor") else {}
    )


def _yarn(rules: Header, factor: float) -> dict[str, Any]:
    rules.only("truncate", True)
    fast = rules.number("beta_fast", 32.0, zero=True) or 32.0
    slow = rules.number("beta_slow", 1.0, zero=True) or 1.0
    over = rules.number("mscale", 0.0, zero=True)
    under = rules.number("mscale_all_dim", 0.0, zero=True)
    # One of the two alone has no effect in transformers.
    both = over > 0 and under > 0
    ratio = spec.yarn_magnitude(factor, over) / spec.yarn_magnitude(factor, under)
    return dict(beta_fast=fast, beta_slow=slow, magnitude=ratio if both else None)
