"""What a decoder is, read from GGUF metadata or from a Hugging Face config.json."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kvrt.config import GroupSpec, MaskSpec, RopeSpec
from kvrt.errors import BadConfig, BadModelFile, UnsupportedModel
from models.header import REMEDY, Header, is_number, show

GGUF_ARCHS = ("llama", "qwen2", "qwen3")
HF_ARCHS = ("llama", "mistral", "qwen2", "qwen3")
# Far above any model; a damaged header must not make work or lists in proportion to its numbers.
MAX_LAYERS = 4096
MAX_HEAD_DIM = 1 << 16


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
      ffn_bias: the feed-forward layers have them.
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
    ffn_bias: bool
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
      UnsupportedModel: the architecture is not one of `GGUF_ARCHS`, or uses what is unknown here.
      BadModelFile: a key is missing, of the wrong type, or contradicts another or the tensors.
    """
    arch = Header(metadata).text("general.architecture")
    _known(arch, "architecture {} of this GGUF", GGUF_ARCHS)
    keys = Header(metadata, f"{arch}.")
    n_embd, n_heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    head_dim = _head_dim(keys, "attention.key_length", n_embd, n_heads)
    usual = {"attention.value_length": head_dim, "attention.causal": True, "expert_count": 0}
    for key, value in usual.items():
        keys.only(key, value)
    rope = _gguf_rope(keys, tensors, arch, head_dim)
    return _build(
        arch=arch,
        n_layers=keys.whole("block_count", most=MAX_LAYERS),
        n_vocab=_shape(tensors, "token_embd.weight")[0],
        n_embd=n_embd,
        n_ff=keys.whole("feed_forward_length"),
        n_heads=n_heads,
        n_kv_heads=keys.whole("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        n_ctx_train=keys.whole("context_length"),
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        out_bias="blk.0.attn_output.bias" in tensors,
        ffn_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        rope=rope,
        window=_gguf_window(keys, arch),
    )


def with_freq_factors(spec: DecoderSpec, factors: tuple[float, ...]) -> DecoderSpec:
    """The spec with the frequency divisors of a GGUF's `rope_freqs.weight`.

    Raises:
      BadModelFile: a divisor is not a finite number above 0, or there are too many or too few.
    """
    if not all(map(is_number, factors)):
        raise BadModelFile(f"'rope_freqs.weight' must hold finite numbers above 0; {REMEDY}")
    try:
        groups = tuple(
            dataclasses.replace(g, rope=dataclasses.replace(g.rope, freq_factors=factors))
            if g.rope
            else g
            for g in spec.groups
        )
    except BadConfig as error:
        raise BadModelFile(f"'rope_freqs.weight' does not fit: {error}; {REMEDY}") from error
    return dataclasses.replace(spec, groups=groups)


def from_hf(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a spec from a Hugging Face config.json.

    Raises:
      UnsupportedModel: the model type is not one of `HF_ARCHS`, or uses what is unknown here.
      BadModelFile: a key is missing, of the wrong type, or contradicts another.
    """
    keys = Header(config)
    arch = keys.text("model_type")
    _known(arch, "model type {} of config.json", HF_ARCHS)
    keys.only("hidden_act", "silu", "swish")
    keys.only("quantization_config")
    bias = _hf_bias(keys, arch)
    n_layers = keys.whole("num_hidden_layers", most=MAX_LAYERS)
    n_embd, n_heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    head_dim = _head_dim(keys, "head_dim", n_embd, n_heads)
    return _build(
        arch=arch,
        n_layers=n_layers,
        n_vocab=keys.whole("vocab_size"),
        n_embd=n_embd,
        n_ff=keys.whole("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=_hf_kv_heads(keys, arch, n_heads),
        head_dim=head_dim,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        n_ctx_train=keys.whole("max_position_embeddings"),
        tied=keys.flag("tie_word_embeddings", False),
        qkv_bias=bias or arch == "qwen2",
        out_bias=bias,
        ffn_bias=keys.flag("mlp_bias", False),
        qk_norm=arch == "qwen3",
        rope=_hf_rope(keys, head_dim),
        window=_hf_window(keys, arch, n_layers),
    )


def _known(name: str, what: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise UnsupportedModel(
            f"{what.format(show(name))} is not supported; one of {', '.join(known)}"
        )


def _build(
    *, n_layers: int, n_kv_heads: int, head_dim: int, rope: RopeSpec, window: int, **rest: Any
) -> DecoderSpec:
    n_heads = rest["n_heads"]
    if n_heads % n_kv_heads:
        raise BadModelFile(
            f"the model's header names {n_heads} heads and {n_kv_heads} kv heads; heads must be a "
            f"multiple of kv heads; {REMEDY}"
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


def _shape(tensors: Mapping[str, Any], name: str) -> tuple[int, ...]:
    if name not in tensors:
        raise BadModelFile(f"tensor {name!r} is missing; the file is not a whole model")
    return tensors[name].shape


def _head_dim(keys: Header, key: str, n_embd: int, n_heads: int) -> int:
    if keys.has(key):
        return keys.whole(key, most=MAX_HEAD_DIM)
    if n_embd % n_heads:
        raise BadModelFile(
            f"the model's header names a width of {n_embd} and {n_heads} heads but no {key!r}; the "
            f"width must then be a multiple of the heads; {REMEDY}"
        )
    return n_embd // n_heads


def _rope(**rules: Any) -> RopeSpec:
    try:
        rope = RopeSpec(**rules)
    except BadConfig as error:
        raise BadModelFile(f"the header describes an impossible RoPE: {error}; {REMEDY}") from error
    if rope.beta_fast < rope.beta_slow or (rope.scaling == "yarn" and rope.base <= 1.0):
        raise BadModelFile(
            f"the header describes an impossible YaRN: base {rope.base}, beta_fast "
            f"{rope.beta_fast}, beta_slow {rope.beta_slow}; the base must be above 1 and beta_fast "
            f"not below beta_slow; {REMEDY}"
        )
    return rope


def _yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _gguf_window(keys: Header, arch: str) -> int:
    window = keys.whole("attention.sliding_window", 0, least=0)
    # A window as long as the context hides nothing; which layers a shorter one means is not said.
    if arch != "llama" and 0 < window < keys.whole("context_length"):
        raise UnsupportedModel(
            f"{arch} with a sliding window of {window} tokens is not supported; take a model "
            "without one"
        )
    return window if arch == "llama" else 0


def _check_factors(tensors: Mapping[str, Any], n_rot: int) -> None:
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in tensors:
            raise UnsupportedModel(
                f"LongRoPE (tensor {name!r}) of a GGUF is not supported; load the model's Hugging "
                "Face folder"
            )
    wanted = (n_rot // 2,)
    if "rope_freqs.weight" in tensors and tensors["rope_freqs.weight"].shape != wanted:
        raise BadModelFile(
            f"'rope_freqs.weight' has shape {tensors['rope_freqs.weight'].shape}, {wanted} is "
            f"wanted; {REMEDY}"
        )


def _gguf_rope(keys: Header, tensors: Mapping[str, Any], arch: str, head_dim: int) -> RopeSpec:
    """RoPE as llama.cpp reads it, where a factor without a type is linear.

    YaRN's ramp is the file's own; llama.cpp reads `yarn_beta_*` for a few other families only.
    """
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            f"RoPE scaling {show(kind)} of this GGUF is not supported; only none, linear or yarn"
        )
    old = keys.number("rope.scale_linear", 0.0, zero=True)
    factor = keys.number("rope.scaling.factor", old, zero=True) or 1.0
    keys.only("rope.scaling.alpha", 0.0)
    keys.only("rope.scaling.yarn_ext_factor", -1.0, 1.0 if kind == "yarn" else 0.0)
    keys.only("rope.scaling.yarn_attn_factor", 1.0)
    keys.only("rope.scaling.yarn_log_multiplier", 0.0)
    gain = keys.number("rope.scaling.attn_factor", 1.0)
    gain *= _yarn_magnitude(factor) if kind == "yarn" else 1.0
    trained = keys.whole("context_length")
    n_rot = keys.whole("rope.dimension_count", head_dim, most=MAX_HEAD_DIM)
    _check_factors(tensors, n_rot)
    return _rope(
        n_rot=n_rot,
        base=keys.number("rope.freq_base", 10000.0),
        layout="norm" if arch == "llama" else "neox",
        scaling=kind if factor != 1.0 else "none",
        factor=1.0 if kind == "none" else factor,
        n_ctx_orig=keys.whole("rope.scaling.original_context_length", 0, least=0) or trained,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        magnitude=gain,
    )


def _hf_kv_heads(keys: Header, arch: str, n_heads: int) -> int:
    """Null means as many as heads; a missing key means that for llama only."""
    may_lack = arch == "llama" or "num_key_value_heads" in keys.values
    return keys.whole("num_key_value_heads", n_heads if may_lack else None)


def _hf_bias(keys: Header, arch: str) -> bool:
    """Whether all four projections have biases; qwen2's three stand whatever the key says."""
    if arch == "mistral":
        keys.only("attention_bias", False)
    if arch != "llama":
        keys.only("mlp_bias", False)
    return keys.flag("attention_bias", False) and arch != "qwen2"


def _hf_window(keys: Header, arch: str, n_layers: int) -> int:
    """Tokens that every layer sees, 0 for all; windows in some layers only are refused."""
    if arch == "llama":
        return 0
    missing = "sliding_window" not in keys.values
    size = 4096 if missing else keys.whole("sliding_window", 0, least=0)
    if arch == "mistral":
        kinds, usual = [], "sliding_attention" if size else "full_attention"
    else:
        first = keys.whole("max_window_layers", 28, least=0)
        windowed = keys.flag("use_sliding_window", False) and size and first < n_layers
        kinds, usual = ["sliding_attention"] if windowed else [], "full_attention"
    kinds = keys.values.get("layer_types") or kinds
    if not isinstance(kinds, list) or any(kind != usual for kind in kinds):
        raise UnsupportedModel(
            f"{arch} with layer_types or a sliding window that differ by layer is not supported; "
            f"every layer must be {usual!r}"
        )
    return size if arch == "mistral" else 0


def _hf_rope(keys: Header, head_dim: int) -> RopeSpec:
    """RoPE as transformers reads it from rope_scaling, or from the newer rope_parameters."""
    rules = keys.inner("rope_scaling")
    if not rules.values:
        rules = keys.inner("rope_parameters")
    if any(isinstance(value, Mapping) for value in rules.values.values()):
        raise UnsupportedModel("RoPE that differs by kind of layer is not supported; only one rule")
    kind = rules.text("rope_type", rules.text("type", "default"))
    names = {"default": "none", "dynamic": "dynamic_ntk"}
    scaling = names.get(kind, kind)
    if scaling not in ("none", "linear", "llama3", "dynamic_ntk", "yarn", "longrope"):
        raise UnsupportedModel(
            f"RoPE scaling {show(kind)} of config.json is not supported; one of default, linear, "
            "llama3, dynamic, yarn, longrope"
        )
    rules.only("mrope_section")
    # None of these families rotates a part of a head in transformers.
    for source in (keys, rules):
        source.only("partial_rotary_factor", 1.0)
    trained = keys.whole("max_position_embeddings")
    rule = {} if scaling == "none" else _hf_rule(keys, rules, scaling, head_dim // 2)
    base = rules.number("rope_theta", keys.number("rope_theta", 10000.0))
    return _rope(n_rot=head_dim, base=base, scaling=scaling, **({"n_ctx_orig": trained} | rule))


def _hf_rule(keys: Header, rules: Header, scaling: str, n_pairs: int) -> dict[str, Any]:
    """What a rule needs beside the base; linear and dynamic know only the trained length."""
    if scaling in ("linear", "dynamic_ntk"):
        return dict(factor=rules.number("factor"))
    name, trained = "original_max_position_embeddings", keys.whole("max_position_embeddings")
    original = keys.whole(name, rules.whole(name, trained))
    if scaling == "llama3":
        low, high = rules.number("low_freq_factor"), rules.number("high_freq_factor")
        if low >= high:
            raise BadModelFile(f"low_freq_factor {low} must be below {high}, the high; {REMEDY}")
        return dict(
            factor=rules.number("factor"),
            n_ctx_orig=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    factor = rules.number("factor", trained / original)
    rule: dict[str, Any] = dict(factor=factor, n_ctx_orig=original)
    if scaling == "longrope":
        rule |= dict(
            short_factors=rules.numbers("short_factor", n_pairs),
            long_factors=rules.numbers("long_factor", n_pairs),
        )
    else:
        rule |= _hf_yarn(rules, factor)
    return rule | (
        dict(magnitude=rules.number("attention_factor")) if rules.has("attention_factor") else {}
    )


def _hf_yarn(rules: Header, factor: float) -> dict[str, Any]:
    rules.only("truncate", True)
    fast = rules.number("beta_fast", 32.0, zero=True) or 32.0
    slow = rules.number("beta_slow", 1.0, zero=True) or 1.0
    over = rules.number("mscale", 0.0, zero=True)
    under = rules.number("mscale_all_dim", 0.0, zero=True)
    # One of the two alone has no effect in transformers.
    both = over > 0 and under > 0
    ratio = _yarn_magnitude(factor, over) / _yarn_magnitude(factor, under)
    return dict(beta_fast=fast, beta_slow=slow, magnitude=ratio if both else None)
