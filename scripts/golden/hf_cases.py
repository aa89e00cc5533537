"""What scripts/golden/write_hf.py writes: tiny models, and RoPE rules at sizes of real models."""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One tiny model.

    Attributes:
      arch: class name of its configuration, without "Config".
      config: what differs from `_config`.
      rope: rule in transformers' terms, None for the plain one.
      old_form: config.json as before transformers 5, with rope_theta and rope_scaling.
      by_length: the rule depends on the length, so a shorter prompt is recorded too.
      without: configurations of which each must give other logits, or the case would prove nothing.
    """

    arch: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    rope: dict[str, Any] | None = None
    old_form: bool = False
    by_length: bool = False
    without: Sequence[dict[str, Any]] = ()


_NO_RULE = ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},)


def _bases(near: float, far: float, **far_rule: Any) -> dict[str, Any]:
    """RoPE of Gemma 3: one base for windowed layers, one and perhaps a rule for full ones."""
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": near},
        "full_attention": {"rope_type": "default", "rope_theta": far, **far_rule},
    }


NEAR, FAR = "sliding_attention", "full_attention"
# Heads are wider than the residual by their number, and scores are not scaled by their width.
_GEMMA3 = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 10,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
# Caps and scores are of one size, or the caps would hardly count.
_GEMMA2 = {
    **_GEMMA3,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 3.0,
}
# Ramps from pair 1.6 to pair 4.0; whole pairs would be 1 and 5.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
_LLAMA4 = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "intermediate_size_mlp": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_chunk_size": 12,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
# Heads of 12 + 4 channels, a latent of 20 and values of 8.
DEEPSEEK = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.6,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": Case(
        arch="Llama", without=[{"rope_parameters": {"rope_type": "linear", "factor": 2.0}}]
    ),
    "llama-tied": Case(arch="Llama", config={"tie_word_embeddings": True}, old_form=True),
    "llama-llama3": Case(
        arch="Llama",
        config={"max_position_embeddings": 128},
        rope={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        old_form=True,
        without=_NO_RULE,
    ),
    "llama-linear": Case(
        arch="Llama",
        rope={"rope_type": "linear", "factor": 4.0},
        old_form=True,
        without=_NO_RULE,
    ),
    "llama-dynamic": Case(
        arch="Llama",
        config={"max_position_embeddings": 32},
        rope={"rope_type": "dynamic", "factor": 4.0},
        by_length=True,
        without=_NO_RULE,
    ),
    "llama-yarn": Case(
        arch="Llama",
        config={"max_position_embeddings": 128},
        rope={
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 16,
        },
        without=_NO_RULE,
    ),
    "llama-longrope": Case(
        arch="Llama",
        config={"max_position_embeddings": 128},
        rope={
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
            "long_factor": [1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0],
            "original_max_position_embeddings": 32,
        },
        by_length=True,
        without=_NO_RULE,
    ),
    "mistral": Case(arch="Mistral", config={"sliding_window": None}),
    "mistral-window": Case(
        arch="Mistral", config={"sliding_window": 16}, without=[{"sliding_window": None}]
    ),
    "qwen2": Case(
        arch="Qwen2",
        # No head_dim in its configuration, so the residual is as wide as the heads; tied, for size.
        config={
            "hidden_size": 64,
            "head_dim": None,
            "intermediate_size": 32,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": Case(arch="Qwen3", old_form=True),
    # Seven layers, so that one is full by the pattern alone, which is all that old files have.
    "gemma3": Case(
        arch="Gemma3Text",
        config={**_GEMMA3, "num_hidden_layers": 7, "rope_parameters": _bases(1e4, 1e6)},
        old_form=True,
        without=[
            {"sliding_window": 48},
            {"query_pre_attn_scalar": 16},
            {"rope_parameters": _bases(1e4, 1e4)},
            {"rope_parameters": _bases(1e6, 1e6)},
        ],
    ),
    "gemma3-linear": Case(
        arch="Gemma3Text",
        config={
            **_GEMMA3,
            "num_hidden_layers": 4,
            "layer_types": [FAR, NEAR, NEAR, FAR],
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": _bases(1e4, 1e5, rope_type="linear", factor=8.0),
        },
        without=[
            {"sliding_window": 48},
            {"layer_types": [NEAR, FAR, NEAR, FAR]},
            {"final_logit_softcapping": None},
            {"rope_parameters": _bases(1e4, 1e5)},
        ],
    ),
    "gemma2": Case(
        arch="Gemma2",
        config=_GEMMA2,
        old_form=True,
        without=[
            {"sliding_window": 48},
            {"layer_types": [FAR, NEAR, FAR]},
            {"query_pre_attn_scalar": 16},
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
        ],
    ),
    # The limit is low enough to be reached by weights of this size.
    "gpt-oss": Case(
        arch="GptOss",
        config={
            "intermediate_size": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "swiglu_limit": 0.75,
            "max_position_embeddings": 512,
        },
        rope=_YARN,
        without=[
            {"sliding_window": 48},
            {"layer_types": [FAR, NEAR]},
            {"swiglu_limit": 7.0},
            {"swiglu_alpha": 1.0},
            {"num_experts_per_tok": 1},
            {"rope_parameters": {**_YARN, "truncate": True}},
        ],
    ),
    # Three chunked layers with RoPE and a full one without; experts in the second and the fourth.
    "llama4": Case(
        arch="Llama4Text",
        config={
            **_LLAMA4,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        without=[
            {"attention_chunk_size": 48},
            {"no_rope_layers": [1, 1, 1, 1]},
            {"layer_types": ["chunked_attention"] * 4},
            {"attn_temperature_tuning": False},
            {"use_qk_norm": False},
            {"num_experts_per_tok": 1},
        ],
    ),
    # Each kind of mask with and without RoPE, experts where a list puts them.
    "llama4-listed": Case(
        arch="Llama4Text",
        config={
            **_LLAMA4,
            "num_hidden_layers": 4,
            "num_local_experts": 3,
            "moe_layers": [0],
            "no_rope_layers": [0, 1, 1, 0],
            "layer_types": ["chunked_attention", FAR, "chunked_attention", FAR],
            "use_qk_norm": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "max_position_embeddings": 128,
        },
        rope={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        without=[
            {"attention_chunk_size": 48},
            {"attn_temperature_tuning": False},
            {"use_qk_norm": True},
            *_NO_RULE,
        ],
    ),
    # Queries without a latent, experts by groups from the second layer on.
    "deepseek-v2": Case(
        arch="DeepseekV2",
        config={
            **DEEPSEEK,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "routed_scaling_factor": 4.0,
        },
        without=[
            {"topk_method": "greedy"},
            {"topk_group": 1},
            {"routed_scaling_factor": 1.0},
            {"num_experts_per_tok": 1},
        ],
    ),
    # Scores grow by 1.8 with YaRN; sigmoids and their biases choose experts by groups.
    "deepseek-v3": Case(
        arch="DeepseekV3",
        config={
            **DEEPSEEK,
            "q_lora_rank": 12,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "max_position_embeddings": 512,
            "num_mtp_layers": 0,
        },
        rope=DEEPSEEK_YARN,
        without=[
            {"rope_parameters": {**DEEPSEEK_YARN, "mscale_all_dim": 0.0}},
            {"rope_parameters": {**DEEPSEEK_YARN, "factor": 1.5}},
            {"rope_interleave": False},
            {"topk_group": 1},
            {"norm_topk_prob": False},
            {"routed_scaling_factor": 1.0},
        ],
    ),
    # Dense throughout, pairs of channels half a head apart.
    "deepseek-v3-dense": Case(
        arch="DeepseekV3",
        config={
            **DEEPSEEK,
            "q_lora_rank": None,
            "first_k_dense_replace": 2,
            "rope_interleave": False,
            "num_mtp_layers": 0,
        },
        without=[{"rope_interleave": True}],
    ),
}
ROPE_CASES = [
    {"head_dim": 128, "max_position_embeddings": 8192, "rule": {"rope_type": "linear",
     "rope_theta": 1e4, "factor": 4.0}},
    {"head_dim": 64, "max_position_embeddings": 131072, "rule": {"rope_type": "llama3",
     "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192}},
    {"head_dim": 128, "max_position_embeddings": 4096, "n_ctx": 16384,
     "rule": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    {"head_dim": 128, "max_position_embeddings": 4096, "n_ctx": 1024,
     "rule": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    {"head_dim": 128, "max_position_embeddings": 131072, "rule": {"rope_type": "yarn",
     "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}},
    {"head_dim": 64, "max_position_embeddings": 65536, "rule": {"rope_type": "yarn",
     "rope_theta": 1e4, "factor": 16.0, "beta_fast": 16.0, "beta_slow": 2.0,
     "original_max_position_embeddings": 4096}},
    {"head_dim": 64, "max_position_embeddings": 131072, "rule": {"rope_type": "yarn",
     "rope_theta": 1.5e5, "factor": 32.0, "truncate": False,
     "original_max_position_embeddings": 4096}},
    *({"head_dim": 96, "max_position_embeddings": 131072, "n_ctx": n_ctx,
       "rule": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 32.0,
                "short_factor": [1.0 + 0.03125 * i for i in range(48)],
                "long_factor": [1.0 + 1.25 * i for i in range(48)],
                "original_max_position_embeddings": 4096}} for n_ctx in (4096, 8192)),
]  # fmt: skip
