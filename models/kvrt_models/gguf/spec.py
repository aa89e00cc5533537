"""A `DecoderSpec` from the metadata of a GGUF file, as llama.cpp reads it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvrt.config import RopeSpec
from kvrt.errors import BadConfig, BadModelFile, UnsupportedModel
from kvrt_models import spec
from kvrt_models.gguf import latent
from kvrt_models.gguf import recurrent as gguf_recurrent
from kvrt_models.header import REMEDY, Header, brief, check_known, is_number
from kvrt_models.spec import Clamped, DecoderSpec, Experts, Layers

ARCHS = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt-oss",
    latent.ARCH,
    *gguf_recurrent.ARCHS,
)
# llama.cpp knows the Gemmas whose scores are scaled otherwise by their number of layers.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def spec_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderSpec:
    """Reads a spec from GGUF metadata.

    Args:
      metadata: key-value pairs of the header.
      tensors: tensor descriptions by name, with a `shape`; says what is tied and what has a bias.

    Raises:
      UnsupportedModel: the architecture is not one of `ARCHS`, or uses what is unknown here.
      BadModelFile: a key is missing, of the wrong type, or contradicts another or the tensors.
    """
    arch = Header(metadata).text("general.architecture")
    check_known(arch, "architecture {} of this GGUF", ARCHS)
    keys = Header(metadata, f"{arch}.")
    if arch in gguf_recurrent.ARCHS:
        n_vocab = _shape(tensors, "token_embd.weight")[0]
        return gguf_recurrent.recurrent_spec_from_gguf(keys, arch, tensors, n_vocab)
    if arch == latent.ARCH:
        n_vocab = _shape(tensors, "token_embd.weight")[0]
        return latent.latent_spec_from_gguf(
            keys, tensors, n_vocab, lambda n_rot: _rope(keys, tensors, arch, n_rot)
        )
    return _attention_spec(keys, arch, tensors)


def _attention_spec(keys: Header, arch: str, tensors: Mapping[str, Any]) -> DecoderSpec:
    """A spec without recurrent layers."""
    n_layers = keys.whole("block_count", most=spec.MAX_LAYERS)
    n_embd, n_heads = keys.whole("embedding_length"), _n_heads(keys, n_layers)
    head_dim = spec.head_dim_of(keys, "attention.key_length", n_embd, n_heads[0])
    usual = {"attention.value_length": head_dim, "attention.causal": True}
    usual |= {} if arch == "gpt-oss" else {"expert_count": 0}
    for key, value in usual.items():
        keys.only(key, value)
    rope = _rope(keys, tensors, arch, head_dim)
    family = {"gemma2": _gemma2, "gemma3": _gemma3, "gpt-oss": _gpt_oss}.get(arch, _plain)
    return spec.build(
        arch=arch,
        n_vocab=_shape(tensors, "token_embd.weight")[0],
        n_embd=n_embd,
        n_ff=keys.by_layer("feed_forward_length", n_layers),
        n_heads=n_heads,
        n_kv_heads=keys.by_layer("attention.head_count_kv", n_layers, n_heads),
        head_dim=head_dim,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        n_ctx_train=keys.whole("context_length"),
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        ffn_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=arch == "gemma3" or "blk.0.attn_q_norm.weight" in tensors,
        **family(keys, arch, n_layers, rope),
    )


def _n_heads(keys: Header, n_layers: int) -> tuple[int, ...]:
    return keys.by_layer("attention.head_count", n_layers)


def with_freq_factors(of: DecoderSpec, factors: tuple[float, ...]) -> DecoderSpec:
    """The spec with the frequency divisors of a GGUF's `rope_freqs.weight`.

    Raises:
      BadModelFile: a divisor is not a finite number above 0, or there are too many or too few.
    """
    if not all(map(is_number, factors)):
        raise BadModelFile(f"'rope_freqs.weight' must hold finite numbers above 0; {REMEDY}")
    try:
        groups = tuple(
            dataclasses.replace(g, rope=dataclasses.replace(g.rope, freq_factors=factors))
            if g.rope
            else g
            for g in of.groups
        )
    except BadConfig as error:
        raise BadModelFile(f"'rope_freqs.weight' does not fit: {error}; {REMEDY}") from error
    return dataclasses.replace(of, groups=groups)


def _shape(tensors: Mapping[str, Any], name: str) -> tuple[int, ...]:
    if name not in tensors:
        raise BadModelFile(f"tensor {name!r} is missing; the file is not a whole model")
    return tensors[name].shape


def _plain(keys: Header, arch: str, n_layers: int, rope: RopeSpec) -> dict[str, Any]:
    """Families whose layers are all alike."""
    kind = Layers(ids=tuple(range(n_layers)), rope=rope, window=_window(keys, arch))
    return dict(layers=[kind])


def _window(keys: Header, arch: str) -> int:
    """Tokens that every layer sees, 0 for all; a qwen's layers see all, as in llama.cpp."""
    window = keys.whole("attention.sliding_window", 0, least=0)
    return window if arch == "llama" else 0


def _gemma2(keys: Header, arch: str, n_layers: int, rope: RopeSpec) -> dict[str, Any]:
    """A windowed layer, a full one, and so on, with soft caps on scores and on logits.

    Source: llama.cpp `gemma2.cpp`, where a file that names no caps has those of the first models.
    """
    window = keys.whole("attention.sliding_window", 4096)
    windowed, full = _windowed_and_full(keys, n_layers, window, 2)
    own = dataclasses.replace(rope, base=keys.number("rope.freq_base_swa", rope.base))
    cap = keys.number("attn_logit_softcapping", 50.0)
    return dict(
        layers=[
            Layers(ids=windowed, rope=own, window=window, soft_cap=cap),
            Layers(ids=full, rope=rope, soft_cap=cap),
        ],
        **_gemma(keys, arch, n_layers, keys.number("final_logit_softcapping", 30.0)),
    )


def _gemma3(keys: Header, arch: str, n_layers: int, rope: RopeSpec) -> dict[str, Any]:
    """Every sixth layer sees all; the others a window, with RoPE of their own, never stretched.

    Source: llama.cpp `gemma3.cpp`.
    """
    keys.only("attn_logit_softcapping", 0.0)
    if rope.scaling not in ("none", "linear"):
        raise UnsupportedModel(f"{arch} with RoPE scaling {rope.scaling!r}; only none or linear")
    window = keys.whole("attention.sliding_window", 0, least=0)
    windowed, full = _windowed_and_full(keys, n_layers, window, 6)
    base = keys.number("rope.freq_base_swa", 10000.0)
    own = dataclasses.replace(rope, base=base, scaling="none", factor=1.0)
    cap = keys.number("final_logit_softcapping", 0.0, zero=True)
    return dict(
        layers=[Layers(ids=windowed, rope=own, window=window), Layers(ids=full, rope=rope)],
        **_gemma(keys, arch, n_layers, cap),
    )


def _gpt_oss(keys: Header, arch: str, n_layers: int, rope: RopeSpec) -> dict[str, Any]:
    """A windowed layer, a full one, and so on, with attention sinks and experts in all of them.

    Source: llama.cpp `openai-moe.cpp`; its SwiGLU has constants, and its YaRN whole pairs.
    """
    window = keys.whole("attention.sliding_window")
    windowed, full = _windowed_and_full(keys, n_layers, window, 2)
    own = dataclasses.replace(rope, base=keys.number("rope.freq_base_swa", rope.base))
    n_experts = keys.whole("expert_count", most=spec.MAX_EXPERTS)
    experts = Experts(
        layers=tuple(range(n_layers)),
        n_experts=n_experts,
        n_used=keys.whole("expert_used_count", most=n_experts),
        n_ff=keys.whole("expert_feed_forward_length"),
        scoring="softmax",
        bias=True,
    )
    return dict(
        layers=[Layers(ids=windowed, rope=own, window=window), Layers(ids=full, rope=rope)],
        attn_sinks=True,
        activation=Clamped(alpha=1.702, limit=7.0),
        experts=experts,
    )


def _windowed_and_full(
    keys: Header, n_layers: int, window: int, period: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Windowed layers and full ones: as a list says, or one full in every period.

    A period of 0 makes none full.
    """
    key, ids = "attention.sliding_window_pattern", range(n_layers)
    if isinstance(keys.values.get(keys.prefix + key), (list, np.ndarray)):
        has_window = list(map(bool, keys.by_layer(key, n_layers, least=0)))
    else:
        period = keys.whole(key, period, least=0)
        has_window = [period == 0 or (i + 1) % period > 0 for i in ids]
    windowed = tuple(i for i in ids if window > 0 and has_window[i])
    return windowed, tuple(i for i in ids if i not in windowed)


def _gemma(keys: Header, arch: str, n_layers: int, logit_cap: float) -> dict[str, Any]:
    """Scales and caps; scores of the 27B are divided by the root of width over heads."""
    n_embd, n_heads = keys.whole("embedding_length"), _n_heads(keys, n_layers)
    large = n_layers == _GEMMA_27B_LAYERS[arch]
    return dict(
        scale=math.sqrt(n_heads[0] / n_embd) if large else None, **spec.gemma(n_embd, logit_cap)
    )


def _check_factors(tensors: Mapping[str, Any], arch: str, n_rot: int) -> None:
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in tensors:
            raise UnsupportedModel(
                f"LongRoPE (tensor {name!r}) of a GGUF is not supported; load the model's Hugging "
                "Face folder"
            )
    wanted = (n_rot // 2,)
    if "rope_freqs.weight" not in tensors:
        return
    if arch in _GEMMA_27B_LAYERS:
        raise UnsupportedModel(
            f"a {arch} with the tensor 'rope_freqs.weight' is not supported; convert the model "
            "again"
        )
    if tensors["rope_freqs.weight"].shape != wanted:
        raise BadModelFile(
            f"'rope_freqs.weight' has shape {tensors['rope_freqs.weight'].shape}, {wanted} is "
            f"wanted; {REMEDY}"
        )


def _rope(keys: Header, tensors: Mapping[str, Any], arch: str, head_dim: int) -> RopeSpec:
    """RoPE as llama.cpp reads it, where a factor without a type is linear.

    YaRN's ramp is the file's own, see `departures`.
    """
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            f"RoPE scaling {brief(kind)} of this GGUF is not supported; only none, linear or yarn"
        )
    old = keys.number("rope.scale_linear", 0.0, zero=True)
    factor = keys.number("rope.scaling.factor", old, zero=True) or 1.0
    gain = keys.number("rope.scaling.attn_factor", 1.0)
    # With it scores of latents grow by the square instead.
    multiplier = "rope.scaling.yarn_log_multiplier"
    apart = arch == latent.ARCH and keys.number(multiplier, 0.0, zero=True) > 0
    gain *= spec.yarn_magnitude(factor) if kind == "yarn" and not apart else 1.0
    trained = keys.whole("context_length")
    n_rot = keys.whole("rope.dimension_count", head_dim, most=spec.MAX_HEAD_DIM)
    _check_factors(tensors, arch, n_rot)
    return spec.make_rope(
        n_rot=n_rot,
        base=keys.number("rope.freq_base", 10000.0),
        layout="norm" if arch in ("llama", latent.ARCH) else "neox",
        scaling=kind if factor != 1.0 else "none",
        factor=1.0 if kind == "none" else factor,
        n_ctx_orig=keys.whole("rope.scaling.original_context_length", 0, least=0) or trained,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        magnitude=gain,
    )
