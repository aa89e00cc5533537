"""Llama 4's text part: chunked layers with RoPE, full ones without, and mixtures of experts."""

import itertools
from typing import Any

from kvrt.config import QueryTemperature
from kvrt_models.families.shared.family import Family, experts_of
from kvrt_models.families.shared.kinds import FULL
from kvrt_models.families.shared.rope import rope_of
from kvrt_models.header import Header
from kvrt_models.spec import Layers

_CHUNKED = "chunked_attention"


def _llama4(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Layers by rotation and by what they see, with experts in some or all of them.

    Source: transformers `modeling_llama4`.
    """
    # A rule with a magnitude would lose it to the norm, which comes after the rotation there.
    rope = rope_of(keys, head_dim, known=("default", "linear", "llama3"), layout="norm")
    rotated = _rotated(keys, n_layers)
    usual = [_CHUNKED if r else FULL for r in rotated]
    kinds = keys.kinds("layer_types", usual, _CHUNKED, FULL)
    n_ff, step = keys.whole("moe_intermediate_size"), keys.whole("interleave_moe_layer_step", 1)
    mixtures = keys.layers("moe_layers", n_layers, range(step - 1, n_layers, step))
    chunk = _chunk(keys) if _CHUNKED in kinds else 0
    temperature = _temperature(keys)
    return dict(
        layers=[
            Layers(
                layers=tuple(
                    i for i in range(n_layers) if (rotated[i], kinds[i]) == (with_rope, kind)
                ),
                rope=rope if with_rope else None,
                chunk=chunk if kind == _CHUNKED else 0,
                temperature=None if with_rope else temperature,
            )
            for with_rope, kind in itertools.product((True, False), (_CHUNKED, FULL))
        ],
        n_ff=keys.whole("intermediate_size_mlp", 16384),
        unit_qk_norm=keys.flag("use_qk_norm", True),
        experts=experts_of(keys, mixtures, "sigmoid", n_ff_shared=n_ff),
    )


def _rotated(keys: Header, n_layers: int) -> list[bool]:
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
        raise keys.bad("no_rope_layers", rotated, f"a list of {n_layers} zeros and ones")
    return [bool(x) for x in rotated]


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


FAMILIES = (
    Family(
        read=_llama4,
        hf="llama4_text",
        text_part="llama4",
        keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        usual={"head_dim": 128, "rope_theta": 500000.0, "rms_norm_eps": 1e-5},
        mlp="feed_forward",
        names={"ffn_gate_inp": "feed_forward.router"},
        gate_up="halves",
    ),
)
