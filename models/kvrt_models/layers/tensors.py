"""Which tensors a model has: their names in GGUF and in Hugging Face files, and their shapes.

A decoder's weight is one tensor, or several stacked by rows: one long product runs faster than
three short ones, for a step of one token is bound by how the matrices are read.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvrt_models.layers import expert_tensors, ssm
from kvrt_models.layers.gemma.sizes import LayerInputs
from kvrt_models.layers.latent_sizes import Latent
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
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
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
# DeepSeek: keys and values of all heads come from one latent, queries perhaps from another.
_LATENT_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
    "indexer_q_b": "self_attn.indexer.wq_b",
    "indexer_k": "self_attn.indexer.wk",
    "indexer_k_norm": "self_attn.indexer.k_norm",
    "indexer_weights": "self_attn.indexer.weights_proj",
}
_OF_HEADS = ("attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm")
# Decoder's names that the GGUF of a family has otherwise.
_GGUF_NAMES = {"gpt-oss": {"ffn_norm": "post_attention_norm"}}
# Networks without experts, as published and as transformers writes them.
_OTHER_HF_NAMES = {"kimi_linear": (".mlp.", ".block_sparse_moe.")}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_INPUT_NAMES = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
# Decoder's weights that are several tensors of the file, one below the other.
_STACKED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up": ("ffn_gate", "ffn_up"),
    "ffn_gate_up_shexp": ("ffn_gate_shexp", "ffn_up_shexp"),
}
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")
_SMALL = ("ffn_gate_inp", "attn_k_b", "attn_v_b", "altup_predict", "altup_correct", "altup_router")
_SMALL += ("indexer_weights",)
# Of a layer that only makes keys and values, which Hugging Face's files do not count as one.
_PRODUCER_NAMES = {"attn_norm": "kv_layer_norm", "attn_k": "k_proj", "attn_v": "v_proj"}


def tensor_names(of: DecoderSpec) -> list[str]:
    """GGUF names of all tensors a model of this spec must have."""
    names = [f"blk.{i}.{name}" for i in range(of.n_layers) for name in _layer_names(of, i)]
    names += ssm.ssm_tensor_names(of.ssm) if of.ssm else []
    names += _LAYER_INPUT_NAMES if of.layer_inputs else []
    names += _stream_names(of)
    return [*names, *(t for t in _TOP_NAMES if not (of.tied and t == "output.weight"))]


def _layer_names(of: DecoderSpec, layer: int) -> list[str]:
    left_out = {"attn_q_norm": not of.qk_norm, "attn_k_norm": not of.qk_norm}
    left_out |= {"attn_sinks": not of.attn_sinks} | _without(of.latent)
    left_out |= dict.fromkeys(("inp_gate", "proj", "post_norm"), of.layer_inputs is None)
    left_out |= {"layer_output_scale": not of.layer_scale}
    left_out |= {kind: not of.altup for kind in _BLOCK_NAMES if kind.startswith("altup_")}
    left_out |= {kind: not of.laurel_rank for kind in _BLOCK_NAMES if kind.startswith("laurel_")}
    kinds = [kind for kind in _block_names(of) if not left_out.get(kind)]
    biased = ["attn_q", "attn_k", "attn_v"] if of.qkv_bias else []
    biased += ["attn_output"] if of.out_bias else []
    biased += ["indexer_k_norm"] if of.latent and of.latent.indexer else []
    if of.experts is not None and layer in of.experts.layers:
        kinds = [k for k in kinds if of.experts.beside or k not in _DENSE]
        kinds += expert_tensors.expert_kinds(of.experts)
        biased += expert_tensors.biased_kinds(of.experts)
    elif of.ffn_bias:
        biased += _DENSE
    names = [*(f"{kind}.weight" for kind in kinds), *(f"{kind}.bias" for kind in biased)]
    return [name for name in names if _has(of, layer, name)]


def _without(latent: Latent | None) -> dict[str, bool]:
    """Tensors of `_LATENT_NAMES` that a model lacks; queries have one matrix, or two."""
    if latent is None:
        return {}
    two = latent.q_rank > 0
    left_out = dict.fromkeys((x for x in _LATENT_NAMES if x.startswith("indexer_")), True)
    left_out = {} if latent.indexer else left_out
    left_out |= {"attn_q": two}
    return left_out | dict.fromkeys(("attn_q_a", "attn_q_a_norm", "attn_q_b"), not two)


def _has(of: DecoderSpec, layer: int, name: str) -> bool:
    """Whether a layer has the tensor: attention and feed-forward are not in every layer."""
    if layer in of.producers:
        return name.split(".")[0] in _PRODUCER_NAMES
    if of.is_recurrent(layer) and name.startswith("attn_") and name != "attn_norm.weight":
        return False
    if of.reads(layer) and name.split(".")[0] in ("attn_k", "attn_v", "attn_k_norm"):
        return False
    if layer in of.v_of_k and name.startswith("attn_v."):
        return False
    return of.n_ff > 0 or not name.startswith("ffn_")


def tensor_shape(of: DecoderSpec, name: str) -> tuple[int, ...]:
    """The shape that a tensor of this GGUF name must have."""
    if name in ("token_embd.weight", "output.weight"):
        return (of.n_vocab, of.n_embd)
    if name == "output_norm.weight":
        return (of.n_embd,)
    if name in _stream_names(of):
        return (of.n_embd, of.n_embd)
    if of.layer_inputs and name in _LAYER_INPUT_NAMES:
        return _layer_input_shapes(of, of.layer_inputs)[name]
    if of.ssm and ssm.is_recurrent(name):
        return ssm.ssm_tensor_shape(of.ssm, name, of.n_embd)
    _, layer, kind, what = name.split(".")
    group = None if of.is_recurrent(int(layer)) else of.group_of(int(layer))
    d, n_kv_heads = (group.head_dim, group.n_kv_heads) if group else (0, 0)
    n_heads = of.n_heads_of(int(layer))
    q, kv, n_ff = n_heads * d, n_kv_heads * d, of.n_ff_of(int(layer))
    width = of.layer_inputs.width if of.layer_inputs else 0
    wide = {
        "attn_q": (2 * q if of.attn_gate else q, of.n_embd),
        "attn_k": (kv, of.n_embd),
        "attn_v": (kv, of.n_embd),
        "attn_output": (of.n_embd, q),
        "ffn_gate": (n_ff, of.n_embd),
        "ffn_up": (n_ff, of.n_embd),
        "ffn_down": (of.n_embd, n_ff),
        "inp_gate": (width, of.n_embd),
        "proj": (of.n_embd, width),
        "layer_output_scale": (1,),
        **_gemma3n_shapes(of),
    }
    if expert_tensors.is_experts(kind):
        shape = expert_tensors.expert_shape(of, kind)
        return shape if what == "weight" else shape[:-1]
    wide |= _latent_shapes(of) if of.latent else {}
    if kind in wide:
        return wide[kind] if what == "weight" else wide[kind][:1]
    return {"attn_q_norm": (d,), "attn_k_norm": (d,), "attn_sinks": (n_heads,)}.get(
        kind, (of.n_embd,)
    )


def _layer_input_shapes(of: DecoderSpec, to: LayerInputs) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that make the inputs of all layers."""
    n = of.n_layers * to.width
    shapes = (to.n_vocab, n), (n, of.n_embd), (to.width,)
    return dict(zip(_LAYER_INPUT_NAMES, shapes, strict=True))


def _stream_names(of: DecoderSpec) -> dict[str, str]:
    """What makes streams of the embedding, and of the streams one, in Hugging Face's files."""
    return {
        f"{name}_{i}.weight": f"model.{called}.{i - 1}.weight"
        for i in range(1, of.altup.n_streams if of.altup else 1)
        for name, called in (
            ("altup_proj", "altup_projections"),
            ("altup_unembd_proj", "altup_unembed_projections"),
        )
    }


def _gemma3n_shapes(of: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of streams beside each other and of narrow residuals."""
    n, rank = of.altup.n_streams if of.altup else 0, of.laurel_rank
    return {
        "altup_router": (n, of.n_embd),
        "altup_predict_coef": (n * n, n),
        "altup_correct_coef": (n, n),
        "laurel_l": (rank, of.n_embd),
        "laurel_r": (of.n_embd, rank),
    }


def _latent_shapes(of: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of latents; those of a head are products [H, O, I].

    `attn_k_b` makes of the part of a query without positions what the latent is compared with, and
    `attn_v_b` of a sum of latents that of values.
    """
    to = of.latent
    assert to is not None
    q = of.n_heads * (to.n_nope + to.n_rope)
    n_index, index_dim = (to.indexer.n_heads, to.indexer.head_dim) if to.indexer else (0, 0)
    return {
        "indexer_q_b": (n_index * index_dim, to.q_rank),
        "indexer_k": (index_dim, of.n_embd),
        "indexer_k_norm": (index_dim,),
        "indexer_weights": (n_index, of.n_embd),
        "attn_q": (q, of.n_embd),
        "attn_q_a": (to.q_rank, of.n_embd),
        "attn_q_a_norm": (to.q_rank,),
        "attn_q_b": (q, to.q_rank),
        "attn_kv_a_mqa": (to.rank + to.n_rope, of.n_embd),
        "attn_kv_a_norm": (to.rank,),
        "attn_k_b": (of.n_heads, to.rank, to.n_nope),
        "attn_v_b": (of.n_heads, to.n_value, to.rank),
        "attn_output": (of.n_embd, of.n_heads * to.n_value),
    }


def gguf_name(of: DecoderSpec, name: str) -> str:
    """What the GGUF of this family calls the tensor."""
    parts = name.split(".")
    parts[-2] = _GGUF_NAMES.get(of.arch, {}).get(parts[-2], parts[-2])
    return ".".join(parts)


def hf_names(of: DecoderSpec, name: str) -> list[str]:
    """What Hugging Face calls the tensor of this GGUF name, or the tensors that make it up."""
    if _is_mamba(of) and name == "output_norm.weight":
        return ["model.final_layernorm.weight"]
    top = _TOP_NAMES | _LAYER_INPUT_NAMES | _stream_names(of)
    if name in top:
        return [top[name]]
    if of.ssm and ssm.is_recurrent(name):
        layer = name.split(".")[1]
        return [f"model.layers.{layer}.{called}" for called in ssm.ssm_hf_names(of.ssm, name)]
    _, layer, kind, what = name.split(".")
    at = f"model.layers.{int(layer) - sum(x < int(layer) for x in of.producers)}."
    if expert_tensors.is_experts(kind):
        return [at + called for called in expert_tensors.expert_hf_names(of, kind, what)]
    if int(layer) in of.producers:
        return [f"model.{_PRODUCER_NAMES[kind]}.{what}"]
    called = at + _block_names(of)[kind]
    bare = kind in ("attn_sinks", "layer_output_scale", "altup_correct_scale")
    return [called if bare else f"{called}.{what}"]


def other_hf_names(of: DecoderSpec, names: Sequence[str]) -> list[str]:
    """What a folder of the same family may have in place of `hf_names`: often the same."""
    before, after = _OTHER_HF_NAMES.get(of.arch, ("", ""))
    return [name.replace(before, after) for name in names]


def tensor_from_hf(of: DecoderSpec, name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The tensor of this GGUF name, made of what Hugging Face keeps under `hf_names`."""
    if of.ssm and ssm.is_recurrent(name):
        return ssm.ssm_from_hf(of.ssm, parts, name, tensor_shape(of, name))
    _, _, kind, what = ("", "", *name.split("."))[-4:]
    if expert_tensors.is_experts(kind):
        return expert_tensors.expert_from_hf(of, kind, what, parts)
    return _of_latent(of, kind, parts[0]) if kind in ("attn_k_b", "attn_v_b") else parts[0]


def _of_latent(of: DecoderSpec, kind: str, x: np.ndarray) -> np.ndarray:
    """One of the two matrices of every head that Hugging Face keeps as one, keys first.

    One of another size is left as it is: its shape is refused later.
    """
    to = of.latent
    if to is None or x.shape != (of.n_heads * (to.n_nope + to.n_value), to.rank):
        return x
    by_head = x.reshape(of.n_heads, -1, to.rank)
    if kind == "attn_v_b":
        return np.ascontiguousarray(by_head[:, to.n_nope :])
    return np.ascontiguousarray(by_head[:, : to.n_nope].swapaxes(1, 2))


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight may be rounded: what is small, as norms and routers are, stays float32."""
    # What makes keys and values of latents is multiplied head by head.
    small = ssm.is_small(name) or any(x in name for x in _SMALL)
    return len(shape) > 1 and name.endswith(".weight") and not small


def is_norm(name: str) -> bool:
    """Whether the tensor of this GGUF name is the weight of a norm."""
    return name.endswith("_norm.weight")


def weight_parts(of: DecoderSpec) -> dict[str, tuple[str, ...]]:
    """Names of the decoder's weights, each with the tensors that are its rows, in order."""
    stack = {part: (whole, parts) for whole, parts in _STACKED.items() for part in parts}
    weights: dict[str, tuple[str, ...]] = {}
    names = tensor_names(of)
    there = set(names)
    for name in names:
        kind = name.split(".")[-2]
        if kind not in stack or (of.latent and kind == "attn_q"):
            weights[name] = (name,)
            continue
        whole, parts = stack[kind]
        renamed = _renamer(name, kind)
        # A layer that reads the keys and values of another makes queries alone.
        weights[renamed(whole)] = tuple(x for x in map(renamed, parts) if x in there)
    return weights


def weight_shape(of: DecoderSpec, parts: tuple[str, ...]) -> tuple[int, ...]:
    """The shape of a decoder's weight made of these tensors."""
    shapes = [tensor_shape(of, part) for part in parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _block_names(of: DecoderSpec) -> dict[str, str]:
    names = _BLOCK_NAMES | (_POST_NORM_NAMES if of.post_norms else {})
    names |= _RECURRENT_NAMES if _is_mamba(of) else {}
    if of.latent:
        names = {k: v for k, v in names.items() if k not in _OF_HEADS} | _LATENT_NAMES
    return names | (_FEED_FORWARD_NAMES if _is_mamba(of) or of.arch.startswith("llama4") else {})


def _is_mamba(of: DecoderSpec) -> bool:
    return of.ssm is not None and of.ssm.kind.startswith("mamba")


def _renamer(name: str, kind: str) -> Callable[[str], str]:
    before, after = name.split(f".{kind}.")
    return lambda other: f"{before}.{other}.{after}"
