"""Tiny models with recurrent layers and random weights, written as llama.cpp reads them (GGUF)."""

import dataclasses
from pathlib import Path
from typing import Literal

import gguf
import numpy as np

from tests.peer.tiny_gguf import add_tokenizer, vocabulary

N_EMBD, N_FF, N_HEADS, N_KV_HEADS = 64, 96, 4, 2
N_EXPERTS, N_USED, N_FF_SHARED = 6, 2, 48
# llama.cpp wants twice the width of the residual.
D_INNER, D_STATE, D_CONV = 128, 16, 4
NORM_EPS, N_CTX_TRAIN = 1e-5, 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyRecurrent:
    """What a file is made of; equal models give equal files.

    Attributes:
      arch: family.
      attention: layers with attention, in jamba and granitehybrid.
      rank: width of Mamba-1's step sizes, heads of Mamba-2.
      n_groups: groups of Mamba-2's heads.
      n_rot: channels of a head of 16 that granitehybrid turns, 0 for none.
      scales: Granite's multipliers: embedding, residual, logits, attention; or none of them.
      experts: layers whose feed-forward network is a mixture, Granite's with a shared network.
      tied: the head is the embedding.
    """

    arch: Literal["mamba", "mamba2", "jamba", "granitehybrid"]
    n_layers: int = 3
    attention: tuple[int, ...] = ()
    rank: int = 8
    n_groups: int = 1
    n_rot: int = 16
    scales: tuple[float, float, float, float] | None = None
    experts: tuple[int, ...] = ()
    tied: bool = False
    seed: int = 0


def write_gguf(path: Path, model: TinyRecurrent) -> Path:
    """Writes the model, every tensor in float32; returns the path."""
    writer = gguf.GGUFWriter(path, model.arch)
    _add_header(writer, model)
    add_tokenizer(writer)
    for name, weight in weights(model).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weights(model: TinyRecurrent) -> dict[str, np.ndarray]:
    """Float32 weights by GGUF name; some states forget at once, some hardly in the whole text."""
    rng = np.random.default_rng(model.seed)
    n_vocab = len(vocabulary())
    made = {
        "token_embd.weight": _matrix(rng, n_vocab, N_EMBD, 0.8 if model.tied else 1.7),
        "output_norm.weight": _norm(rng, N_EMBD),
    }
    if not model.tied:
        made["output.weight"] = _matrix(rng, n_vocab, N_EMBD, 1.7)
    # As in tiny_gguf: the server withholds the probabilities of unfinished characters.
    head = made["token_embd.weight" if model.tied else "output.weight"]
    head[[*range(128, 256), n_vocab - 2, n_vocab - 1]] *= 0.1
    for i in range(model.n_layers):
        kind = _attention if i in model.attention else _mamba1 if _is_mamba1(model) else _mamba2
        layer = {"attn_norm.weight": _norm(rng, N_EMBD), **kind(rng, model)}
        if not model.arch.startswith("mamba"):
            layer |= _mixture(rng, model) if i in model.experts else _feed_forward(rng)
        made |= {f"blk.{i}.{name}": weight for name, weight in layer.items()}
    return made


def _attention(rng: np.random.Generator, model: TinyRecurrent) -> dict[str, np.ndarray]:
    kv = N_KV_HEADS * N_EMBD // N_HEADS
    return {
        "attn_q.weight": _matrix(rng, N_EMBD, N_EMBD, 1.5),
        "attn_k.weight": _matrix(rng, kv, N_EMBD, 1.5),
        "attn_v.weight": _matrix(rng, kv, N_EMBD, 0.6),
        "attn_output.weight": _matrix(rng, N_EMBD, N_EMBD, 0.6),
    }


def _feed_forward(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "ffn_norm.weight": _norm(rng, N_EMBD),
        "ffn_gate.weight": _matrix(rng, N_FF, N_EMBD, 0.8),
        "ffn_up.weight": _matrix(rng, N_FF, N_EMBD, 0.8),
        "ffn_down.weight": _matrix(rng, N_EMBD, N_FF, 0.8),
    }


def _mixture(rng: np.random.Generator, model: TinyRecurrent) -> dict[str, np.ndarray]:
    def stack(rows: int, columns: int) -> np.ndarray:
        return np.stack([_matrix(rng, rows, columns, 0.8) for _ in range(N_EXPERTS)])

    made = {
        "ffn_norm.weight": _norm(rng, N_EMBD),
        "ffn_gate_inp.weight": _matrix(rng, N_EXPERTS, N_EMBD, 1.0),
        "ffn_gate_exps.weight": stack(N_FF, N_EMBD),
        "ffn_up_exps.weight": stack(N_FF, N_EMBD),
        "ffn_down_exps.weight": stack(N_EMBD, N_FF),
    }
    if model.arch == "granitehybrid":
        made["ffn_gate_shexp.weight"] = _matrix(rng, N_FF_SHARED, N_EMBD, 0.8)
        made["ffn_up_shexp.weight"] = _matrix(rng, N_FF_SHARED, N_EMBD, 0.8)
        made["ffn_down_shexp.weight"] = _matrix(rng, N_EMBD, N_FF_SHARED, 0.8)
    return made


def _mamba1(rng: np.random.Generator, model: TinyRecurrent) -> dict[str, np.ndarray]:
    made = {
        "ssm_in.weight": _matrix(rng, 2 * D_INNER, N_EMBD, 1.0),
        "ssm_x.weight": _matrix(rng, model.rank + 2 * D_STATE, D_INNER, 1.5),
        "ssm_dt.weight": _matrix(rng, D_INNER, model.rank, 1.0),
        "ssm_dt.bias": rng.normal(0.0, 0.5, D_INNER).astype(np.float32),
        "ssm_a": _decay(rng, (D_INNER, D_STATE)),
        "ssm_d": _norm(rng, D_INNER),
        "ssm_out.weight": _matrix(rng, N_EMBD, D_INNER, 0.6),
        **_convolution(rng, D_INNER),
    }
    if model.arch == "jamba":
        sizes = {"dt": model.rank, "b": D_STATE, "c": D_STATE}
        made |= {f"ssm_{name}_norm.weight": _norm(rng, n) for name, n in sizes.items()}
    return made


def _mamba2(rng: np.random.Generator, model: TinyRecurrent) -> dict[str, np.ndarray]:
    n_conv = D_INNER + 2 * model.n_groups * D_STATE
    return {
        "ssm_in.weight": _matrix(rng, D_INNER + n_conv + model.rank, N_EMBD, 1.0),
        "ssm_dt.bias": rng.normal(0.0, 0.5, model.rank).astype(np.float32),
        "ssm_a": _decay(rng, (model.rank, 1)),
        "ssm_d": _norm(rng, (model.rank, 1)),
        "ssm_norm.weight": _norm(rng, (model.n_groups, D_INNER // model.n_groups)),
        "ssm_out.weight": _matrix(rng, N_EMBD, D_INNER, 0.6),
        **_convolution(rng, n_conv),
    }


def _convolution(rng: np.random.Generator, channels: int) -> dict[str, np.ndarray]:
    return {
        "ssm_conv1d.weight": rng.normal(0.0, 0.6, (channels, D_CONV)).astype(np.float32),
        "ssm_conv1d.bias": rng.normal(0.0, 0.3, channels).astype(np.float32),
    }


def _matrix(rng: np.random.Generator, rows: int, columns: int, gain: float) -> np.ndarray:
    return rng.normal(0.0, gain / columns**0.5, (rows, columns)).astype(np.float32)


def _norm(rng: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
    return rng.uniform(0.5, 1.5, shape).astype(np.float32)


def _decay(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return -np.exp(rng.uniform(-4.0, 1.0, shape)).astype(np.float32)


def _is_mamba1(model: TinyRecurrent) -> bool:
    return model.arch in ("mamba", "jamba")


def _add_header(writer: gguf.GGUFWriter, model: TinyRecurrent) -> None:
    writer.add_name(f"tiny-{model.arch}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(model.n_layers)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_ssm_inner_size(D_INNER)
    writer.add_ssm_state_size(D_STATE)
    writer.add_ssm_time_step_rank(model.rank)
    if not _is_mamba1(model):
        writer.add_ssm_group_count(model.n_groups)
    plain = model.arch.startswith("mamba")
    writer.add_feed_forward_length(0 if plain else N_FF)
    writer.add_head_count(0 if plain else N_HEADS)
    if plain:
        return
    kv_heads = [N_KV_HEADS if i in model.attention else 0 for i in range(model.n_layers)]
    writer.add_head_count_kv(kv_heads)
    if model.experts:
        writer.add_expert_count(N_EXPERTS)
        writer.add_expert_used_count(N_USED)
    if model.arch == "granitehybrid":
        _add_granite(writer, model)


def _add_granite(writer: gguf.GGUFWriter, model: TinyRecurrent) -> None:
    writer.add_rope_scaling_finetuned(model.n_rot > 0)
    writer.add_rope_dimension_count(model.n_rot or N_EMBD // N_HEADS)
    if model.experts:
        writer.add_expert_shared_feed_forward_length(N_FF_SHARED)
    if model.scales is None:
        return
    embedding, residual, logits, attention = model.scales
    writer.add_embedding_scale(embedding)
    writer.add_residual_scale(residual)
    writer.add_logit_scale(logits)
    writer.add_attention_scale(attention)
