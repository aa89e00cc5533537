"""What layers are given of a token beside the stream: embeddings that each has for itself."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from kvrt.arrays import Array, Float, Int
from kvrt_models.layers.linear import Linear, Matrix, embed, rms_norm
from kvrt_models.layers.table import Layer
from kvrt_models.spec import DecoderSpec, LayerInputs


class LayerEmbedding(nnx.Module, pytree=False):
    """The inputs of all layers, one behind the other: of the token, and of its embedding.

    Source: transformers `Gemma4TextModel.get_per_layer_inputs`, `project_per_layer_inputs`.
    """

    def __init__(self, of: DecoderSpec, weights: Mapping[str, Matrix]):
        """Takes the weights `per_layer_*`."""
        assert of.layer_inputs is not None
        self.width, self.norm_eps = of.layer_inputs.width, of.norm_eps
        self.n_vocab, self.n_tokens = of.layer_inputs.n_vocab, of.n_vocab
        self.embedding = Linear.named(weights, "per_layer_token_embd")
        self.projection = Linear.named(weights, "per_layer_model_proj")
        self.norm = nnx.Param(weights["per_layer_proj_norm.weight"])

    def __call__(self, x: Float[Array, "T E"], tokens: Int[Array, " T"]) -> Float[Array, "T _"]:
        """Both parts are of one size, and so is their sum, divided by the root of two."""
        if self.n_vocab < self.n_tokens:  # the table has rows of the first tokens alone
            tokens = jnp.where(tokens < self.n_vocab, tokens, 0)
        own = embed(self.embedding.matrix, tokens) * self.width**0.5
        made = (self.projection(x) * x.shape[1] ** -0.5).reshape(x.shape[0], -1, self.width)
        made = rms_norm(made, self.norm[...], self.norm_eps).reshape(own.shape)
        return (made + own) * 2.0**-0.5


class LayerGate(nnx.Module, pytree=False):
    """What a layer adds to the stream of its own input, gated by the stream."""

    def __init__(self, of: DecoderSpec, weights: Mapping[str, Matrix], at: str):
        """Takes `{at}inp_gate`, `{at}proj` and `{at}post_norm`."""
        self.norm_eps = of.norm_eps
        self.gate = Linear.named(weights, f"{at}inp_gate")
        self.projection = Linear.named(weights, f"{at}proj")
        self.norm = nnx.Param(weights[f"{at}post_norm.weight"])

    @staticmethod
    def add_tensors(layer: Layer, of: LayerInputs, n_embd: int) -> None:
        """Adds the tensors of a layer."""
        layer.add("inp_gate", "per_layer_input_gate", of.width, n_embd)
        layer.add("proj", "per_layer_projection", n_embd, of.width)
        layer.add("post_norm", "post_per_layer_input_norm", n_embd)

    def __call__(self, x: Float[Array, "T E"], given: Float[Array, "T W"]) -> Float[Array, "T E"]:
        """What is added; `given` is the layer's own input."""
        made = self.projection(jax.nn.gelu(self.gate(x), approximate=True) * given)
        return rms_norm(made, self.norm[...], self.norm_eps)
