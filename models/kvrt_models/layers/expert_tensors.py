"""Tensors of mixtures of experts: names and shapes in GGUF and in Hugging Face files.

A Hugging Face file holds gate and up of all experts in one tensor, inputs before outputs: gpt-oss
with their channels interleaved, Llama 4 one after the other. Jamba, Qwen3-Next, DeepSeek and
Kimi-Linear have a tensor for each expert.
"""

from collections.abc import Sequence

import numpy as np

from kvrt_models.spec import DecoderSpec, Experts

# Norms of layers that have experts beside a dense network: of what that gives, of what the experts
# take and of what they give.
BESIDE_NORMS = ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")
_HF_NAMES_OF_BESIDE = {
    "post_ffw_norm_1": "post_feedforward_layernorm_1.weight",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2.weight",
    "post_ffw_norm_2": "post_feedforward_layernorm_2.weight",
    "ffn_gate_inp": "router.proj.weight",
    "ffn_gate_inp_scale": "router.scale",
    "ffn_gate_exps": "experts.gate_up_proj",
    "ffn_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps_scale": "router.per_expert_scale",
}
_HF_MODULES = {
    "gpt_oss": "mlp",
    "llama4": "feed_forward",
    "llama4_text": "feed_forward",
    "jamba": "feed_forward",
    "qwen3_next": "mlp",
    "deepseek_v2": "mlp",
    "deepseek_v3": "mlp",
    "deepseek_v32": "mlp",
    "kimi_linear": "block_sparse_moe",
}
_HF_NAMES = {
    "ffn_gate_inp": "router",
    "ffn_gate_exps": "experts.gate_up_proj",
    "ffn_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_gate_inp_shexp": "shared_expert_gate",
    "ffn_gate_shexp": "shared_expert.gate_proj",
    "ffn_up_shexp": "shared_expert.up_proj",
    "ffn_down_shexp": "shared_expert.down_proj",
    "exp_probs_b": "gate.e_score_correction_bias",
}
# DeepSeek, and Kimi-Linear.
_HF_NAMES_OF_DEEPSEEK = {
    "ffn_gate_inp": "gate",
    "ffn_gate_shexp": "shared_experts.gate_proj",
    "ffn_up_shexp": "shared_experts.up_proj",
    "ffn_down_shexp": "shared_experts.down_proj",
}


# Families whose files have a tensor for each expert.
_BY_EXPERT = ("jamba", "qwen3_next", "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_linear")
_HF_NAMES_OF_ONE = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_HF_NAMES_OF_KIMIS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}


def expert_kinds(of: Experts) -> list[str]:
    """GGUF names, without layer and "weight", of what a layer with experts has."""
    if of.beside:
        return list(_HF_NAMES_OF_BESIDE)
    kinds = [kind for kind in _HF_NAMES if kind != "exp_probs_b"]
    kinds = [kind for kind in kinds if of.n_ff_shared or not kind.endswith("_shexp")]
    return [kind for kind in kinds if of.shared_gate or kind != "ffn_gate_inp_shexp"]


def biased_kinds(of: Experts) -> list[str]:
    """Those of `expert_kinds` that have a bias, and what is nothing but one."""
    alone = ["exp_probs_b"] if of.choice_bias else []
    return alone + [kind for kind in expert_kinds(of) if of.bias and not kind.endswith("_shexp")]


def is_experts(kind: str) -> bool:
    """Whether the name is one of `expert_kinds` or `biased_kinds`."""
    return kind in _HF_NAMES or kind in _HF_NAMES_OF_BESIDE


def expert_shape(of: DecoderSpec, kind: str) -> tuple[int, ...]:
    """The shape of a weight; a bias lacks the last axis."""
    experts = of.experts
    assert experts is not None
    if kind == "ffn_gate_inp_shexp":
        return (1, of.n_embd)
    if kind in BESIDE_NORMS or kind == "ffn_gate_inp_scale":
        return (of.n_embd,)
    if kind == "ffn_down_exps_scale":
        return (experts.n_experts,)
    if kind in ("ffn_gate_inp", "exp_probs_b"):
        return (experts.n_experts, of.n_embd)
    n, n_ff = (experts.n_experts,), experts.n_ff
    if kind.endswith("_shexp"):
        n, n_ff = (), experts.n_ff_shared
    return (*n, of.n_embd, n_ff) if "down" in kind else (*n, n_ff, of.n_embd)


def expert_hf_names(of: DecoderSpec, kind: str, what: str) -> list[str]:
    """What Hugging Face calls a tensor inside its layer, or the tensors that make it up."""
    if of.experts is not None and of.experts.beside:
        return [_HF_NAMES_OF_BESIDE[kind]]
    module, called = _HF_MODULES[of.arch], _HF_NAMES[kind]
    if of.arch == "qwen3_next" and kind == "ffn_gate_inp":
        called = "gate"
    if of.latent:
        called = _HF_NAMES_OF_DEEPSEEK.get(kind, called)
    if kind == "exp_probs_b":
        return [f"{module}.{called}"]
    if not kind.endswith("_exps"):
        return [f"{module}.{called}.{what}"]
    if of.arch in _BY_EXPERT and of.experts is not None:
        one = (_HF_NAMES_OF_KIMIS if of.arch == "kimi_linear" else _HF_NAMES_OF_ONE)[kind]
        return [f"{module}.experts.{i}.{one}.{what}" for i in range(of.experts.n_experts)]
    return [f"{module}.{called}" if what == "weight" else f"{module}.{called}_bias"]


def expert_from_hf(
    of: DecoderSpec, kind: str, what: str, parts: Sequence[np.ndarray]
) -> np.ndarray:
    """The tensor as GGUF has it: gate or up alone, outputs before inputs, all experts in one.

    One that cannot be divided in two is left as it is: its shape is refused later.
    """
    x = parts[0]
    if of.experts is not None and of.experts.beside:
        # Outputs before inputs already, gate and up of an expert one below the other.
        half = of.experts.n_ff
        first = {"ffn_gate_exps": slice(None, half), "ffn_up_exps": slice(half, None)}
        return x[:, first[kind]] if kind in first and x.ndim == 3 else x
    if of.arch in _BY_EXPERT:
        alike = all(part.shape == x.shape for part in parts)
        return np.stack(parts) if kind.endswith("_exps") and alike else x
    if not kind.endswith("_exps") or x.ndim < 2 or (x.shape[-1] % 2 and kind != "ffn_down_exps"):
        return x
    if kind != "ffn_down_exps":
        up = kind == "ffn_up_exps"
        half = x.shape[-1] // 2
        x = x[..., up::2] if of.arch == "gpt_oss" else x[..., up * half : (up + 1) * half]
    return x.swapaxes(1, 2) if what == "weight" and x.ndim == 3 else x
