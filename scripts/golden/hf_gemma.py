"""Tiny models of the newer Gemmas that write_hf.py writes, with seeds of their own."""

from scripts.golden.hf_cases import FAR, NEAR, Case

# Heads of windowed layers and of full ones differ; the last layers read keys and values of others.
_GEMMA4 = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 8,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 256,
    "use_double_wide_mlp": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1e3,
            "partial_rotary_factor": 0.25,
        },
    },
}
# Streams beside each other; the table of the layers' inputs lacks the last tokens.
_GEMMA3N = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 240,
    "laurel_rank": 5,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        "full_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
_PLAIN_FAR = {"rope_type": "default", "rope_theta": 1e3}
NEWER_GEMMAS = {
    "gemma4": Case(
        arch="Gemma4Text",
        config={
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": [NEAR, NEAR, FAR, NEAR, NEAR, FAR],
            "num_kv_shared_layers": 3,
        },
        without=[
            {"sliding_window": 48},
            {"layer_types": [NEAR, FAR, NEAR, NEAR, NEAR, FAR]},
            {"rope_parameters": _GEMMA4["rope_parameters"] | {"full_attention": _PLAIN_FAR}},
        ],
    ),
    "gemma4-wide": Case(
        arch="Gemma4Text",
        config={
            **_GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": [NEAR, FAR, FAR],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 2.0,
        },
        without=[{"final_logit_softcapping": None}],
    ),
    "gemma3n": Case(
        arch="Gemma3nText",
        config={
            **_GEMMA3N,
            "num_hidden_layers": 6,
            "layer_types": [NEAR, FAR, NEAR, NEAR, NEAR, FAR],
            "num_kv_shared_layers": 3,
            "altup_num_inputs": 3,
            "activation_sparsity_pattern": [0.8, 0.5, 0.0, 0.0, 0.7, 0.0],
        },
        without=[
            {"sliding_window": 48},
            {"layer_types": [NEAR, FAR, NEAR, NEAR, FAR, FAR]},
            {"activation_sparsity_pattern": [0.0] * 6},
            {"altup_correct_scale": False},
            {"final_logit_softcapping": 5.0},
        ],
    ),
    "gemma3n-second": Case(
        arch="Gemma3nText",
        config={
            **_GEMMA3N,
            "num_hidden_layers": 3,
            "layer_types": [NEAR, FAR, NEAR],
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 2,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "activation_sparsity_pattern": [0.0, 0.9, 0.0],
            "final_logit_softcapping": 2.0,
        },
        without=[{"altup_active_idx": 0}],
    ),
    "gemma4-experts": Case(
        arch="Gemma4Text",
        config={
            **_GEMMA4,
            "num_hidden_layers": 2,
            "layer_types": [NEAR, FAR],
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
        },
        without=[{"top_k_experts": 1}],
    ),
}
