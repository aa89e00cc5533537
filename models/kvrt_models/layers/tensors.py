"""Which tensors a model has: their names in GGUF and in Hugging Face files, and their shapes.

A decoder's weight is one tensor, or several stacked by rows: one long product runs faster than
three short ones, for a step of one token is bound by how the matrices are read.
"""

import functools

from kvrt_models.families.shared.registry import family_of
from kvrt_models.layers.delta.net import GatedDeltaNet, KimiDelta
from kvrt_models.layers.experts import Mixture
from kvrt_models.layers.gemma.altup import AlternatingUpdate, LowRankResidual
from kvrt_models.layers.gemma.layer_inputs import LayerGate
from kvrt_models.layers.latent import LatentAttention
from kvrt_models.layers.mamba import Mamba1, Mamba2
from kvrt_models.layers.retention import GatedRetention
from kvrt_models.layers.table import Layer, Tensor, reshaped
from kvrt_models.spec import DecoderSpec

# What layers with a state have in place of attention, by `SsmSpec.kind`.
MIXERS = {
    "mamba1": Mamba1,
    "mamba2": Mamba2,
    "delta": GatedDeltaNet,
    "kda": KimiDelta,
    "retention": GatedRetention,
}
# Decoder's weights that are several tensors of the file, one below the other.
_STACKED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "ffn_gate_up": ("ffn_gate", "ffn_up"),
    "ffn_gate_up_shexp": ("ffn_gate_shexp", "ffn_up_shexp"),
}
# What is multiplied by head, or too small to be rounded; of recurrent layers all but these.
_SMALL = ("ffn_gate_inp", "attn_k_b", "attn_v_b", "altup_predict", "altup_correct", "altup_router")
_SMALL += ("indexer_weights",)
_MATRICES = ("in", "x", "dt", "out", "f_a", "f_b", "g_a", "g_b")


@functools.cache
def tensors_of(of: DecoderSpec) -> dict[str, Tensor]:
    """The tensors that a model of this spec must have, by GGUF names of llama's form."""
    family, rows = family_of(of.arch), dict[str, Tensor]()
    for i in range(of.n_layers):
        # A folder does not count layers that only make keys and values.
        place = i - sum(x < i for x in of.producers)
        is_producer = i in of.producers
        at = f"blk.{i}.", "model." if is_producer else f"model.layers.{place}."
        layer = Layer(family, at, i)
        (_producer if is_producer else _block)(layer, of)
        rows |= layer.rows
    top, head = Layer(family, ("", "model.")), Layer(family, ("", ""))
    _add_top(top, of)
    if not of.tied:
        head.add("output", "lm_head", of.n_vocab, of.n_embd)
    return rows | top.rows | head.rows


def _add_top(top: Layer, of: DecoderSpec) -> None:
    """Tensors that belong to no layer."""
    e = of.n_embd
    if of.layer_inputs:
        n, width = of.layer_inputs.n_vocab, of.layer_inputs.width
        all_of_them = of.n_layers * width
        top.add("per_layer_token_embd", "embed_tokens_per_layer", n, all_of_them)
        top.add("per_layer_model_proj", "per_layer_model_projection", all_of_them, e)
        top.add("per_layer_proj_norm", "per_layer_projection_norm", width)
    for i in range(1, of.altup.n_streams if of.altup else 1):
        top.add(f"altup_proj_{i}", f"altup_projections.{i - 1}", e, e)
        top.add(f"altup_unembd_proj_{i}", f"altup_unembed_projections.{i - 1}", e, e)
    top.add("token_embd", "embed_tokens", of.n_vocab, e)
    top.add("output_norm", "norm", e)


def _producer(layer: Layer, of: DecoderSpec) -> None:
    group, e = of.group_of(layer.number), of.n_embd
    width = group.n_kv_heads * group.head_dim
    layer.add("attn_norm", "kv_layer_norm", e)
    layer.add("attn_k", "k_proj", width, e, bias=of.qkv_bias)
    layer.add("attn_v", "v_proj", width, e, bias=of.qkv_bias)


def _block(layer: Layer, of: DecoderSpec) -> None:
    """A mixer and a feed-forward, with their norms."""
    e, mlp = of.n_embd, layer.family.mlp
    layer.add("attn_norm", "input_layernorm", e)
    if of.is_recurrent(layer.number):
        assert of.ssm is not None
        MIXERS[of.ssm.kind].add_tensors(functools.partial(layer.add, make=reshaped), of.ssm, e)
    elif of.latent is not None:
        LatentAttention.add_tensors(layer, of, of.latent)
    else:
        _attention(layer, of)
    if of.n_ff:
        # Gemma calls "post attention" what comes after it, others what precedes the feed-forward.
        before = "pre_feedforward_layernorm" if of.post_norms else "post_attention_layernorm"
        layer.add("ffn_norm", before, e)
        mixed = of.experts is not None and layer.number in of.experts.layers
        if not mixed or (of.experts and of.experts.beside):
            n_ff, bias = of.n_ff_of(layer.number), of.ffn_bias and not mixed
            layer.add("ffn_gate", f"{mlp}.gate_proj", n_ff, e, bias=bias)
            layer.add("ffn_up", f"{mlp}.up_proj", n_ff, e, bias=bias)
            layer.add("ffn_down", f"{mlp}.down_proj", e, n_ff, bias=bias)
        if mixed and of.experts:
            Mixture.add_tensors(layer, of.experts, e)
    if of.post_norms:
        layer.add("post_attention_norm", "post_attention_layernorm", e)
        layer.add("post_ffw_norm", "post_feedforward_layernorm", e)
    if of.layer_inputs:
        LayerGate.add_tensors(layer, of.layer_inputs, e)
    if of.layer_scale:
        layer.add("layer_output_scale", "layer_scalar", 1, ends=(".weight", ""))
    if of.altup:
        AlternatingUpdate.add_tensors(layer, of.altup, e)
    if of.laurel_rank:
        LowRankResidual.add_tensors(layer, of.laurel_rank, e)


def _attention(layer: Layer, of: DecoderSpec) -> None:
    """Keys and values of heads; a layer that reads those of another makes queries alone."""
    group, n_heads, e = of.group_of(layer.number), of.n_heads_of(layer.number), of.n_embd
    d, n_kv, bias = group.head_dim, group.n_kv_heads, of.qkv_bias
    reads = of.reads(layer.number)
    layer.add("attn_q", "self_attn.q_proj", n_heads * d * (1 + of.attn_gate), e, bias=bias)
    if not reads:
        layer.add("attn_k", "self_attn.k_proj", n_kv * d, e, bias=bias)
    if not reads and layer.number not in of.v_of_k:
        layer.add("attn_v", "self_attn.v_proj", n_kv * d, e, bias=bias)
    layer.add("attn_output", "self_attn.o_proj", e, n_heads * d, bias=of.out_bias)
    if of.qk_norm:
        layer.add("attn_q_norm", "self_attn.q_norm", d)
    if of.qk_norm and not reads:
        layer.add("attn_k_norm", "self_attn.k_norm", d)
    if of.attn_sinks:
        layer.add("attn_sinks", "self_attn.sinks", n_heads, ends=(".weight", ""))


def tensor_shape(of: DecoderSpec, name: str) -> tuple[int, ...]:
    """The shape that a tensor of this name must have."""
    return tensors_of(of)[name].shape


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a weight may be rounded: what is small, as norms and routers are, stays float32."""
    if len(shape) < 2 or not name.endswith(".weight"):
        return False
    _, is_recurrent, kind = name.partition(".ssm_")
    return kind[:-7] in _MATRICES if is_recurrent else not any(x in name for x in _SMALL)


def is_norm(name: str) -> bool:
    """Whether the tensor of this GGUF name is the weight of a norm."""
    return name.endswith("_norm.weight")


def weight_parts(of: DecoderSpec) -> dict[str, tuple[str, ...]]:
    """Names of the decoder's weights, each with the tensors that are its rows, in order."""
    stack = {part: (whole, parts) for whole, parts in _STACKED.items() for part in parts}
    weights: dict[str, tuple[str, ...]] = {}
    there = tensors_of(of)
    for name in there:
        kind = name.split(".")[-2]
        if kind not in stack or (of.latent and kind == "attn_q"):
            weights[name] = (name,)
            continue
        whole, parts = stack[kind]
        before, after = name.split(f".{kind}.")
        tensors = (f"{before}.{part}.{after}" for part in parts)
        # A layer that reads the keys and values of another makes queries alone.
        weights[f"{before}.{whole}.{after}"] = tuple(x for x in tensors if x in there)
    return weights


def weight_shape(of: DecoderSpec, parts: tuple[str, ...]) -> tuple[int, ...]:
    """The shape of a decoder's weight made of these tensors."""
    shapes = [tensor_shape(of, part) for part in parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
