"""gpt-oss: windowed and full layers, attention sinks, and experts in every layer."""

import dataclasses
from typing import Any

from kvrt_models.families.shared.family import Family, experts_of
from kvrt_models.families.shared.kinds import windows
from kvrt_models.families.shared.rope import near_rope, rope_of, rope_rules
from kvrt_models.header import Header
from kvrt_models.spec import Clamped, Layers

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Without rules of its own a model has YaRN by 32; a GGUF's SwiGLU has constants.

    Source: transformers `modeling_gpt_oss`; llama.cpp `openai-moe.cpp`.
    """
    if keys.tensors is None and not rope_rules(keys).values:
        keys = dataclasses.replace(keys, values={**keys.values, "rope_scaling": _ROPE})
    rope = rope_of(keys, head_dim)
    windowed, full, window = windows(keys, n_layers, 2)
    return dict(
        layers=[
            Layers(layers=windowed, rope=near_rope(keys, rope), window=window),
            Layers(layers=full, rope=rope),
        ],
        attn_sinks=True,
        activation=Clamped(
            alpha=keys.number("swiglu_alpha", 1.702), limit=keys.number("swiglu_limit", 7.0)
        ),
        experts=experts_of(keys, range(n_layers), "softmax", bias=True),
    )


FAMILIES = (
    Family(
        read=_gpt_oss,
        hf="gpt_oss",
        gguf="gpt-oss",
        keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        usual={
            "head_dim": 64,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
        },
        moe=True,
        names={"ffn_gate_inp": "mlp.router"},
        gguf_names={"ffn_norm": "post_attention_norm"},
        gate_up="interleaved",
    ),
)
