"""Several streams of which a layer computes one and corrects all (AltUp), and LAuReL's residuals.

The streams of a token lie one behind the other on the axis of channels.

Source: arXiv:2301.13310 (AltUp); arXiv:2411.07501 (LAuReL); transformers `Gemma3nTextAltUp`.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx

from kvrt.arrays import Array, Float
from kvrt_models.layers.linear import Linear, Matrix, rms_norm
from kvrt_models.layers.table import Layer
from kvrt_models.spec import AltUp, DecoderSpec

# Of the least size of a stream that is made as long as the first.
_LEAST = 1e-5


class Streams(nnx.Module, pytree=False):
    """Makes the streams of the embedding, and one of them behind the last layer."""

    def __init__(self, of: DecoderSpec, weights: Mapping[str, Matrix]):
        """Takes `altup_proj_{i}` and `altup_unembd_proj_{i}`."""
        assert of.altup is not None
        others = range(1, of.altup.n_streams)
        self.n_embd = of.n_embd
        self.into = nnx.List([Linear.named(weights, f"altup_proj_{i}") for i in others])
        self.back = nnx.List([Linear.named(weights, f"altup_unembd_proj_{i}") for i in others])

    def expand(self, x: Float[Array, "T E"]) -> Float[Array, "T S*E"]:
        """The embedding, and for each further stream what is made of it, as long as it is."""
        return jnp.concatenate([x, *(_as_long(project(x), x) for project in self.into)], axis=1)

    def join(self, x: Float[Array, "T S*E"]) -> Float[Array, "T E"]:
        """The mean of the first stream and of what is made of the others, as long as it is."""
        first, *others = jnp.split(x, len(self.back) + 1, axis=1)
        pairs = zip(self.back, others, strict=True)
        made = [_as_long(project(other), first) for project, other in pairs]
        return jnp.mean(jnp.stack([first, *made]), axis=0)


class AlternatingUpdate(nnx.Module, pytree=False):
    """What a layer does with the streams: it predicts all, computes one, and corrects all by it."""

    def __init__(self, of: DecoderSpec, altup: AltUp, weights: Mapping[str, Matrix], at: str):
        """Takes `{at}altup_*`."""
        self.of, self.norm_eps = altup, of.norm_eps
        self.router = Linear.named(weights, f"{at}altup_router")
        self.norm = nnx.Param(weights[f"{at}altup_router_norm.weight"])
        self.prediction = Linear.named(weights, f"{at}altup_predict_coef")
        self.correction = Linear.named(weights, f"{at}altup_correct_coef")
        self.scale = nnx.Param(weights[f"{at}altup_correct_scale.weight"])

    @staticmethod
    def add_tensors(layer: Layer, of: AltUp, n_embd: int) -> None:
        """Adds the tensors of a layer."""
        n = of.n_streams
        layer.add("altup_router", "altup.modality_router", n, n_embd)
        layer.add("altup_router_norm", "altup.router_norm", n_embd)
        layer.add("altup_predict_coef", "altup.prediction_coefs", n * n, n)
        layer.add("altup_correct_coef", "altup.correction_coefs", n, n)
        called = "altup.correct_output_scale"
        layer.add("altup_correct_scale", called, n_embd, ends=(".weight", ""))

    def predict(self, streams: Float[Array, "T S*E"]) -> Float[Array, "S T E"]:
        """The streams as they are expected behind the layer."""
        n = self.of.n_streams
        old = jnp.stack(jnp.split(streams, n, axis=1))
        mixed = self.prediction(self._routed(old[self.of.active])).reshape(-1, n, n)
        return old + jnp.einsum("tij,jte->ite", mixed, old)

    def correct(
        self, predicted: Float[Array, "S T E"], computed: Float[Array, "T E"]
    ) -> Float[Array, "S T E"]:
        """The streams after what was computed of the active one."""
        shares = self.correction(self._routed(computed)) + 1.0
        return predicted + shares.T[:, :, None] * (computed - predicted[self.of.active])[None]

    def gate_input(self, corrected: Float[Array, "S T E"]) -> Float[Array, "T E"]:
        """What gates the layer's own input."""
        x = corrected[self.of.active]
        return x * self.scale[...][None] if self.of.scaled else x

    def _routed(self, x: Array) -> Float[Array, "T S"]:
        normed = rms_norm(x, self.norm[...], self.norm_eps)
        return jnp.tanh(self.router(normed * (1.0 / x.shape[1])))


class LowRankResidual(nnx.Module, pytree=False):
    """The stream and what two narrow products make of it."""

    def __init__(self, of: DecoderSpec, weights: Mapping[str, Matrix], at: str):
        """Takes `{at}laurel_l`, `{at}laurel_r` and `{at}laurel_post_norm`."""
        self.norm_eps = of.norm_eps
        self.left = Linear.named(weights, f"{at}laurel_l")
        self.right = Linear.named(weights, f"{at}laurel_r")
        self.norm = nnx.Param(weights[f"{at}laurel_post_norm.weight"])

    @staticmethod
    def add_tensors(layer: Layer, rank: int, n_embd: int) -> None:
        """Adds the tensors of a layer."""
        layer.add("laurel_l", "laurel.linear_left", rank, n_embd)
        layer.add("laurel_r", "laurel.linear_right", n_embd, rank)
        layer.add("laurel_post_norm", "laurel.post_laurel_norm", n_embd)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Of the normed stream."""
        return x + rms_norm(self.right(self.left(x)), self.norm[...], self.norm_eps)


def _as_long(x: Float[Array, "T E"], first: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """X with the root mean square of another stream."""
    wanted, found = (jnp.mean(y * y, axis=1, keepdims=True) for y in (first, x))
    return x * jnp.sqrt(wanted) / jnp.sqrt(jnp.maximum(found, _LEAST))
