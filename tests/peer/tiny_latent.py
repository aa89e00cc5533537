"""Tiny DeepSeeks with random weights, written as llama.cpp reads them (GGUF)."""

import dataclasses
from pathlib import Path

import gguf
import numpy as np

from tests.peer.tiny_gguf import add_tokenizer, vocabulary

N_EMBD, N_FF, N_HEADS, N_LAYERS = 64, 96, 4, 3
RANK, NOPE, ROPE, VALUE = 32, 16, 8, 24
N_EXPERTS, N_USED, N_FF_EXPERT, N_SHARED = 8, 3, 24, 2
NORM_EPS, N_CTX_TRAIN = 1e-5, 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyLatent:
    """What a file is made of; equal models give equal files.

    Attributes:
      sigmoid: experts are chosen by sigmoids with biases, in groups, as in V3; else as in V2.
      growth: YaRN's `mscale_all_dim`, 0 for no YaRN.
      factor: of YaRN.
      joined: the matrices that make keys and values of latents are one, as before April 2025.
    """

    sigmoid: bool = True
    growth: float = 0.0
    factor: float = 4.0
    joined: bool = False
    seed: int = 0


def write_gguf(path: Path, model: TinyLatent) -> Path:
    """Writes the model, every tensor in float32; returns the path."""
    writer = gguf.GGUFWriter(path, "deepseek2")
    _add_header(writer, model)
    add_tokenizer(writer)
    for name, weight in weights(model).items():
        writer.add_tensor(name, weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weights(model: TinyLatent) -> dict[str, np.ndarray]:
    """Weights by GGUF name; attention is neither uniform nor a single peak."""
    rng = np.random.default_rng(model.seed)
    n_vocab = len(vocabulary())

    def matrix(*shape: int, gain: float = 0.8) -> np.ndarray:
        return rng.normal(0.0, gain / shape[-1] ** 0.5, shape)

    def norm(size: int) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size)

    made = {
        "token_embd.weight": matrix(n_vocab, N_EMBD, gain=1.7),
        "output_norm.weight": norm(N_EMBD),
        "output.weight": matrix(n_vocab, N_EMBD, gain=1.7),
    }
    # As in tiny_gguf: the server withholds the probabilities of unfinished characters.
    made["output.weight"][[*range(128, 256), n_vocab - 2, n_vocab - 1]] *= 0.1
    for i in range(N_LAYERS):
        layer = {
            "attn_norm": norm(N_EMBD),
            "attn_q_a": matrix(20, N_EMBD, gain=1.0),
            "attn_q_a_norm": norm(20),
            "attn_q_b": matrix(N_HEADS * (NOPE + ROPE), 20, gain=1.5),
            "attn_kv_a_mqa": matrix(RANK + ROPE, N_EMBD, gain=1.5),
            "attn_kv_a_norm": norm(RANK),
            "attn_k_b": matrix(N_HEADS, RANK, NOPE, gain=1.0),
            "attn_v_b": matrix(N_HEADS, VALUE, RANK),
            "attn_output": matrix(N_EMBD, N_HEADS * VALUE),
            "ffn_norm": norm(N_EMBD),
        }
        ff, end = (N_FF, "") if i == 0 else (N_FF_EXPERT * N_SHARED, "_shexp")
        layer |= {f"ffn_gate{end}": matrix(ff, N_EMBD), f"ffn_up{end}": matrix(ff, N_EMBD)}
        layer |= {f"ffn_down{end}": matrix(N_EMBD, ff)}
        if model.joined:
            pair = layer.pop("attn_k_b").swapaxes(1, 2), layer.pop("attn_v_b")
            layer["attn_kv_b"] = np.concatenate(pair, axis=1).reshape(-1, RANK)
        if i:
            layer["ffn_gate_inp"] = matrix(N_EXPERTS, N_EMBD, gain=1.0)
            layer["ffn_gate_exps"] = matrix(N_EXPERTS, N_FF_EXPERT, N_EMBD)
            layer["ffn_up_exps"] = matrix(N_EXPERTS, N_FF_EXPERT, N_EMBD)
            layer["ffn_down_exps"] = matrix(N_EXPERTS, N_EMBD, N_FF_EXPERT)
        if i and model.sigmoid:
            made[f"blk.{i}.exp_probs_b.bias"] = rng.normal(0.0, 0.2, N_EXPERTS)
        made |= {f"blk.{i}.{name}.weight": weight for name, weight in layer.items()}
    return made


def _add_header(writer: gguf.GGUFWriter, model: TinyLatent) -> None:
    writer.add_name("tiny-deepseek2")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_block_count(N_LAYERS)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_HEADS if model.joined else 1)
    writer.add_key_length(NOPE + ROPE if model.joined else RANK + ROPE)
    writer.add_value_length(VALUE if model.joined else RANK)
    if not model.joined:
        writer.add_key_length_mla(NOPE + ROPE)
        writer.add_value_length_mla(VALUE)
    writer.add_kv_lora_rank(RANK)
    writer.add_q_lora_rank(20)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_rope_dimension_count(ROPE)
    writer.add_rope_freq_base(10000.0)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(N_EXPERTS)
    writer.add_expert_used_count(N_USED)
    writer.add_expert_feed_forward_length(N_FF_EXPERT)
    writer.add_expert_shared_count(N_SHARED)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(model.sigmoid)
    kinds = gguf.ExpertGatingFuncType
    writer.add_expert_gating_func(kinds.SIGMOID if model.sigmoid else kinds.SOFTMAX)
    if model.sigmoid:
        writer.add_expert_group_count(4)
        writer.add_expert_group_used_count(2)
    if model.growth:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(model.factor)
        writer.add_rope_scaling_orig_ctx_len(N_CTX_TRAIN // 4)
        writer.add_rope_scaling_yarn_log_mul(0.1 * model.growth)
