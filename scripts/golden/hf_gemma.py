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
}
