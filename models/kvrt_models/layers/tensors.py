"""Which tensors a model has: their names in GGUF and in Hugging Face files, and their shapes.

A decoder's weight is one tensor, or several stacked by rows: one long product runs faster than
three short ones, for a step of one token is bound by how the matrices are read.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvrt_models.layers import expert_tensors, ssm
from kvrt_models.spec import DecoderSpec

# GGUF names of a block's tensors and what Hugging Face calls them.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma calls "post attention" what comes after it, where others mean what precedes feed-forward.
_POST_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Jamba and Bamba.
_RECURRENT_NAMES = {"ffn_norm": "pre_ff_layernorm"}
_FEED_FORWARD_NAMES = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
# Decoder's names that the GGUF of a family has otherwise.
_GGUF_NAMES = {"gpt-oss": {"ffn_norm": "post_attention_norm"}}
# What stands before the names of the text part in models of several kinds of input.
_HF_PREFIXES = {"llama4": "language_model."}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Decoder's weights that are several tensors of the file, one below the other.
_STACKED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up": ("ffn_gate", "ffn_up"),
    "ffn_gate_up_shexp": ("ffn_gate_shexp", "ffn_up_shexp"),
}
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")


def tensor_names(of: DecoderSpec) -> list[str]:
    """GGUF names of all tensors a model of this spec must have."""
    names = [f"blk.{i}.{name}" for i in range(of.n_layers) for name in _layer_names(of, i)]
    names += ssm.ssm_tensor_names(of.ssm) if of.ssm else []
    return [*names, *(t for t in _TOP_NAMES if not (of.tied and t == "output.weight"))]


def _layer_names(of: DecoderSpec, layer: int) -> list[str]:
    left_out = {"attn_q_norm": not of.qk_norm, "attn_k_norm": not of.qk_norm}
    left_out |= {"attn_sinks": not of.attn_sinks}
    kinds = [kind for kind in _block_names(of) if not left_out.get(kind)]
    biased = ["attn_q", "attn_k", "attn_v"] if of.qkv_bias else []
    biased += ["attn_output"] if of.out_bias else []
    if of.experts is not None and layer in of.experts.layers:
        kinds = [k for k in kinds if k not in _DENSE] + expert_tensors.expert_kinds(of.experts)
        biased += expert_tensors.biased_kinds(of.experts)
    elif of.ffn_bias:
        biased += _DENSE
    names = [*(f"{kind}.weight" for kind in kinds), *(f"{kind}.bias" for kind in biased)]
    return [name for name in names if _has(of, layer, name)]


def _has(of: DecoderSpec, layer: int, name: str) -> bool:
    """Whether a layer has the tensor: attention and feed-forward are not in every layer."""
    if of.is_recurrent(layer) and name.startswith("attn_") and name != "attn_norm.weight":
        return False
    return of.n_ff > 0 or not name.startswith("ffn_")


def tensor_shape(of: DecoderSpec, name: str) -> tuple[int, ...]:
    """The shape that a tensor of this GGUF name must have."""
    if name in ("token_embd.weight", "output.weight"):
        return (of.n_vocab, of.n_embd)
    if name == "output_norm.weight":
        return (of.n_embd,)
    if of.ssm and ssm.is_recurrent(name):
        return ssm.ssm_tensor_shape(of.ssm, name, of.n_embd)
    _, layer, kind, what = name.split(".")
    group = None if of.is_recurrent(int(layer)) else of.group_of(int(layer))
    d, n_kv_heads = (group.head_dim, group.n_kv_heads) if group else (0, 0)
    q, kv = of.n_heads * d, n_kv_heads * d
    wide = {
        "attn_q": (2 * q if of.attn_gate else q, of.n_embd),
        "attn_k": (kv, of.n_embd),
        "attn_v": (kv, of.n_embd),
        "attn_output": (of.n_embd, q),
        "ffn_gate": (of.n_ff, of.n_embd),
        "ffn_up": (of.n_ff, of.n_embd),
        "ffn_down": (of.n_embd, of.n_ff),
    }
    if expert_tensors.is_experts(kind):
        shape = expert_tensors.expert_shape(of, kind)
        return shape if what == "weight" else shape[:-1]
    if kind in wide:
        return wide[kind] if what == "weight" else wide[kind][:1]
    return {"attn_q_norm": (d,), "attn_k_norm": (d,), "attn_sinks": (of.n_heads,)}.get(
        kind, (of.n_embd,)
    )


def gguf_name(of: DecoderSpec, name: str) -> str:
    """What the GGUF of this family calls the tensor."""
    parts = name.split(".")
    parts[-2] = _GGUF_NAMES.get(of.arch, {}).get(parts[-2], parts[-2])
    return ".".join(parts)


def hf_names(of: DecoderSpec, name: str) -> list[str]:
    """What Hugging Face calls the tensor of this GGUF name, or the tensors that make it up."""
    prefix = hf_prefix(of)
    if _is_mamba(of) and name == "output_norm.weight":
        return ["model.final_layernorm.weight"]
    if name in _TOP_NAMES:
        return [prefix + _TOP_NAMES[name]]
    if of.ssm and ssm.is_recurrent(name):
        return [f"model.layers.{name.split('.')[1]}.{ssm.hf_name(of.ssm, name)}"]
    _, layer, kind, what = name.split(".")
    at = f"{prefix}model.layers.{layer}."
    if expert_tensors.is_experts(kind):
        return [at + called for called in expert_tensors.expert_hf_names(of, kind, what)]
    called = at + _block_names(of)[kind]
    return [called if kind == "attn_sinks" else f"{called}.{what}"]


def hf_prefix(of: DecoderSpec) -> str:
    """What stands before every name of `hf_names`."""
    return _HF_PREFIXES.get(of.arch, "")


def tensor_from_hf(of: DecoderSpec, name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The tensor of this GGUF name, made of what Hugging Face keeps under `hf_names`."""
    if of.ssm and ssm.is_recurrent(name):
        return ssm.ssm_from_hf(of.ssm, parts[0], name, tensor_shape(of, name))
    _, _, kind, what = ("", "", *name.split("."))[-4:]
    if expert_tensors.is_experts(kind):
        return expert_tensors.expert_from_hf(of, kind, what, parts)
    return parts[0]


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight may be rounded: what is small, as norms and routers are, stays float32."""
    small = ssm.is_small(name) or "ffn_gate_inp" in name
    return len(shape) > 1 and name.endswith(".weight") and not small


def is_norm(name: str) -> bool:
    """Whether the tensor of this GGUF name is the weight of a norm."""
    return name.endswith("_norm.weight")


def weight_parts(of: DecoderSpec) -> dict[str, tuple[str, ...]]:
    """Names of the decoder's weights, each with the tensors that are its rows, in order."""
    stack = {part: (whole, parts) for whole, parts in _STACKED.items() for part in parts}
    weights: dict[str, tuple[str, ...]] = {}
    for name in tensor_names(of):
        kind = name.split(".")[-2]
        if kind not in stack:
            weights[name] = (name,)
            continue
        whole, parts = stack[kind]
        renamed = _renamer(name, kind)
        weights[renamed(whole)] = tuple(map(renamed, parts))
    return weights


def weight_shape(of: DecoderSpec, parts: tuple[str, ...]) -> tuple[int, ...]:
    """The shape of a decoder's weight made of these tensors."""
    shapes = [tensor_shape(of, part) for part in parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _block_names(of: DecoderSpec) -> dict[str, str]:
    names = _BLOCK_NAMES | (_POST_NORM_NAMES if of.post_norms else {})
    names |= _RECURRENT_NAMES if _is_mamba(of) else {}
    return names | (_FEED_FORWARD_NAMES if _is_mamba(of) or of.arch.startswith("llama4") else {})


def _is_mamba(of: DecoderSpec) -> bool:
    return of.ssm is not None and of.ssm.kind != "delta"


def _renamer(name: str, kind: str) -> Callable[[str], str]:
    before, after = name.split(f".{kind}.")
    return lambda other: f"{before}.{other}.{after}"
