"""Families with mixtures of experts, from a Hugging Face config.json."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from kvrt.config import QueryTemperature
from kvrt_models import spec
from kvrt_models.header import Header
from kvrt_models.hf import rope as hf_rope
from kvrt_models.hf.hybrid import (
    FULL,
    bad_list,
    layer_kinds,
    periodic,
    window_of,
    windowed_and_full,
)
from kvrt_models.spec import Clamped, Experts, Layers

_CHUNKED = "chunked_attention"
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss(keys: Header, arch: str, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Windowed and full layers alternate; attention sinks, and experts in every layer.

    Source: transformers `modeling_gpt_oss`; without rules of its own a model has YaRN by 32.
    """
    keys.only("hidden_act", "silu")
    if not any(keys.inner(name).values for name in ("rope_scaling", "rope_parameters")):
        keys = Header({**keys.values, "rope_scaling": _GPT_OSS_ROPE})
    rope = hf_rope.shared_rope(keys, head_dim, base=150000.0)
    windowed, full = windowed_and_full(layer_kinds(keys, arch, periodic(2, n_layers)))
    n_ff = keys.whole("intermediate_size")
    return dict(
        layers=[
            Layers(ids=windowed, rope=rope, window=window_of(keys, windowed, 128)),
            Layers(ids=full, rope=rope),
        ],
        norm_eps=keys.number("rms_norm_eps", 1e-5),
        attn_sinks=True,
        activation=Clamped(
            alpha=keys.number("swiglu_alpha", 1.702), limit=keys.number("swiglu_limit", 7.0)
        ),
        experts=_experts(keys, range(n_layers), n_ff, scoring="softmax", bias=True),
    )


def llama4(keys: Header, arch: str, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Chunked layers with RoPE and full ones without, experts in some or all of them.

    Source: transformers `modeling_llama4`.
    """
    keys.only("hidden_act", "silu")
    # A rule with a magnitude would lose it to the norm, which comes after the rotation there.
    rope = hf_rope.shared_rope(keys, head_dim, base=500000.0, known=("default", "linear", "llama3"))
    rope = dataclasses.replace(rope, layout="norm")
    rotated = _llama4_rotated(keys, n_layers)
    kinds = layer_kinds(keys, arch, [_CHUNKED if r else FULL for r in rotated], _CHUNKED)
    n_ff, step = keys.whole("intermediate_size"), keys.whole("interleave_moe_layer_step", 1)
    with_experts = _layer_list(keys, "moe_layers", n_layers, range(step - 1, n_layers, step))
    temperature = _temperature(keys)
    chunk = _chunk(keys) if _CHUNKED in kinds else 0
    return dict(
        layers=[
            Layers(
                ids=tuple(
                    i for i in range(n_layers) if (rotated[i], kinds[i]) == (with_rope, kind)
                ),
                rope=rope if with_rope else None,
                chunk=chunk if kind == _CHUNKED else 0,
                temperature=None if with_rope else temperature,
            )
            for with_rope, kind in itertools.product((True, False), (_CHUNKED, FULL))
        ],
        n_ff=keys.whole("intermediate_size_mlp", 16384),
        norm_eps=keys.number("rms_norm_eps", 1e-5),
        unit_qk_norm=keys.flag("use_qk_norm", True),
        experts=_experts(keys, with_experts, n_ff, scoring="sigmoid", n_ff_shared=n_ff)
        if with_experts
        else None,
    )


def _llama4_rotated(keys: Header, n_layers: int) -> list[bool]:
    """Which layers have RoPE: those with a 1 in the list, or all but every fourth."""
    period = keys.whole("no_rope_layer_interval", 4)
    rotated = keys.values.get("no_rope_layers") or [
        int((i + 1) % period > 0) for i in range(n_layers)
    ]
    if (
        not isinstance(rotated, list)
        or len(rotated) != n_layers
        or any(type(x) is not int or x not in (0, 1) for x in rotated)
    ):
        raise bad_list("no_rope_layers", rotated, f"a list of {n_layers} zeros and ones")
    return [bool(x) for x in rotated]


def _layer_list(keys: Header, key: str, n_layers: int, usual: Iterable[int]) -> tuple[int, ...]:
    found = keys.values.get(key)
    if found is None:
        return tuple(usual)
    known = range(n_layers)
    if not isinstance(found, list) or any(type(x) is not int or x not in known for x in found):
        raise bad_list(key, found, f"a list of layers below {n_layers}")
    return tuple(sorted(set(found)))


def _chunk(keys: Header) -> int:
    missing = "attention_chunk_size" not in keys.values
    return 8192 if missing else keys.whole("attention_chunk_size")


def _temperature(keys: Header) -> QueryTemperature | None:
    """How queries of layers without RoPE grow; the first files count where others say true."""
    key = "attn_temperature_tuning"
    counts = type(keys.values.get(key)) is int
    if not (keys.whole(key, least=0) if counts else keys.flag(key, True)):
        return None
    return QueryTemperature(
        floor_scale=keys.number("floor_scale", 8192.0),
        attn_scale=keys.number("attn_scale", 0.1, zero=True),
    )


def _experts(keys: Header, layers: Iterable[int], n_ff: int, **rest: Any) -> Experts:
    n_experts = keys.whole("num_local_experts", most=spec.MAX_EXPERTS)
    keys.only("num_experts", n_experts)
    n_used = keys.whole("num_experts_per_tok", most=n_experts)
    return Experts(layers=tuple(layers), n_experts=n_experts, n_used=n_used, n_ff=n_ff, **rest)
