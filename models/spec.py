"""What a decoder is, read from GGUF metadata or from a Hugging Face config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvrt.config import GroupSpec, MaskSpec, RopeSpec
from kvrt.errors import BadConfig, BadModelFile, UnsupportedModel

GGUF_ARCHS = ("llama", "qwen2", "qwen3")
HF_ARCHS = ("llama", "mistral", "qwen2", "qwen3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A pre-norm decoder with gated feed-forward layers (llama, mistral, qwen2, qwen3).

    Attributes:
      arch: family name.
      n_vocab: rows of the embedding.
      n_embd: width of the residual stream.
      n_ff: width of the feed-forward layers.
      n_heads: query heads.
      norm_eps: epsilon of the root-mean-square norms.
      n_ctx_train: trained context length in tokens.
      tied: the head is the embedding.
      qkv_bias: projections of q, k and v have biases.
      out_bias: the output projection has one.
      qk_norm: q and k are normalised by head before RoPE.
      groups: layers by kind of attention.
    """

    arch: str
    n_vocab: int
    n_embd: int
    n_ff: int
    n_heads: int
    norm_eps: float
    n_ctx_train: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    groups: tuple[GroupSpec, ...]

    @property
    def n_layers(self) -> int:
        """Layers of all groups."""
        return sum(len(g.layers) for g in self.groups)

    def group_of(self, layer: int) -> GroupSpec:
        """The group a layer belongs to."""
        return next(g for g in self.groups if layer in g.layers)


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderSpec:
    """Reads a spec from GGUF metadata.

    Args:
      metadata: key-value pairs of the header.
      tensors: tensor descriptions by name, with a `shape`; says what is tied and what has a bias.

    Raises:
      UnsupportedModel: the architecture is not one of `GGUF_ARCHS`, or scales RoPE unknown here.
      BadModelFile: a key is missing or contradicts the tensors.
    """
    arch = _need(metadata, "general.architecture")
    if arch not in GGUF_ARCHS:
        raise UnsupportedModel(
            f"architecture {arch!r} of this GGUF is not supported; one of {', '.join(GGUF_ARCHS)}"
        )
    n_embd = _need(metadata, f"{arch}.embedding_length")
    n_heads = _need(metadata, f"{arch}.attention.head_count")
    head_dim = metadata.get(f"{arch}.attention.key_length", n_embd // max(n_heads, 1))
    window = metadata.get(f"{arch}.attention.sliding_window", 0)
    return _build(
        arch=arch,
        n_layers=_need(metadata, f"{arch}.block_count"),
        n_vocab=_shape(tensors, "token_embd.weight")[0],
        n_embd=n_embd,
        n_ff=_need(metadata, f"{arch}.feed_forward_length"),
        n_heads=n_heads,
        n_kv_heads=metadata.get(f"{arch}.attention.head_count_kv", n_heads),
        head_dim=head_dim,
        norm_eps=float(_need(metadata, f"{arch}.attention.layer_norm_rms_epsilon")),
        n_ctx_train=_need(metadata, f"{arch}.context_length"),
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        rope=_gguf_rope(metadata, arch, head_dim),
        window=window,
    )


def with_freq_factors(spec: DecoderSpec, factors: tuple[float, ...]) -> DecoderSpec:
    """The spec with the frequency divisors of a GGUF's `rope_freqs.weight`."""
    groups = tuple(
        dataclasses.replace(g, rope=dataclasses.replace(g.rope, freq_factors=factors))
        if g.rope
        else g
        for g in spec.groups
    )
    return dataclasses.replace(spec, groups=groups)


def from_hf(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a spec from a Hugging Face config.json.

    Raises:
      UnsupportedModel: the model type is not one of `HF_ARCHS`, or an activation or RoPE scaling
        is unknown here.
      BadModelFile: a key is missing.
    """
    arch = _need(config, "model_type")
    if arch not in HF_ARCHS:
        raise UnsupportedModel(
            f"model type {arch!r} of config.json is not supported; one of {', '.join(HF_ARCHS)}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"activation {config['hidden_act']!r} is not supported; only silu")
    n_embd, n_heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    head_dim = config.get("head_dim") or n_embd // max(n_heads, 1)
    windowed = arch == "mistral" or config.get("use_sliding_window", False)
    bias = bool(config.get("attention_bias", False))
    if windowed and arch != "mistral":
        raise UnsupportedModel(f"{arch} with use_sliding_window is not supported")
    return _build(
        arch=arch,
        n_layers=_need(config, "num_hidden_layers"),
        n_vocab=_need(config, "vocab_size"),
        n_embd=n_embd,
        n_ff=_need(config, "intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        n_ctx_train=_need(config, "max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or arch == "qwen2",
        out_bias=bias and arch != "qwen2",
        qk_norm=arch == "qwen3",
        rope=_hf_rope(config, head_dim),
        window=(config.get("sliding_window") or 0) if windowed else 0,
    )


def _build(
    *, n_layers: int, n_kv_heads: int, head_dim: int, rope: RopeSpec, window: int, **rest: Any
) -> DecoderSpec:
    n_heads = rest["n_heads"]
    if not isinstance(n_kv_heads, int):
        raise UnsupportedModel("kv heads that differ by layer are not supported")
    if n_layers < 1 or n_kv_heads < 1 or n_heads % n_kv_heads:
        raise BadModelFile(
            f"the header names {n_layers} layers, {n_heads} heads and {n_kv_heads} kv heads; "
            "layers must be above 0 and heads a multiple of kv heads"
        )
    mask = MaskSpec(kind="window", size=window) if window else MaskSpec()
    try:
        group = GroupSpec(
            layers=tuple(range(n_layers)),
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            rope=rope,
            mask=mask,
        )
    except BadConfig as error:
        raise BadModelFile(f"the header describes an impossible attention: {error}") from error
    return DecoderSpec(groups=(group,), **rest)


def _need(source: Mapping[str, Any], key: str) -> Any:
    if key not in source:
        raise BadModelFile(f"the model's header lacks {key!r}, which every supported model has")
    return source[key]


def _shape(tensors: Mapping[str, Any], name: str) -> tuple[int, ...]:
    if name not in tensors:
        raise BadModelFile(f"tensor {name!r} is missing; the file is not a whole model")
    return tensors[name].shape


def _gguf_rope(metadata: Mapping[str, Any], arch: str, head_dim: int) -> RopeSpec:
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(f"RoPE scaling {kind!r} of this GGUF is not supported")
    return RopeSpec(
        n_rot=metadata.get(f"{arch}.rope.dimension_count", head_dim),
        base=float(metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        layout="norm" if arch == "llama" else "neox",
        scaling=kind,
        factor=float(metadata.get(f"{arch}.rope.scaling.factor", 1.0)),
        n_ctx_orig=metadata.get(
            f"{arch}.rope.scaling.original_context_length",
            metadata.get(f"{arch}.context_length", 0),
        ),
    )


def _hf_rope(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    # Newer files keep everything in rope_parameters, older ones in rope_theta and rope_scaling.
    rules = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rules.get("rope_type", rules.get("type", "default"))
    names = {"default": "none", "dynamic": "dynamic_ntk", "su": "longrope"}
    scaling = names.get(kind, kind)
    if scaling not in ("none", "linear", "llama3", "dynamic_ntk", "yarn", "longrope"):
        raise UnsupportedModel(f"RoPE scaling {kind!r} of config.json is not supported")
    trained = config.get("max_position_embeddings", 0)
    original = rules.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings", trained
    )
    share = rules.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    factor = rules.get("factor")
    if factor is None:
        factor = trained / original if scaling == "longrope" else 1.0
    return RopeSpec(
        n_rot=int(head_dim * share),
        base=float(rules.get("rope_theta", config.get("rope_theta", 10000.0))),
        scaling=scaling,
        factor=float(factor),
        n_ctx_orig=int(original),
        low_freq_factor=float(rules.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rules.get("high_freq_factor", 4.0)),
        short_factors=tuple(rules.get("short_factor", ())),
        long_factors=tuple(rules.get("long_factor", ())),
        beta_fast=float(rules.get("beta_fast") or 32.0),
        beta_slow=float(rules.get("beta_slow") or 1.0),
        magnitude=rules.get("attention_factor"),
    )
