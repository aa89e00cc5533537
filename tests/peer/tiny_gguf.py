"""Tiny models with random weights, written for llama.cpp (GGUF) and for transformers (a folder).

Both files hold the same weights, so they must give the same logits: the one for llama.cpp has the
channels of q and k in the order that its "norm" rotation wants, the other in the "neox" order.
"""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
from safetensors.numpy import save_file

Arch = Literal["llama", "qwen2", "qwen3", "gemma2", "gpt-oss"]

MERGES = (
    "t h", "th e", "i n", "e r", "a n", "an d", "o n", "r e", "a t", "e n", "o r", "in g", "e d",
    "i s", "i t", "e s", "a r", "o u", "s t", "a l", "n d", "o f", "t o", "h e", "h a", "l e",
    "Ġ t", "Ġ a", "Ġt he", "Ġ w", "Ġ s", "Ġ b", "Ġa nd", "Ġ c", "Ġ m", "Ġ f", "Ġ i", "Ġ p",
    "Ġ o", "Ġ d", "Ġo f", "Ġt o",
)  # fmt: skip
BOS, EOS = "<|startoftext|>", "<|endoftext|>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyModel:
    """What a file is made of; equal models give equal files.

    Attributes:
      arch: family; qwen2 has biases of q, k and v, qwen3 has norms of q and k, gemma2 has windows,
        soft caps and norms after attention and feed-forward, gpt-oss has windows, attention sinks,
        biases and experts.
      tied: the head is the embedding.
      scaling: RoPE scaling by `factor`, with yarn from half the trained length.
      factor: of the scaling.
      freq_factors: divides the frequencies by a tensor `rope_freqs.weight` (llama only).
      seed: of the weights.
    """

    arch: Arch = "llama"
    tied: bool = False
    scaling: Literal["none", "linear", "yarn"] = "none"
    factor: float = 1.0
    freq_factors: bool = False
    seed: int = 0
    n_layers: int = 2
    n_ff: int = 96
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 32
    n_ctx_train: int = 512
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    window: int = 16
    score_cap: float = 4.0
    logit_cap: float = 8.0
    n_experts: int = 5
    n_used: int = 2

    @property
    def n_embd(self) -> int:
        """Width of the residual; llama.cpp wants qwen2's to be that of the heads."""
        return self.n_heads * self.head_dim if self.arch == "qwen2" else 64


def vocabulary() -> list[str]:
    """256 byte tokens, the merged tokens, then the two control tokens: 300 in all."""
    letters = [_letter(byte) for byte in range(256)]
    return [*letters, *(m.replace(" ", "") for m in MERGES), BOS, EOS]


def weights(model: TinyModel) -> dict[str, np.ndarray]:
    """Float32 weights by Hugging Face name; attention is neither uniform nor a single peak."""
    rng = np.random.default_rng(model.seed)
    n, ff = model.n_embd, model.n_ff
    q, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    n_vocab = len(vocabulary())

    def matrix(rows: int, columns: int, gain: float) -> np.ndarray:
        return rng.normal(0.0, gain / columns**0.5, (rows, columns)).astype(np.float32)

    def norm(size: int, low: float = 0.5, high: float = 1.5) -> np.ndarray:
        return rng.uniform(low, high, size).astype(np.float32)

    # A tied embedding that outweighs the layers would repeat its own token for ever.
    embedding = matrix(n_vocab, n, 0.8 if model.tied else 1.7)
    made = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm(n)}
    if not model.tied:
        made["lm_head.weight"] = matrix(n_vocab, n, 1.7)
    # llama.cpp's server withholds the probabilities of unfinished characters, so greedy decoding
    # must keep to whole ones: bytes from 128 on and control tokens get small logits.
    head = made["model.embed_tokens.weight" if model.tied else "lm_head.weight"]
    head[[*range(128, 256), n_vocab - 2, n_vocab - 1]] *= 0.1
    for i in range(model.n_layers):
        at = f"model.layers.{i}."
        made[at + "input_layernorm.weight"] = norm(n)
        made[at + "post_attention_layernorm.weight"] = norm(n)
        if model.arch == "gemma2":
            made[at + "pre_feedforward_layernorm.weight"] = norm(n)
            made[at + "post_feedforward_layernorm.weight"] = norm(n)
        for name, shape in {"q": (q, n, 1.5), "k": (kv, n, 1.5), "v": (kv, n, 0.6)}.items():
            made[f"{at}self_attn.{name}_proj.weight"] = matrix(*shape)
            if model.arch == "qwen2":
                bias = rng.normal(0.0, 0.5, shape[0]).astype(np.float32)
                made[f"{at}self_attn.{name}_proj.bias"] = bias
        made[at + "self_attn.o_proj.weight"] = matrix(n, q, 0.6)
        if model.arch == "gpt-oss":
            made |= {at + name: w for name, w in _gpt_oss_weights(model, rng).items()}
        else:
            made[at + "mlp.gate_proj.weight"] = matrix(ff, n, 0.8)
            made[at + "mlp.up_proj.weight"] = matrix(ff, n, 0.8)
            made[at + "mlp.down_proj.weight"] = matrix(n, ff, 0.8)
        if model.arch == "qwen3":
            made[at + "self_attn.q_norm.weight"] = norm(model.head_dim, 1.0, 2.0)
            made[at + "self_attn.k_norm.weight"] = norm(model.head_dim, 1.0, 2.0)
    return made


def _gpt_oss_weights(model: TinyModel, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What a layer has beside others; gates of this size often reach SwiGLU's limit of 7."""
    n, ff, n_experts = model.n_embd, model.n_ff, model.n_experts
    q, kv = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    shapes = {"mlp.router": ((n_experts, n), 0.8), "mlp.experts.gate": ((n_experts, ff, n), 5.0)}
    shapes |= {"mlp.experts.up": ((n_experts, ff, n), 5.0)}
    shapes |= {"mlp.experts.down": ((n_experts, n, ff), 0.1)}
    made = {f"{k}.weight": rng.normal(0, g / s[-1] ** 0.5, s) for k, (s, g) in shapes.items()}
    made |= {f"{k}.bias": rng.normal(0, 0.3, s[:-1]) for k, (s, _) in shapes.items()}
    sizes = {"q": q, "k": kv, "v": kv, "o": n}
    made |= {f"self_attn.{k}_proj.bias": rng.normal(0, 0.3, size) for k, size in sizes.items()}
    made["self_attn.sinks.weight"] = rng.normal(2.0, 2.0, model.n_heads)
    return {name: value.astype(np.float32) for name, value in made.items()}


def freq_factors(model: TinyModel) -> np.ndarray:
    """Divisors of the frequencies, 1 for the fastest pair and 4 for the slowest. `[n_rot / 2]`"""
    return np.geomspace(1.0, 4.0, model.head_dim // 2).astype(np.float32)


def write_gguf(path: Path, model: TinyModel, *, n_part: int = 0) -> Path:
    """Writes the model as llama.cpp reads it, every tensor in float32; returns the path.

    With n_part in parts of so many tensors, whose names follow from the path.
    """
    writer = gguf.GGUFWriter(path, model.arch, split_max_tensors=n_part)
    _add_header(writer, model)
    add_tokenizer(writer)
    for name, weight in weights(model).items():
        writer.add_tensor(_gguf_name(name, model), _gguf_order(name, weight, model))
    if model.freq_factors:
        writer.add_tensor("rope_freqs.weight", freq_factors(model))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_folder(folder: Path, model: TinyModel) -> Path:
    """Writes the model as transformers reads it; returns the folder."""
    if model.freq_factors:
        raise ValueError("config.json has no word for frequency factors; leave them out")
    if model.arch in ("gemma2", "gpt-oss"):
        raise ValueError(f"a folder of {model.arch} has other tensors; tests/golden/hf has one")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": model.arch,
        "vocab_size": len(vocabulary()),
        "hidden_size": model.n_embd,
        "intermediate_size": model.n_ff,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.n_ctx_train,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,
        "rope_scaling": _hf_scaling(model),
        "tie_word_embeddings": model.tied,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(weights(model), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer_json()))
    return folder


def _letter(byte: int) -> str:
    """The printable letter that stands for a byte in GPT-2's byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))


def _hf_scaling(model: TinyModel) -> dict[str, object] | None:
    if model.scaling == "none":
        return None
    rule: dict[str, object] = {"rope_type": model.scaling, "factor": model.factor}
    if model.scaling == "yarn":
        rule["original_max_position_embeddings"] = model.n_ctx_train // 2
    return rule


def _add_header(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    writer.add_name(f"tiny-{model.arch}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_context_length(model.n_ctx_train)
    writer.add_embedding_length(model.n_embd)
    writer.add_feed_forward_length(model.n_ff)
    writer.add_block_count(model.n_layers)
    writer.add_head_count(model.n_heads)
    writer.add_head_count_kv(model.n_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_base)
    if model.arch == "gemma2":
        writer.add_sliding_window(model.window)
        writer.add_attn_logit_softcapping(model.score_cap)
        writer.add_final_logit_softcapping(model.logit_cap)
    if model.arch == "gpt-oss":
        writer.add_sliding_window(model.window)
        writer.add_expert_count(model.n_experts)
        writer.add_expert_used_count(model.n_used)
        writer.add_expert_feed_forward_length(model.n_ff)
    if model.scaling == "none":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(model.scaling))
    writer.add_rope_scaling_factor(model.factor)
    if model.scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(model.n_ctx_train // 2)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Writes the vocabulary that all tiny models share."""
    tokens = vocabulary()
    plain, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if t in (BOS, EOS) else plain for t in tokens])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(tokens.index(BOS))
    writer.add_eos_token_id(tokens.index(EOS))
    writer.add_add_bos_token(False)


def _tokenizer_json() -> dict[str, object]:
    tokens = vocabulary()
    added = [
        {"id": tokens.index(t), "content": t, "special": True, "single_word": False}
        | {"lstrip": False, "rstrip": False, "normalized": False}
        for t in (BOS, EOS)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {
        "type": "BPE",
        "vocab": {t: i for i, t in enumerate(tokens[:-2])},
        "merges": list(MERGES),
    }
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {**level, "use_regex": True},
        "decoder": {**level, "use_regex": True},
        "model": model,
    }


_BLOCK_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.down": "ffn_down_exps",
    "self_attn.sinks": "attn_sinks",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GPT_OSS_NAMES = {"post_attention_layernorm": "post_attention_norm"}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def _gguf_name(name: str, model: TinyModel) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    part, what = rest.rsplit(".", 1)
    other = {"gemma2": _GEMMA_NAMES, "gpt-oss": _GPT_OSS_NAMES}.get(model.arch, {})
    names = _BLOCK_NAMES | other
    return f"blk.{layer}.{names[part]}.{what}"


def _gguf_order(name: str, weight: np.ndarray, model: TinyModel) -> np.ndarray:
    """Channels of llama's q and k from pairs (i, i + D/2) to pairs (2i, 2i + 1)."""
    if model.arch != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    halves = weight.reshape(-1, 2, model.head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
