"""What a decoder is, and what the readers of GGUF headers and of config.json build it with."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from kvrt.config import GroupSpec, MaskSpec, RecurrentSpec
from kvrt.errors import BadConfig, BadModelFile
from kvrt_models.header import REMEDY

Scoring = Literal["softmax", "share", "sigmoid", "sigmoid_share", "sigmoid_each"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clamped:
    """The gate of gpt-oss: g * sigmoid(alpha * g) * (up + 1), both kept within the limit.

    Attributes:
      alpha: gain of the sigmoid.
      limit: bound of the gate from above, and of up on both sides.
    """

    alpha: float
    limit: float


Activation = Literal["silu", "gelu_tanh"] | Clamped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts: each token takes the few networks that its router scores highest.

    Attributes:
      layers: that have experts; in the others all tokens take one network.
      n_experts: networks of a layer.
      n_used: networks that a token takes.
      n_ff: width of one.
      scoring: "softmax" over the scores of the chosen experts weights their outputs, "share" is a
        softmax over the scores of all; "sigmoid" of each score weights the expert's input,
        "sigmoid_each" its output, and "sigmoid_share" that by its part of those of the chosen.
      bias: router and experts have biases.
      n_ff_shared: width of the network that every token takes beside them; 0 without one.
      shared_gate: that network's output is multiplied by the sigmoid of a score of its own.
      scale: multiplies the weights of outputs.
      n_groups: of experts side by side, which are rated by their best one, or with sigmoids by the
        sum of their best two.
      n_groups_used: groups among which a token chooses.
      choice_bias: what is added to the sigmoids before experts are chosen, and weighs nothing.
      beside: the layers have their network without experts as well, and add what both give: each is
        normed for itself, and so are the stream that the router takes and what the experts do.

    Source: arXiv:2405.04434, sec. 2.2.2; arXiv:2412.19437, sec. 2.1.2.
    """

    layers: tuple[int, ...]
    n_experts: int
    n_used: int
    n_ff: int
    scoring: Scoring
    bias: bool = False
    n_ff_shared: int = 0
    shared_gate: bool = False
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1
    choice_bias: bool = False
    beside: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SsmSpec:
    """Recurrent layers of a decoder, all alike.

    Attributes:
      kind: "mamba1" has a decay for every channel and state, "mamba2" one for every head; "delta"
        is the gated delta rule, with one for every head; "kda" with one for every channel of a key;
        "retention" is gated retention, with one for every head.
      layers: indices of the layers, ascending.
      d_inner: channels; of the gated delta rule those of its values.
      d_state: numbers that a channel remembers: of the gated delta rule channels of a key.
      d_conv: tokens that the convolution sees, its own included; at least 2, and 0 without one.
      dt_rank: width through which Mamba-1 makes its step sizes; unused by Mamba-2.
      n_heads: heads of Mamba-2, channels of one step size, or of the gated delta rule's values;
        unused by Mamba-1.
      n_groups: groups of Mamba-2's heads that share B and C, and of channels normed together; of
        the gated delta rule's heads that share a query and a key.
      norms: step sizes, B and C are normed (Jamba); Mamba-1 only.
      conv_bias: the convolution has a bias.
      proj_bias: the projections in and out have biases.
      rope_base: of the rotation of queries and keys of gated retention.
    """

    kind: Literal["mamba1", "mamba2", "delta", "kda", "retention"]
    layers: tuple[int, ...]
    d_inner: int
    d_state: int
    d_conv: int
    dt_rank: int = 0
    n_heads: int = 0
    n_groups: int = 1
    norms: bool = False
    conv_bias: bool = True
    proj_bias: bool = False
    rope_base: float = 1e4

    def __post_init__(self) -> None:
        """Refuses heads that do not share the channels, or the groups, evenly."""
        if self.kind == "mamba1":
            return
        called = {"mamba2": "Mamba-2", "retention": "gated retention"}.get(
            self.kind, "the gated delta rule"
        )
        for whole, name, part in (
            (self.d_inner, "channels", self.n_heads),
            (self.n_heads, "heads", self.n_groups),
        ):
            if whole % part:
                raise BadModelFile(
                    f"the model's header names {whole} {name} of {called} to be shared by "
                    f"{part}; they must be a multiple of it; {REMEDY}"
                )

    @property
    def is_delta(self) -> bool:
        """Whether the layers have a gated delta rule."""
        return self.kind in ("delta", "kda")

    @property
    def n_conv(self) -> int:
        """Channels of the convolution: of B and C, or of queries and keys, as well."""
        shared = 2 * self.n_groups * self.d_state if self.kind != "mamba1" else 0
        return self.d_inner + shared

    @property
    def recurrent(self) -> RecurrentSpec:
        """What the cache keeps: the convolution's last inputs, and the state."""
        state = (self.d_inner, self.d_state)
        if self.is_delta or self.kind == "retention":
            state = (self.n_heads, self.d_state, self.d_inner // self.n_heads)
        if self.kind == "mamba2":
            state = (self.n_heads, self.d_inner // self.n_heads, self.d_state)
        # Gated retention has no convolution, and counts tokens.
        first = (self.d_conv - 1, self.n_conv) if self.d_conv else (1,)
        return RecurrentSpec(layers=self.layers, shapes=(first, state))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Indexer:
    """What chooses the tokens that a query of latent attention reads.

    Attributes:
      n_heads: index heads.
      head_dim: channels of an index key, the rotated ones first; more than these.
      n_cells: tokens that a query reads at most.

    Source: DeepSeek-V3.2-Exp `inference/model.py`; transformers `modeling_deepseek_v32`.
    """

    n_heads: int
    head_dim: int
    n_cells: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention whose keys and values are all made of one latent a token (MLA).

    Attributes:
      rank: channels of the latent, which is normalised.
      n_rope: rotated channels of a head; those of the keys are the same in all heads.
      n_nope: other channels of a head's queries and keys.
      n_value: channels of a head's values.
      q_rank: channels of a latent that queries are made of; 0 where they come from the stream.
      norm_eps: epsilon of the latents' norms.
      indexer: chooses what queries read; None is all that they see.

    Source: arXiv:2405.04434, sec. 2.1.
    """

    rank: int
    n_rope: int
    n_nope: int
    n_value: int
    q_rank: int = 0
    norm_eps: float = 1e-6
    indexer: Indexer | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What each layer is given of a token beside the stream: a small embedding of its own.

    Attributes:
      width: channels of a layer's.
      n_vocab: rows of the table, which has those of all layers.

    Source: transformers `Gemma4TextModel.project_per_layer_inputs`.
    """

    width: int
    n_vocab: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AltUp:
    """Streams of a token beside each other, of which each layer computes one.

    Attributes:
      n_streams: of a token.
      active: the one that is computed.
      scaled: what gates the layers' inputs is multiplied by weights before.

    Source: arXiv:2301.13310.
    """

    n_streams: int
    active: int
    scaled: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """A pre-norm decoder with gated feed-forward layers (llama, mistral, qwen, gemma).

    Layers may keep a state instead of keys and values (mamba, mamba2, jamba, bamba, granitehybrid,
    qwen3_next, kimi_linear).

    Attributes:
      arch: family name.
      n_vocab: rows of the embedding.
      n_embd: width of the residual stream.
      n_ff: width of the feed-forward layers without experts, of the widest where they differ; 0
        where there are none.
      n_heads: query heads, of the layer with most where layers differ.
      norm_eps: epsilon of the root-mean-square norms.
      n_ctx_train: trained context length in tokens.
      tied: the head is the embedding.
      qkv_bias: projections of q, k and v have biases.
      out_bias: the output projection has one.
      ffn_bias: the feed-forward layers have them.
      qk_norm: q and k are normalised by head before RoPE, with weights.
      groups: layers by kind of attention.
      post_norms: outputs of attention and feed-forward are normalised before they are added.
      activation: of the gate of the feed-forward layers.
      embed_scale: multiplies the rows of the embedding, not the head.
      logit_cap: logits become cap * tanh(logit / cap); None is off.
      attn_sinks: heads have a logit that joins the softmax and carries no value.
      experts: of feed-forward layers; None where no layer has any.
      unit_qk_norm: q and k of layers with RoPE are normalised by head, without weights.
      residual_scale: multiplies what a mixer or feed-forward adds to the stream.
      logit_divisor: divides the logits.
      ssm: recurrent layers; None where all have attention.
      attn_gate: what attention gives is multiplied by the sigmoid of gates, of which the projection
        of q makes as many, those of a head behind its q.
      latent: what all attention layers keep in place of keys and values, or None.
      layer_inputs: what layers are given beside the stream, or None.
      unit_v_norm: values are normalised by head, without weights.
      v_of_k: layers whose values are made of the projection of k, before its norm.
      layer_scale: each layer multiplies the stream behind it by a number of its own.
      n_ff_readers: width of the feed-forward of layers that read the keys and values of others; 0
        is `n_ff`.
      altup: streams beside each other, or None for one.
      laurel_rank: width of the narrow products whose result joins attention's in the residual; 0
        without them.
      ffn_cutoffs: by layer, deviations above their mean below which gates of the feed-forward are
        zero before the activation; None keeps all, and so does an empty list.
      layer_heads: query heads by layer where they differ, otherwise empty; 0 in layers without
        attention.
      layer_ff: likewise `n_ff`.
      producers: layers that only make keys and values of the stream, which others read, and leave
        it as it is (YOCO). They are counted among the layers.
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
    post_norms: bool = False
    activation: Activation = "silu"
    embed_scale: float = 1.0
    logit_cap: float | None = None
    attn_sinks: bool = False
    experts: Experts | None = None
    unit_qk_norm: bool = False
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    ssm: SsmSpec | None = None
    attn_gate: bool = False
    latent: Latent | None = None
    layer_inputs: LayerInputs | None = None
    unit_v_norm: bool = False
    v_of_k: tuple[int, ...] = ()
    layer_scale: bool = False
    n_ff_readers: int = 0
    producers: tuple[int, ...] = ()
    altup: AltUp | None = None
    laurel_rank: int = 0
    ffn_cutoffs: tuple[float | None, ...] = ()
    layer_heads: tuple[int, ...] = ()
    layer_ff: tuple[int, ...] = ()

    @property
    def exit_layer(self) -> int:
        """Layers up to the last that keeps something; those behind only read what these keep."""
        own = [i for g in self.groups for i in g.layers if i not in self.index_layers]
        return max((*own, *(self.ssm.layers if self.ssm else ()))) + 1

    @property
    def n_layers(self) -> int:
        """Layers of all kinds."""
        n = len(self.ssm.layers if self.ssm else ()) - len(self.index_layers)
        return sum(len(g.all_layers) for g in self.groups) + n

    @property
    def index_layers(self) -> tuple[int, ...]:
        """What keeps the index keys of layers, behind the model's last: it is none of its own."""
        return tuple(keys for g in self.groups if g.indexed for _, keys in g.indexed.keys_of)

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """What the cache keeps for the recurrent layers."""
        return self.ssm.recurrent if self.ssm else None

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps a state instead of keys and values."""
        return self.ssm is not None and layer in self.ssm.layers

    def group_of(self, layer: int) -> GroupSpec:
        """The group a layer belongs to."""
        return next(g for g in self.groups if layer in g.all_layers)

    def reads(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of another, and makes none."""
        return any(layer == x for g in self.groups for x, _ in g.kv_of)

    def n_heads_of(self, layer: int) -> int:
        """Query heads of a layer with attention."""
        return self.layer_heads[layer] if self.layer_heads else self.n_heads

    @property
    def n_stream(self) -> int:
        """Channels of the residual stream, of all that lie beside each other."""
        return self.n_embd * (self.altup.n_streams if self.altup else 1)

    def n_ff_of(self, layer: int) -> int:
        """Width of a layer's feed-forward without experts."""
        if self.layer_ff:
            return self.layer_ff[layer]
        return self.n_ff_readers if self.n_ff_readers and self.reads(layer) else self.n_ff


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers(GroupSpec):
    """A group of layers before the sizes that all kinds share, and before it is checked.

    Attributes:
      n_kv_heads: where they differ from other layers', or 0; likewise `head_dim`.
      window: tokens that a query sees, its own included; 0 for all before it.
      chunk: tokens of a chunk, of which a query sees its own; 0 for all before it.
    """

    n_kv_heads: int = 0
    head_dim: int = 0
    window: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        """Leaves checks to the group; a window and chunks in one are our own mistake."""
        assert not (self.window and self.chunk)

    def group(self, head_dim: int, scale: float | None) -> GroupSpec:
        """The layers with sizes; raises BadConfig where these are impossible."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(GroupSpec)}
        if size := self.window or self.chunk:
            fields["mask"] = MaskSpec(kind="window" if self.window else "chunked", size=size)
        fields["head_dim"] = self.head_dim or head_dim
        fields["scale"] = scale if self.scale is None else self.scale
        return GroupSpec(**fields)


def build(
    *,
    layers: Iterable[Layers],
    n_kv_heads: int | Sequence[int],
    head_dim: int,
    scale: float | None = None,
    **rest: Any,
) -> DecoderSpec:
    """A spec whose attention was found possible; kinds without layers are left out.

    Args:
      layers: kinds of layers; together they are all layers.
      n_kv_heads: kv heads of every layer, or a list by layer.
      head_dim: channels of a head.
      scale: factor of the scores; None is 1 / sqrt(head_dim).
      **rest: fields of `DecoderSpec`; n_heads and n_ff may be lists as well.

    Raises:
      BadModelFile: sizes contradict each other.
    """
    heads, kv_heads = _of_layer(rest["n_heads"]), _of_layer(n_kv_heads)
    kinds = [kind for each in layers for kind in _by_kv_heads(each, kv_heads)]
    for n, n_kv in {(heads(i), kind.n_kv_heads) for kind in kinds for i in kind.layers}:
        if n % n_kv or not n:
            raise BadModelFile(
                f"the model's header names {n} heads and {n_kv} kv heads; heads must be a "
                f"multiple of kv heads; {REMEDY}"
            )
    try:
        groups = tuple(kind.group(head_dim, scale) for kind in kinds)
    except BadConfig as error:
        raise BadModelFile(f"the header describes an impossible attention: {error}") from error
    for name, by_layer in (("n_heads", "layer_heads"), ("n_ff", "layer_ff")):
        if not isinstance(rest[name], int):
            sizes = tuple(rest[name])
            rest |= {name: max(sizes), by_layer: sizes if len(set(sizes) - {0}) > 1 else ()}
    return DecoderSpec(groups=groups, **rest)


def _of_layer(sizes: int | Sequence[int]) -> Callable[[int], int]:
    """A size by layer."""
    return (lambda layer: sizes) if isinstance(sizes, int) else sizes.__getitem__


def _by_kv_heads(kind: Layers, kv_heads: Callable[[int], int]) -> list[Layers]:
    """A kind of layers divided by the kv heads that they have."""
    if kind.n_kv_heads:
        return [kind] if kind.layers else []
    numbers = dict.fromkeys(map(kv_heads, kind.layers))
    if len(numbers) > 1:
        assert not kind.kv_of and kind.indexed is None
    return [
        dataclasses.replace(
            kind, layers=tuple(i for i in kind.layers if kv_heads(i) == n), n_kv_heads=n
        )
        for n in numbers
    ]


def gemma(n_embd: int, logit_cap: float | None) -> dict[str, Any]:
    """What all Gemmas have in common from the second on; a cap of 0 or None is off."""
    return dict(
        post_norms=True,
        activation="gelu_tanh",
        embed_scale=math.sqrt(n_embd),
        logit_cap=logit_cap or None,
    )
