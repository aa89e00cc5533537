"""Tiny models with recurrent layers that write_hf.py writes, with seeds of their own."""

from scripts.golden.hf_cases import Case

# No head_dim in their configurations; Jamba knows no positions either.
_JAMBA = {
    "head_dim": None,
    "rope_parameters": None,
    "num_experts": 1,
    "num_hidden_layers": 3,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
}
# Chunks shorter than the prompt, so that transformers carries states from one to the next.
_BAMBA = {
    "head_dim": None,
    "num_hidden_layers": 3,
    "attn_layer_indices": [1],
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
# Two heads of values share a query and a key; a quarter of each head of attention is rotated.
_QWEN3_NEXT = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_experts": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": {"rope_theta": 1e2, "partial_rotary_factor": 0.25},
}
LINEAR, FULL = "linear_attention", "full_attention"
_KIMI = {
    "head_dim": None,
    "rope_parameters": None,
    "num_hidden_layers": 3,
    "pad_token_id": 2,
    "num_key_value_heads": 4,
    "layer_types": [LINEAR, FULL, LINEAR],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "intermediate_size": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
RECURRENT = {
    "jamba": Case(arch="Jamba", config=_JAMBA),
    "jamba-bias": Case(
        arch="Jamba",
        config={
            **_JAMBA,
            "num_hidden_layers": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 0,
            "mamba_d_conv": 3,
            "mamba_expand": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "bamba": Case(
        arch="Bamba",
        config={**_BAMBA, "mamba_n_heads": 8, "mamba_n_groups": 2},
        without=[{"rope_parameters": {"rope_theta": 1e2}}],
    ),
    "bamba-bias": Case(
        arch="Bamba",
        config={
            **_BAMBA,
            "attn_layer_indices": [0, 2],
            "mamba_n_heads": 4,
            "mamba_expand": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 0.25},
        },
        without=[{"rope_parameters": {"rope_theta": 1e3, "partial_rotary_factor": 0.5}}],
    ),
    "jamba-experts": Case(
        arch="Jamba",
        config={
            **_JAMBA,
            "intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        without=[{"num_experts_per_tok": 1}, {"num_experts_per_tok": 3}],
    ),
    "qwen3-next": Case(
        arch="Qwen3Next",
        config=_QWEN3_NEXT,
        without=[{"rope_parameters": {"rope_theta": 1e2, "partial_rotary_factor": 0.5}}],
    ),
    # A dense layer among those with experts, whose shared network has a gate.
    "qwen3-next-experts": Case(
        arch="Qwen3Next",
        config={
            **_QWEN3_NEXT,
            "num_hidden_layers": 4,
            "layer_types": None,
            "mlp_only_layers": [1],
            "intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 10,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
        },
        without=[{"num_experts_per_tok": 1}, {"norm_topk_prob": False}],
    ),
    # A decay for each channel of the keys beside latents without positions, experts by groups.
    "kimi-linear": Case(
        arch="KimiLinear",
        config=_KIMI,
        without=[
            {"layer_types": [FULL, LINEAR, LINEAR]},
            {"num_experts_per_tok": 1},
            {"topk_group": 2},
            {"norm_topk_prob": False},
            {"routed_scaling_factor": 1.0},
        ],
    ),
    # Queries from a latent of their own, and networks without experts.
    "kimi-linear-dense": Case(
        arch="KimiLinear",
        config={
            **_KIMI,
            "q_lora_rank": 12,
            "mlp_layer_types": ["dense"] * 3,
            "layer_types": [FULL, LINEAR, FULL],
            "linear_conv_kernel_dim": 3,
        },
        without=[{"layer_types": [FULL, LINEAR, LINEAR]}],
    ),
}
