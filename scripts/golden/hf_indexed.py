"""Tiny models with an indexer that write_hf.py writes, with seeds of their own."""

from scripts.golden.hf_cases import DEEPSEEK, DEEPSEEK_YARN, Case

# Index keys of 6 + 4 channels; eight index heads, so that hardly a score is zero in all of them.
_INDEXED = {
    **DEEPSEEK,
    "q_lora_rank": 12,
    "index_topk": 7,
    "index_head_dim": 10,
    "index_n_heads": 8,
    "pad_token_id": None,
}
INDEXED = {
    "deepseek-v32": Case(
        arch="DeepseekV32",
        config={
            **_INDEXED,
            "num_hidden_layers": 3,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "max_position_embeddings": 512,
        },
        rope=DEEPSEEK_YARN,
        without=[
            {"index_topk": 48},
            {"index_topk": 8},
            {"rope_parameters": {**DEEPSEEK_YARN, "factor": 1.5}},
        ],
    ),
}
