"""A family of decoders as data, and the description of a decoder by a header that it reads.

A reader asks for keys by the names that most config.json have; a family's tables say what its own
files call them, and what holds where they say nothing.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models import spec
from kvrt_models.header import REMEDY, Header, brief
from kvrt_models.spec import DecoderSpec, Experts, Scoring

# Far above any model; a damaged header must not make work or lists in proportion to its numbers.
MAX_LAYERS = 4096
MAX_HEAD_DIM = 1 << 16
MAX_EXPERTS = 4096

# What a GGUF calls the keys that a config.json has too.
GGUF_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How headers of a kind of decoder are read, and what its files call the tensors.

    Attributes:
      read: fields of the spec that this family has otherwise than llama, `layers` among them, from
        the header, the number of layers and the channels of a head.
      hf: model type of its config.json; "" if it has none.
      gguf: architecture of its GGUF files; "" if it has none.
      keys: what its config.json calls keys.
      gguf_keys: what its GGUF calls them, where not as in `GGUF_KEYS`.
      usual: values in place of keys that a config.json lacks.
      gguf_usual: likewise of a GGUF.
      heads: what attention keeps: keys and values of heads, a latent, or nothing.
      bias: projections of a folder that `attention_bias` gives biases; "qkv" always have them.
      mlp_bias: the feed-forward layers of a folder may have biases.
      kv_heads_as_heads: a config.json without kv heads has as many as heads.
      hybrid: layers of a GGUF may have no attention.
      moe: GGUF files may have experts.
      activation: key of config.json and the values that are known.
      qk_norm: q and k are normed by head.
      norms_less_one: a folder holds the weights of norms less one.
      mlp: what a folder calls the feed-forward of a layer.
      names: what a folder calls tensors in their layer, by GGUF names without layer and end.
      other_names: a part of a folder's names, and what other folders of the family have there.
      gguf_names: what a GGUF calls tensors of a layer, where the decoder has another name.
      gate_up: how a folder's tensor of all experts holds gate and up: channels in turn, one half
        behind the other, or as rows. None where each expert has its own tensors.
      text_part: model type of a folder whose `text_config` is read, and nothing else of it.
      pictures: model type of a folder that is refused, for it has more than this text model.
      notes: lines about a folder for people, from its header and the spec.
    """

    read: Callable[[Header, int, int], dict[str, Any]]
    hf: str = ""
    gguf: str = ""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gguf_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    usual: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gguf_usual: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    heads: Literal["own", "latent", "none"] = "own"
    bias: Literal["all", "qkv", "none"] = "all"
    mlp_bias: bool = False
    kv_heads_as_heads: bool = False
    hybrid: bool = False
    moe: bool = False
    activation: tuple[str, ...] = ("hidden_act", "silu", "swish")
    qk_norm: bool = False
    norms_less_one: bool = False
    mlp: str = "mlp"
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    other_names: tuple[str, str] = ("", "")
    gguf_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gate_up: Literal["interleaved", "halves", "rows"] | None = None
    text_part: str = ""
    pictures: str = ""
    notes: Callable[[Header, DecoderSpec], tuple[str, ...]] = lambda keys, of: ()

    def header(self, values: Mapping[str, Any], tensors: Mapping[str, Any] | None) -> Header:
        """The header of one of its files; `tensors` are those of a GGUF."""
        if tensors is None:
            return Header(values, names=self.keys, usual=self.usual, arch=self.hf)
        names = {**GGUF_KEYS, **self.gguf_keys}
        return Header(values, f"{self.gguf}.", names, self.gguf_usual, self.gguf, tensors)

    def describe(self, keys: Header) -> DecoderSpec:
        """Reads a spec.

        Raises:
          UnsupportedModel: the header asks for what is unknown here.
          BadModelFile: a key is missing, of the wrong type, or contradicts another or the tensors.
        """
        if keys.tensors is None:
            keys.only(*self.activation)
            refuse_quantized(keys)
        n_layers = keys.whole("num_hidden_layers", most=MAX_LAYERS)
        n_heads, n_kv_heads, head_dim, n_ff = self._sizes(keys, n_layers)
        gguf = keys.tensors is not None
        plain: dict[str, Any] = dict(
            arch=keys.arch,
            n_vocab=_n_rows(keys) if gguf else keys.whole("vocab_size"),
            n_embd=keys.whole("hidden_size"),
            n_ff=n_ff,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            norm_eps=keys.number("rms_norm_eps", None if gguf else 1e-6),
            n_ctx_train=keys.whole("max_position_embeddings"),
            tied=_is_tied(keys),
            qk_norm=self.qk_norm or "blk.0.attn_q_norm.weight" in (keys.tensors or {}),
            **(self._biases(keys, n_kv_heads)),
        )
        return spec.build(**(plain | self.read(keys, n_layers, head_dim)))

    def _sizes(self, keys: Header, n_layers: int) -> tuple[Any, Any, int, Any]:
        """Heads, kv heads, channels of a head and width of the feed-forward, by layer or of all."""
        if self.heads == "none":
            return 0, 0, 1, 0
        if self.heads == "latent":
            return keys.whole("num_attention_heads"), 1, 1, keys.whole("intermediate_size")
        n_ff = keys.by_layer("intermediate_size", n_layers)
        if keys.tensors is None:
            n_heads, key = keys.whole("num_attention_heads"), "num_key_value_heads"
            # Null means as many as heads.
            usual = n_heads if self.kv_heads_as_heads or keys.is_null(key) else None
            kv_heads = n_heads if keys.is_null(key) else keys.whole(key, usual)
            return n_heads, kv_heads, _head_dim(keys, n_heads), n_ff
        least = 0 if self.hybrid else 1
        by_layer = keys.by_layer("num_attention_heads", n_layers, least=least)
        head_dim = _head_dim(keys, max(*by_layer, 1))
        for key, value in (("attention.value_length", head_dim), ("attention.causal", True)):
            keys.only(key, value)
        if not self.moe:
            keys.only("num_experts", 0)
        kv_heads = keys.by_layer("num_key_value_heads", n_layers, by_layer, least=least)
        return by_layer, kv_heads, head_dim, n_ff

    def _biases(self, keys: Header, n_kv_heads: Any) -> dict[str, bool]:
        """Which products have biases: as tensors of a GGUF or keys of a config.json say."""
        if self.heads == "none" or (self.heads == "latent" and keys.tensors is not None):
            return dict(qkv_bias=False, out_bias=False, ffn_bias=False)
        if keys.tensors is not None:
            first = next((i for i, n in enumerate(n_kv_heads) if n), 0)
            return dict(
                qkv_bias=f"blk.{first}.attn_q.bias" in keys.tensors,
                out_bias=f"blk.{first}.attn_output.bias" in keys.tensors,
                ffn_bias="blk.0.ffn_gate.bias" in keys.tensors,
            )
        if self.bias == "none":
            keys.only("attention_bias", False)
        if not self.mlp_bias:
            keys.only("mlp_bias", False)
        bias = keys.flag("attention_bias", False)
        return dict(
            qkv_bias=bias or self.bias == "qkv",
            out_bias=bias and self.bias == "all",
            ffn_bias=keys.flag("mlp_bias", False),
        )


def _head_dim(keys: Header, n_heads: int) -> int:
    """The channels of a head: as the key says, or the width by the heads."""
    if keys.has("head_dim") or "head_dim" in keys.usual:
        return keys.whole("head_dim", most=MAX_HEAD_DIM)
    n_embd = keys.whole("hidden_size")
    if n_embd % n_heads:
        raise BadModelFile(
            f"the model's header names a width of {n_embd} and {n_heads} heads but no "
            f"{keys.called('head_dim')!r}; the width must then be a multiple of the heads; {REMEDY}"
        )
    return n_embd // n_heads


def _n_rows(keys: Header) -> int:
    """Rows of a GGUF's embedding."""
    name = "token_embd.weight"
    if name not in (keys.tensors or {}):
        raise BadModelFile(f"tensor {name!r} is missing; the file is not a whole model")
    assert keys.tensors is not None
    return keys.tensors[name].shape[0]


def _is_tied(keys: Header) -> bool:
    if keys.tensors is not None:
        return "output.weight" not in keys.tensors
    return keys.flag("tie_word_embeddings", False)


def refuse_quantized(keys: Header) -> None:
    """Refuses a config.json of quantized weights; raises UnsupportedModel."""
    method = keys.inner("quantization_config").values.get("quant_method")
    if method is not None:
        raise UnsupportedModel(
            f"weights quantized by {brief(method)} are not supported; take the model in bf16 or "
            "f32, or as a GGUF"
        )
    keys.only("quantization_config")


def experts_of(
    keys: Header, layers: Iterable[int], scoring: Scoring, *, n_ff: int = 0, **rest: Any
) -> Experts | None:
    """The mixtures of these layers, or None where there are no layers.

    Args:
      keys: of the model.
      layers: that have experts.
      scoring: as in `Experts`.
      n_ff: width of one; 0 is that of the header.
      **rest: other fields of `Experts`.
    """
    layers = tuple(layers)
    if not layers:
        return None
    n = keys.whole("num_experts", most=MAX_EXPERTS)
    if keys.tensors is None:
        Header(keys.values).only("num_experts", n)
    n_used = keys.whole("num_experts_per_tok", most=n)
    return Experts(
        layers=layers,
        n_experts=n,
        n_used=n_used,
        n_ff=n_ff or keys.whole("moe_intermediate_size"),
        scoring=scoring,
        **rest,
    )


def expert_groups(keys: Header, least: int) -> dict[str, int]:
    """The groups of experts that a header names, of `least` experts or more.

    Raises:
      BadModelFile: experts do not fill them, or they are too small to choose from.
    """
    n = keys.whole("num_experts", most=MAX_EXPERTS)
    n_used = keys.whole("num_experts_per_tok", most=n)
    n_groups = keys.whole("n_group", most=n)
    usual = n_groups if keys.tensors is not None else None
    n_open = keys.whole("topk_group", usual, most=n_groups)
    size = n // n_groups
    if n % n_groups or size < least or n_used > n_open * size:
        raise BadModelFile(
            f"the model's header names {n} experts in {n_groups} groups, of which {n_open} give "
            f"{n_used} experts a token; groups are of one size, {least} or more, and have as many; "
            f"{REMEDY}"
        )
    return dict(n_groups=n_groups, n_groups_used=n_open)
