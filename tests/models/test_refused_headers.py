"""Headers that are refused, each in one line: what config.json and GGUF metadata may not say."""

import math

import numpy as np
import pytest
from headers import Shaped, hf, like, refused

NEAR, FAR = "sliding_attention", "full_attention"


def bases(near=None, far=None, **other):
    return dict(rope_parameters={NEAR: near or {}, FAR: far or {}, **other})


# By the golden folder whose config.json is changed, and by architecture.

CONFIGS = {
    "gemma2": [
        (dict(hidden_activation="gelu"), "'hidden_activation' is 'gelu', which is not supported"),
        (dict(use_bidirectional_attention=True), "'use_bidirectional_attention' is True"),
        (dict(attn_logit_softcapping=0.0), "'attn_logit_softcapping' is 0.0, a finite number"),
        (dict(final_logit_softcapping="x"), "'final_logit_softcapping' is 'x', a finite number"),
        (dict(sliding_window=None), "lacks 'sliding_window'"),
        (dict(sliding_window=0), "'sliding_window' is 0, a whole number from 1"),
        (dict(layer_types=[NEAR]), "'layer_types' is a list of 1, a list of 3 names is wanted"),
        (
            dict(layer_types=["chunked_attention"] * 3),
            "'layer_types' with 'chunked_attention' is not",
        ),
        (dict(mlp_bias=True), "'mlp_bias' is True, which is not supported"),
        (dict(rope_parameters={NEAR: {}}), "RoPE that differs by kind of layer"),
    ],
    "gemma3n": [
        (dict(model_type="gemma3n"), "model type 'gemma3n' of config.json has parts for pictures"),
        (dict(intermediate_size=[24] * 5), "a list of 5, a list of 6 whole numbers"),
        (dict(altup_active_idx=3), "'altup_active_idx' is 3"),
        (dict(altup_num_inputs=0), "'altup_num_inputs' is 0"),
        (dict(activation_sparsity_pattern=[0.5]), "a list of 6 shares is wanted"),
        (dict(activation_sparsity_pattern=[1.0] * 6), "are numbers from 0 to below 1"),
        (dict(hidden_activation="relu"), "'hidden_activation' is 'relu', which is not supported"),
        (dict(num_kv_shared_layers=5), "layers of kind full_attention from layer 1 on, which read"),
    ],
    "gemma4": [
        (dict(enable_moe_block=True), "'num_experts'"),
        (dict(model_type="gemma4"), "model type 'gemma4' of config.json has parts for pictures"),
        (dict(use_bidirectional_attention="all"), "'use_bidirectional_attention' is 'all', which"),
        (dict(hidden_activation="relu"), "'hidden_activation' is 'relu', which is not supported"),
        (dict(num_kv_shared_layers=5), "layers of kind full_attention from layer 1 on, which read"),
        (dict(vocab_size_per_layer_input=99), "names 256 tokens and inputs of layers for 99"),
        (dict(num_key_value_heads=3), "names 4 heads and 3 kv heads"),
        (dict(per_layer_config={"2": {"head_dim": 8}, "5": {"head_dim": 4}}), "'per_layer_config'"),
        (
            dict(rope_parameters=dict(full_attention=dict(rope_type="yarn"))),
            "RoPE scaling 'yarn' of gemma4_text",
        ),
    ],
    "gemma3-linear": [
        (dict(model_type="gemma3"), "model type 'gemma3' of config.json is not supported"),
        (dict(hidden_activation="gelu"), "'hidden_activation' is 'gelu', which is not supported"),
        (dict(use_bidirectional_attention=True), "'use_bidirectional_attention' is True"),
        (dict(attn_logit_softcapping=50.0), "'attn_logit_softcapping' is 50.0"),
        (dict(final_logit_softcapping="x"), "'final_logit_softcapping' is 'x', a finite number"),
        (dict(query_pre_attn_scalar=0), "'query_pre_attn_scalar' is 0, a finite number above 0"),
        (dict(sliding_window=None), "lacks 'sliding_window'"),
        (dict(sliding_window=0), "'sliding_window' is 0, a whole number from 1"),
        (dict(layer_types=[NEAR]), "'layer_types' is a list of 1, a list of 4 names is wanted"),
        (dict(layer_types=NEAR), "'layer_types' is 'sliding_attention', a list of 4"),
        (
            dict(layer_types=[NEAR] * 3 + ["chunked_attention"]),
            "'layer_types' with 'chunked_attention' is not",
        ),
        (dict(layer_types=[[]] * 4), "'layer_types' with a list of 0 is not"),
        (dict(layer_types=None, sliding_window_pattern=0), "'sliding_window_pattern' is 0"),
        (dict(mlp_bias=True), "'mlp_bias' is True, which is not supported"),
        (dict(rope_parameters=dict(rope_theta=1e4)), "'rope_parameters' with 'rope_theta'"),
        (bases(chunked_attention={}), "'rope_parameters' with 'chunked_attention'"),
        (bases(far=dict(rope_type="yarn", factor=2.0)), "RoPE scaling 'yarn' of gemma3_text"),
        (bases(far=dict(rope_type="linear")), "lacks 'factor'"),
        (bases(near=dict(rope_theta=-1.0)), "'rope_theta' is -1.0"),
        (bases(near=dict(partial_rotary_factor=0.5)), "'partial_rotary_factor' is 0.5"),
        (dict(rope_parameters={NEAR: 3}), "'sliding_attention' is 3, an object is wanted"),
    ],
    "gpt-oss": [
        (dict(quantization_config=dict(quant_method="mxfp4")), "quantized by 'mxfp4' are not"),
        (dict(quantization_config=dict(bits=4)), "'quantization_config' is an object of 1 keys"),
        (dict(quantization_config="mxfp4"), "'quantization_config' is 'mxfp4', an object is"),
        (dict(hidden_act="gelu"), "'hidden_act' is 'gelu', which is not supported; only 'silu'"),
        (dict(num_local_experts=None), "lacks 'num_local_experts'"),
        (dict(num_local_experts=10**6), "'num_local_experts' is 1000000"),
        (dict(num_experts=8), "'num_experts' is 8, which is not supported; only 5"),
        (dict(num_experts_per_tok=6), "'num_experts_per_tok' is 6, a whole number from 1 to 5"),
        (dict(num_experts_per_tok=0), "'num_experts_per_tok' is 0"),
        (dict(swiglu_limit=0.0), "'swiglu_limit' is 0.0, a finite number above 0"),
        (dict(swiglu_alpha="x"), "'swiglu_alpha' is 'x'"),
        (dict(sliding_window=0), "'sliding_window' is 0, a whole number from 1"),
        (dict(layer_types=[NEAR]), "'layer_types' is a list of 1, a list of 2 names is wanted"),
        (dict(attention_bias=1), "'attention_bias' is 1, true or false is wanted"),
        (dict(mlp_bias=True), "'mlp_bias' is True, which is not supported"),
        (dict(rope_parameters=dict(rope_type="spiral")), "RoPE scaling 'spiral' of gpt_oss"),
    ],
    "kimi-linear": [
        ({"linear_conv_kernel_dim": 1}, "'short_conv_kernel_size' is 1, a whole number from 2"),
        ({"mla_use_nope": False}, "'mla_use_nope' is False, which is not supported; only True"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is True"),
        ({"moe_router_activation_func": "softmax"}, "'moe_router_activation_func' is 'softmax'"),
        ({"num_nextn_predict_layers": 1}, "'num_nextn_predict_layers' is 1"),
        ({"layer_types": ["sliding"] * 3}, "'layer_types' with 'sliding' is not supported"),
        ({"mlp_layer_types": ["dense"]}, "'mlp_layer_types' is a list of 1, a list of 3 names"),
        ({"num_expert_group": 3}, "names 4 experts in 3 groups"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
    ],
    "deepseek-v3": [
        (dict(attention_bias=True), "'attention_bias' is True, which is not supported; only False"),
        (dict(hidden_act="gelu"), "'hidden_act' is 'gelu', which is not supported; only 'silu'"),
        (dict(kv_lora_rank=0), "'kv_lora_rank' is 0, a whole number from 1"),
        (dict(qk_rope_head_dim=5), "n_rot is 5; even, above 0"),
        (dict(n_group=3), "names 8 experts in 3 groups, of which 2 give 3 experts a token"),
        (dict(topk_group=1), "names 8 experts in 4 groups, of which 1 give 3 experts a token"),
        (dict(n_group=8), "names 8 experts in 8 groups"),
        (dict(topk_group=5), "'topk_group' is 5, a whole number from 1 to 4"),
        (dict(q_lora_rank=-1), "'q_lora_rank' is -1"),
    ],
    "llama4": [
        (dict(hidden_act="gelu"), "'hidden_act' is 'gelu', which is not supported; only 'silu'"),
        (dict(attention_chunk_size=0), "'attention_chunk_size' is 0, a whole number from 1"),
        (dict(attention_chunk_size=None), "lacks 'attention_chunk_size'"),
        (dict(layer_types=[FAR]), "'layer_types' is a list of 1, a list of 4 names is wanted"),
        (
            dict(layer_types=["sliding_attention"] * 4),
            "'layer_types' with 'sliding_attention' is not",
        ),
        (
            dict(no_rope_layers=[1, 1]),
            "'no_rope_layers' is a list of 2, a list of 4 zeros and ones",
        ),
        (dict(no_rope_layers=[1, 1, 1, 2]), "a list of 4 zeros and ones is wanted"),
        (dict(no_rope_layers="all"), "'no_rope_layers' is 'all'"),
        (dict(no_rope_layers=None, no_rope_layer_interval=0), "'no_rope_layer_interval' is 0"),
        (dict(moe_layers=[4]), "'moe_layers' is a list of 1, a list of layers below 4 is wanted"),
        (dict(moe_layers=3), "'moe_layers' is 3"),
        (dict(interleave_moe_layer_step=0), "'interleave_moe_layer_step' is 0"),
        (dict(num_experts_per_tok=5), "'num_experts_per_tok' is 5, a whole number from 1 to 4"),
        (dict(use_qk_norm=1), "'use_qk_norm' is 1, true or false is wanted"),
        (dict(attn_temperature_tuning="on"), "'attn_temperature_tuning' is 'on'"),
        (dict(floor_scale=0), "'floor_scale' is 0, a finite number above 0"),
        (dict(attn_scale=-0.1), "'attn_scale' is -0.1, a finite number from 0"),
        (dict(rope_parameters=dict(rope_type="yarn")), "RoPE scaling 'yarn' of llama4_text"),
        (dict(quantization_config=dict(quant_method="fbgemm_fp8")), "quantized by 'fbgemm_fp8'"),
    ],
    "qwen3-next": [
        (dict(linear_num_key_heads=3), "names 4 heads of the gated delta rule to be shared by 3"),
        (dict(linear_conv_kernel_dim=1), "'linear_conv_kernel_dim' is 1, a whole number from 2"),
        (dict(linear_key_head_dim=0), "'linear_key_head_dim' is 0"),
        (dict(layer_types=["full_attention"]), "'layer_types' is a list of 1, a list of 3 names"),
        (
            dict(layer_types=["sliding"] * 3),
            "'layer_types' with 'sliding' is not supported in qwen3",
        ),
        (dict(mlp_only_layers="1"), "'mlp_only_layers' is '1', a list of layers below 3"),
        (dict(num_experts=4, num_experts_per_tok=5), "'num_experts_per_tok' is 5"),
        (dict(hidden_act="gelu"), "'hidden_act' is 'gelu', which is not supported"),
        (dict(rope_parameters=dict(rope_type="yarn")), "RoPE scaling 'yarn' of qwen3_next"),
        (dict(quantization_config=dict(quant_method="fp8")), "weights quantized by 'fp8'"),
    ],
    "jamba": [
        (dict(num_experts=0), "'num_experts' is 0"),
        (dict(num_experts=10**9), "'num_experts' is 1000000000"),
        (dict(num_experts=4, num_experts_per_tok=5), "'num_experts_per_tok' is 5"),
        (dict(attn_layer_period=0), "'attn_layer_period' is 0"),
        (dict(attn_layer_offset=-1), "'attn_layer_offset' is -1"),
        (dict(mamba_dt_rank="wide"), "'mamba_dt_rank' is 'wide', a whole number"),
        (dict(mamba_d_conv=1), "'mamba_d_conv' is 1, a whole number from 2"),
        (dict(mamba_d_state=10**9), "'mamba_d_state' is 1000000000"),
        (dict(mamba_expand=2.5), "'mamba_expand' is 2.5"),
        (dict(mamba_conv_bias=1), "'mamba_conv_bias' is 1, true or false is wanted"),
        (dict(hidden_act="gelu"), "'hidden_act' is 'gelu', which is not supported"),
        (dict(sliding_window=8), "'sliding_window' is 8, which is not supported"),
        (dict(quantization_config={}), "'quantization_config' is an object of 0 keys"),
    ],
    "bamba": [
        (dict(time_step_limit=[0.0, 0.5]), "'time_step_limit' is a list of 2, which is not"),
        (dict(attn_layer_indices=[3]), "'attn_layer_indices' is a list of 1, a list of layers"),
        (dict(attn_layer_indices="1"), "'attn_layer_indices' is '1'"),
        (dict(mamba_d_head=4), "names 8 heads of 4 for 64 channels"),
        (dict(mamba_n_heads=7, mamba_d_head=None), "names 64 channels of Mamba-2 to be shared by"),
        (dict(mamba_n_groups=3), "names 8 heads of Mamba-2 to be shared by 3"),
        (dict(mamba_n_groups=0), "'mamba_n_groups' is 0"),
        (dict(partial_rotary_factor=0.25), "'partial_rotary_factor' is 0.25"),
        (dict(rope_parameters=dict(rope_type="yarn")), "RoPE scaling 'yarn' of bamba"),
        (dict(rope_scaling=dict(type="linear", factor=2.0)), "RoPE scaling 'linear' of bamba"),
        (dict(rope_parameters=dict(partial_rotary_factor=3.0)), "n_rot 24 exceeds head_dim 8"),
    ],
    "llama": [
        (dict(model_type="gpt2"), "model type 'gpt2' of config.json is not supported; one of"),
        (dict(model_type=None), "lacks 'model_type'"),
        (dict(model_type=["llama"]), "'model_type' is a list of 1, a string is wanted"),
        (dict(model_type="x\n" * 99), "not supported"),
        (dict(hidden_size="32"), "'hidden_size' is '32', a whole number from 1"),
        (dict(hidden_size=32.0), "'hidden_size' is 32.0"),
        (dict(hidden_size=True), "'hidden_size' is True"),
        (dict(num_attention_heads=0), "'num_attention_heads' is 0"),
        (dict(num_attention_heads=4, num_key_value_heads=3), "4 heads and 3 kv heads"),
        (dict(num_key_value_heads=0), "'num_key_value_heads' is 0"),
        (dict(num_key_value_heads=[2, 2]), "models whose layers differ are not supported"),
        (dict(num_hidden_layers=10**9), "'num_hidden_layers' is 1000000000"),
        (dict(num_hidden_layers=-1), "'num_hidden_layers' is -1"),
        (dict(vocab_size=None), "lacks 'vocab_size'"),
        (dict(head_dim=10**9), "'head_dim' is 1000000000"),
        (dict(head_dim=7), "n_rot is 7"),
        (dict(head_dim=None, num_attention_heads=6), "no 'head_dim'"),
        (dict(rms_norm_eps=0), "'rms_norm_eps' is 0"),
        (dict(rms_norm_eps=math.inf), "'rms_norm_eps' is inf"),
        (dict(tie_word_embeddings="no"), "'tie_word_embeddings' is 'no', true or false is wanted"),
        (dict(hidden_act="gelu"), "'hidden_act' is 'gelu', which is not supported; only 'silu'"),
        (dict(rope_parameters="yarn"), "'rope_parameters' is 'yarn', an object is wanted"),
        (dict(rope_parameters={}, rope_theta=-1.0), "'rope_theta' is -1.0"),
        (dict(partial_rotary_factor=0.25), "'partial_rotary_factor' is 0.25"),
        (dict(quantization_config=dict(bits=4)), "'quantization_config' is an object of 1 keys"),
    ],
}

GGUFS = {
    "gemma2": [
        (dict(attn_logit_softcapping=0.0), "attn_logit_softcapping' is 0.0, a finite number above"),
        (dict(final_logit_softcapping=0.0), "final_logit_softcapping' is 0.0, a finite number"),
        (dict(attention__sliding_window=0), "'gemma2.attention.sliding_window' is 0"),
        (dict(attention__sliding_window_pattern=[1, 0]), "is a list of 2, a list of"),
        (dict(rope__freq_base_swa="1e4"), "'gemma2.rope.freq_base_swa' is '1e4'"),
        (dict(tensors={"rope_freqs.weight": Shaped((8,))}), "a gemma2 with the tensor"),
    ],
    "gemma3": [
        (dict(tensors={"rope_freqs.weight": Shaped((8,))}), "a gemma3 with the tensor"),
        (dict(rope__scaling__type="yarn", rope__scaling__factor=4.0), "gemma3 with RoPE scaling"),
        (dict(attn_logit_softcapping=50.0), "'gemma3.attn_logit_softcapping' is 50.0"),
        (dict(final_logit_softcapping=-1.0), "final_logit_softcapping' is -1.0, a finite number"),
        (dict(attention__sliding_window=-1), "'gemma3.attention.sliding_window' is -1"),
        (dict(attention__sliding_window_pattern=-6), "sliding_window_pattern' is -6"),
        (dict(attention__sliding_window_pattern=[1, 0]), "is a list of 2, a list of"),
        (dict(rope__freq_base_swa="1e4"), "'gemma3.rope.freq_base_swa' is '1e4'"),
        (dict(attention__value_length=8), "'gemma3.attention.value_length' is 8"),
        (dict(block_count=62, embedding_length=0), "'gemma3.embedding_length' is 0"),
    ],
    "gpt-oss": [
        (dict(expert_count=None), "lacks 'gpt-oss.expert_count'"),
        (dict(expert_count=10**6), "'gpt-oss.expert_count' is 1000000"),
        (dict(expert_used_count=5), "'gpt-oss.expert_used_count' is 5, a whole number from 1 to 4"),
        (dict(expert_feed_forward_length=None), "lacks 'gpt-oss.expert_feed_forward_length'"),
        (dict(attention__sliding_window=None), "lacks 'gpt-oss.attention.sliding_window'"),
        (dict(attention__sliding_window_pattern=[True]), "is a list of 1, a list of"),
    ],
    "deepseek2": [
        (dict(attention__key_length=192), "'deepseek2.attention.key_length' is 192, which is not"),
        (dict(attention__head_count_kv=4), "head_count_kv' is 4, which is not supported; only 1"),
        (dict(attention__key_length_mla=8), "key_length_mla' is 8, a whole number from 9"),
        (dict(attention__kv_lora_rank=None), "lacks 'deepseek2.attention.kv_lora_rank'"),
        (dict(expert_group_count=4), "chooses by softmax among 4 groups of experts is not supp"),
        (dict(expert_gating_func=3), "expert_gating_func' is 3, a whole number from 0 to 2"),
        (
            dict(expert_gating_func=2, expert_group_count=3, expert_group_used_count=2),
            "8 experts in 3 groups",
        ),
    ],
    "llama": [
        (dict(block_count=None), "lacks 'llama.block_count'"),
        (dict(block_count=2**31), "'llama.block_count' is 2147483648"),
        (dict(embedding_length="64"), "'llama.embedding_length' is '64'"),
        (dict(attention__head_count=0), "'llama.attention.head_count' is 0"),
        (dict(attention__head_count_kv=3), "4 heads and 3 kv heads"),
        (dict(attention__head_count_kv=np.array([2, 3], "u4")), "4 heads and 3 kv heads"),
        (dict(attention__head_count_kv=np.array([2], "u4")), "is a list of 1, a list of 2 whole"),
        (dict(feed_forward_length=np.array([9.0, 9.0], "f4")), "is a list of 2, a list of 2 whole"),
        (dict(attention__key_length=10**6), "'llama.attention.key_length' is 1000000"),
        (dict(attention__value_length=8), "'llama.attention.value_length' is 8"),
        (dict(attention__layer_norm_rms_epsilon=-1.0), "is -1.0, a finite number above 0"),
        (dict(attention__causal=False), "'llama.attention.causal' is False"),
        (dict(attention__sliding_window=-3), "'llama.attention.sliding_window' is -3"),
        (dict(rope__dimension_count=32), "n_rot 32 exceeds head_dim 16"),
        (dict(rope__dimension_count=7), "n_rot is 7"),
        (dict(rope__freq_base=0.0), "'llama.rope.freq_base' is 0.0"),
        (dict(expert_count=8), "lacks 'llama.expert_used_count'"),
        (dict(context_length=0), "'llama.context_length' is 0"),
    ],
}


def rows(table):
    return [(name, *row) for name, found in table.items() for row in found]


@pytest.mark.parametrize(("name", "change", "words"), rows(CONFIGS))
def test_config_json(name, change, words):
    refused(words, lambda: hf(name, **change))


@pytest.mark.parametrize(("arch", "change", "words"), rows(GGUFS))
def test_gguf_metadata(arch, change, words):
    refused(words, lambda: like(arch, **change))
