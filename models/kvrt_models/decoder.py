"""One decoder for every family that a `DecoderSpec` describes; it never sees a cache."""

from collections.abc import Hashable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from kvrt.arrays import Array, Float, Int
from kvrt.attention.contract import Attend, ParamPath
from kvrt_models.layers.experts import Beside, Mixture
from kvrt_models.layers.feed_forward import Gated
from kvrt_models.layers.gemma.altup import AlternatingUpdate, LowRankResidual, Streams
from kvrt_models.layers.gemma.layer_inputs import LayerEmbedding, LayerGate
from kvrt_models.layers.latent import LatentAttention
from kvrt_models.layers.linear import Linear, Matrix, embed, rms_norm, unit_norm
from kvrt_models.layers.sharding import partition
from kvrt_models.layers.tensors import MIXERS
from kvrt_models.spec import DecoderSpec


class Block(nnx.Module, pytree=False):
    """One layer: a mixer, then a gated network or experts, each on the normed stream.

    The mixer is attention, or a recurrence in the layers that keep a state; a few families have
    nothing but the mixer.
    Their outputs are normed once more where the spec has post_norms.
    """

    def __init__(self, spec: DecoderSpec, layer: int, weights: Mapping[str, Matrix]):
        """Takes the weights `blk.{layer}.*`, see `kvrt_models.layers.tensors.weight_parts`."""

        def get(name: str) -> Matrix | None:
            return weights.get(f"blk.{layer}.{name}")

        def lin(name: str) -> Linear:
            return Linear.named(weights, f"blk.{layer}.{name}")

        def norm(name: str) -> nnx.Param:
            return nnx.Param(weights[f"blk.{layer}.{name}.weight"])

        self.spec, self.layer = spec, layer
        self.attn_norm = norm("attn_norm")
        self.mixer = _mixer(spec, layer, weights)
        if self.mixer is None:
            self.qkv, self.out = lin("attn_qkv"), lin("attn_output")
        with_norm = [get(f"attn_{x}_norm.weight") is not None for x in "qk"]
        self.q_norm = norm("attn_q_norm") if with_norm[0] else None
        self.k_norm = norm("attn_k_norm") if with_norm[1] else None
        self.sinks = norm("attn_sinks") if spec.attn_sinks else None
        if spec.n_ff:
            self.ffn_norm, self.ffn = norm("ffn_norm"), _feed_forward(spec, layer, weights)
        self.attn_post_norm = norm("post_attention_norm") if spec.post_norms else None
        self.ffn_post_norm = norm("post_ffw_norm") if spec.post_norms else None
        self.given = LayerGate(spec, weights, f"blk.{layer}.") if spec.layer_inputs else None
        self.scale = norm("layer_output_scale") if spec.layer_scale else None
        at, altup = f"blk.{layer}.", spec.altup
        self.laurel = LowRankResidual(spec, weights, at) if spec.laurel_rank else None
        self.altup = AlternatingUpdate(spec, altup, weights, at) if altup else None

    def __call__(
        self, x: Float[Array, "T E"], attend: Attend, given: Float[Array, "T W"] | None = None
    ) -> Float[Array, "T E"]:
        """The residual stream after this layer, which some families give an input of its own."""
        if self.given is None:
            return self._out(self._stream(x, attend))
        assert given is not None
        if self.altup is not None:
            return self._streams(self.altup, self.given, x, (given, attend))
        x = self._stream(x, attend)
        return self._out(x + self.given(x, given))

    def _streams(
        self, altup: AlternatingUpdate, gate: LayerGate, x: Array, rest: tuple[Array, Attend]
    ) -> Array:
        """All streams after this layer, which computes one of them."""
        predicted = altup.predict(x)
        corrected = altup.correct(predicted, self._stream(predicted[altup.of.active], rest[1]))
        share = gate(altup.gate_input(corrected), rest[0])
        first, *others = corrected
        return jnp.concatenate([first, *(other + share for other in others)], axis=1)

    def _out(self, x: Array) -> Array:
        return x if self.scale is None else x * self.scale[...][0]

    def _stream(self, x: Array, attend: Attend) -> Array:
        h = self._norm(x, self.attn_norm)
        attended = self._attention(h, attend)
        x = x + self._scaled(self._norm(attended, self.attn_post_norm))
        if self.laurel is not None:
            x = (x + self.laurel(h)) * 2.0**-0.5
        if not self.spec.n_ff:
            return x
        h = self._norm(x, self.ffn_norm)
        given = self.ffn(h, x) if isinstance(self.ffn, Beside) else self.ffn(h)
        return x + self._scaled(self._norm(given, self.ffn_post_norm))

    def _attention(self, h: Array, attend: Attend) -> Array:
        if self.mixer is not None:
            return self.mixer(h, attend)
        group, n_heads = self.spec.group_of(self.layer), self.spec.n_heads_of(self.layer)
        heads = self.qkv(h).reshape(h.shape[0], -1, group.head_dim)
        n_q = 2 * n_heads if self.spec.attn_gate else n_heads
        if self.spec.reads(self.layer):
            read = attend(self.layer, self._norm(heads, self.q_norm), None, None)
            return self.out(read.reshape(h.shape[0], -1))
        q, k, v = jnp.split(heads, (n_q, n_q + group.n_kv_heads), axis=1)
        v = k if self.layer in self.spec.v_of_k else v
        v = unit_norm(v, self.spec.norm_eps) if self.spec.unit_v_norm else v
        q, gate = (q[:, ::2], q[:, 1::2]) if self.spec.attn_gate else (q, None)
        q, k = self._norm(q, self.q_norm), self._norm(k, self.k_norm)
        if self.spec.unit_qk_norm and group.rope is not None:
            # Llama 4 norms after it has rotated; a rotation leaves the length as it is.
            q, k = unit_norm(q, self.spec.norm_eps), unit_norm(k, self.spec.norm_eps)
        sinks = None if self.sinks is None else self.sinks[...]
        out = attend(self.layer, q, k, v, sinks=sinks)
        out = out if gate is None else out * jax.nn.sigmoid(gate)
        return self.out(out.reshape(h.shape[0], -1))

    def _scaled(self, x: Array) -> Array:
        scale = self.spec.residual_scale
        return x if scale == 1.0 else x * scale

    def _norm(self, x: Array, weight: nnx.Param | None) -> Array:
        return x if weight is None else rms_norm(x, weight[...], self.spec.norm_eps)


def _mixer(spec: DecoderSpec, layer: int, weights: Mapping[str, Matrix]) -> nnx.Module | None:
    """What a layer has in place of attention with keys and values of its own."""
    if spec.ssm is not None and spec.is_recurrent(layer):
        return MIXERS[spec.ssm.kind](spec.ssm, layer, weights, spec.norm_eps)
    return LatentAttention(spec, spec.latent, layer, weights) if spec.latent else None


def _feed_forward(
    spec: DecoderSpec, layer: int, weights: Mapping[str, Matrix]
) -> Gated | Mixture | Beside:
    experts, at = spec.experts, f"blk.{layer}."
    if experts is not None and layer in experts.layers:
        return (Beside if experts.beside else Mixture)(spec, experts, weights, at)
    return Gated(spec, weights, at)


class Producer(nnx.Module, pytree=False):
    """Makes keys and values of the normed stream that other layers read, and adds nothing to it.

    Source: arXiv:2405.05254, sec. 2.2.
    """

    def __init__(self, spec: DecoderSpec, layer: int, weights: Mapping[str, Matrix]):
        """Takes the weights `blk.{layer}.attn_norm` and `blk.{layer}.attn_qkv`."""
        self.layer, self.head_dim = layer, spec.group_of(layer).head_dim
        self.norm_eps = spec.norm_eps
        self.norm = nnx.Param(weights[f"blk.{layer}.attn_norm.weight"])
        self.qkv = Linear.named(weights, f"blk.{layer}.attn_qkv")

    def __call__(self, x: Float[Array, "T E"], attend: Attend) -> Float[Array, "T E"]:
        """The stream as it came."""
        heads = self.qkv(rms_norm(x, self.norm[...], self.norm_eps))
        attend.produce(self.layer, *jnp.split(heads.reshape(x.shape[0], -1, self.head_dim), 2, 1))
        return x


def _block(spec: DecoderSpec, layer: int, weights: Mapping[str, Matrix]) -> Block | Producer:
    return (Producer if layer in spec.producers else Block)(spec, layer, weights)


class Decoder(nnx.Module, pytree=False):
    """Embedding, layers, norm and head; `embed`, `layers` and `head` can be run in parts."""

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Matrix]):
        """Wraps weights by their names, see `kvrt_models.layers.tensors.weight_parts`."""
        self.spec = spec
        self.embedding = Linear.named(weights, "token_embd")
        self.blocks = nnx.List([_block(spec, i, weights) for i in range(spec.n_layers)])
        self.norm = nnx.Param(weights["output_norm.weight"])
        self.of_layers = LayerEmbedding(spec, weights) if spec.layer_inputs else None
        self.streams = Streams(spec, weights) if spec.altup else None
        self.output = None if spec.tied else Linear.named(weights, "output")

    @property
    def groups(self):
        """Layers by kind of attention."""
        return self.spec.groups

    @property
    def recurrent(self):
        """Layers that keep a state instead of keys and values, None where there are none."""
        return self.spec.recurrent

    @property
    def n_vocab(self) -> int:
        """Logits a token."""
        return self.spec.n_vocab

    def layer_kinds(self) -> list[tuple[Hashable, ParamPath]]:
        """Which layers are alike; see `kvrt.attention.contract.KindedDecoder`."""
        return [(self._kind(i), ("blocks", i)) for i in range(self.spec.n_layers)]

    def _kind(self, layer: int) -> Hashable:
        spec = self.spec
        has_experts = spec.experts is not None and layer in spec.experts.layers
        if spec.is_recurrent(layer):
            return "recurrent", has_experts
        group, is_producer = spec.groups.index(spec.group_of(layer)), layer in spec.producers
        reads = spec.reads(layer), layer in spec.v_of_k
        cutoff = spec.ffn_cutoffs[layer] if spec.ffn_cutoffs else None
        return group, spec.n_heads_of(layer), is_producer, reads, has_experts, cutoff

    def shardings(self) -> dict[ParamPath, PartitionSpec]:
        """How a mesh divides the weights; see `kvrt.attention.contract.ShardedDecoder`."""
        params = nnx.to_flat_state(nnx.state(self))
        return {path: partition(path, len(x.shape)) for path, x in params}

    def __call__(
        self, tokens: Int[Array, " T"], attend: Attend, out_ids: Int[Array, " R"]
    ) -> Float[Array, "R V"]:
        """Logits of tokens `out_ids` of the step, in float32."""
        first, last, n = self.spec.exit_layer, self.spec.n_layers, out_ids.shape[0]
        if first == last or n == tokens.shape[0]:
            x = self.layers(self.embed(tokens), attend, 0, last)
            return self.head(x[out_ids])
        x = self.layers(self.embed(tokens), attend, 0, first)
        if n == 0:
            return jnp.zeros((0, self.n_vocab), jnp.float32)
        return self.head(self.layers(x[out_ids], attend.for_tokens(out_ids), first, last))

    def embed(self, tokens: Int[Array, " T"]) -> Float[Array, "T E"]:
        """The residual stream before the first layer; behind it what the layers are given."""
        x, scale = embed(self.embedding.matrix, tokens), self.spec.embed_scale
        x = x if scale == 1.0 else x * scale
        if self.of_layers is None:
            return x
        streams = x if self.streams is None else self.streams.expand(x)
        return jnp.concatenate([streams, self.of_layers(x, tokens)], axis=1)

    def layers(self, x: Float[Array, "T E"], attend: Attend, first: int, last: int) -> Array:
        """The residual stream after layers [first, last).

        What layers are given lies behind it, that of the next layer first, so that their programs
        do not follow from how many came before; what was used goes to the end.
        """
        blocks = list(self.blocks)[first:last]
        if self.of_layers is None:
            for block in blocks:
                x = block(x, attend)
            return x
        x, inputs = jnp.split(x, [self.spec.n_stream], axis=1)
        width = self.of_layers.width
        for i, block in enumerate(blocks):
            assert isinstance(block, Block), "a producer has no input of its own"
            x = block(x, attend, inputs[:, i * width : (i + 1) * width])
        used = len(blocks) * width
        return jnp.concatenate([x, inputs[:, used:], inputs[:, :used]], axis=1)

    def head(self, x: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """Logits of vectors of the residual stream."""
        x = x if self.of_layers is None else x[:, : self.spec.n_stream]
        x = x if self.streams is None else self.streams.join(x)
        output = self.embedding if self.output is None else self.output
        logits = output(rms_norm(x, self.norm[...], self.spec.norm_eps))
        if self.spec.logit_divisor != 1.0:
            logits = logits / self.spec.logit_divisor
        cap = self.spec.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
