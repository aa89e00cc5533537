"""Multi-head latent attention: keys and values of all heads are made of one latent a token.

The cache has the latents alone, and they are read as they are: what would make keys of them is
multiplied into the queries, and what would make values of them into the outputs (absorbed), so that
a step costs the same for any number of heads' keys.

Source: arXiv:2405.04434, sec. 2.1; DeepSeek-V3 `inference/model.py`, "absorb".
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx

from kvrt.arrays import Array, Float
from kvrt.attention.contract import Attend
from kvrt_models.layers.latent_sizes import Indexer, Latent
from kvrt_models.layers.linear import Linear, Matrix, layer_norm, rms_norm
from kvrt_models.spec import DecoderSpec

# Of the norm of index keys, whatever the file says of others.
_KEY_EPS = 1e-6


class IndexProjections(nnx.Module, pytree=False):
    """Index queries, keys and weights of heads, of one layer; one key for all heads.

    Source: DeepSeek-V3.2-Exp `inference/model.py`, "Indexer", without its Hadamard transform and
    its eight bits: the former changes no product, the latter is a matter of storage.
    """

    def __init__(self, latent: Latent, of: Indexer, weights: Mapping[str, Matrix], at: str):
        """Takes the weights whose names begin with `at`."""
        self.of, self.n_rope = of, latent.n_rope
        self.q, self.k = (Linear.named(weights, f"{at}{x}") for x in ("q_b", "k"))
        self.k_norm = nnx.Param(weights[f"{at}k_norm.weight"])
        self.k_norm_bias = nnx.Param(weights[f"{at}k_norm.bias"])
        self.heads = Linear.named(weights, f"{at}weights")

    def __call__(
        self, h: Float[Array, "T E"], narrow: Float[Array, "T I"]
    ) -> tuple[Float[Array, "T Hi D"], Float[Array, "T 1 D"], Float[Array, "T Hi"]]:
        """Of the normed stream, and of the latent that queries are made of."""
        of, n = self.of, h.shape[0]
        k = layer_norm(self.k(h), self.k_norm[...], self.k_norm_bias[...], _KEY_EPS)
        weights = self.heads(h) * (of.n_heads * of.head_dim) ** -0.5
        q = self.q(narrow).reshape(n, of.n_heads, -1)
        return self._rope_last(q), self._rope_last(k[:, None]), weights

    def _rope_last(self, x: Float[Array, "T _ D"]) -> Array:
        """The channels that are rotated behind the others, as a cache has them."""
        return jnp.roll(x, -self.n_rope, axis=2)


class LatentAttention(nnx.Module, pytree=False):
    """The attention of one layer."""

    def __init__(self, spec: DecoderSpec, of: Latent, layer: int, weights: Mapping[str, Matrix]):
        """Takes the weights `blk.{layer}.attn_*`, see `kvrt_models.layers.tensors`."""
        at = f"blk.{layer}.attn_"
        self.of, self.layer, self.n_heads = of, layer, spec.n_heads
        self.q_a = Linear.named(weights, f"{at}q_a") if of.q_rank else None
        self.q_a_norm = nnx.Param(weights[f"{at}q_a_norm.weight"]) if of.q_rank else None
        self.q = Linear.named(weights, f"{at}q_b" if of.q_rank else f"{at}q")
        self.kv_a = Linear.named(weights, f"{at}kv_a_mqa")
        self.kv_a_norm = nnx.Param(weights[f"{at}kv_a_norm.weight"])
        self.k_b = nnx.Param(weights[f"{at}k_b.weight"])
        self.v_b = nnx.Param(weights[f"{at}v_b.weight"])
        self.out = Linear.named(weights, f"{at}output")
        at = f"blk.{layer}.indexer_"
        self.indexer = IndexProjections(of, of.indexer, weights, at) if of.indexer else None

    def __call__(self, h: Float[Array, "T E"], attend: Attend) -> Float[Array, "T E"]:
        """What attention gives each token."""
        of, n = self.of, h.shape[0]
        narrow = h
        if self.q_a is not None and self.q_a_norm is not None:
            narrow = rms_norm(self.q_a(h), self.q_a_norm[...], of.norm_eps)
        if self.indexer is not None:
            attend.index(self.layer, *self.indexer(h, narrow))
        q = self.q(narrow)
        plain, rotary = jnp.split(q.reshape(n, self.n_heads, -1), [of.n_nope], axis=2)
        latent, key = jnp.split(self.kv_a(h), [of.rank], axis=1)
        latent = rms_norm(latent, self.kv_a_norm[...], of.norm_eps)
        absorbed = jnp.einsum("thi,hoi->tho", plain, self.k_b[...])
        q = jnp.concatenate([absorbed, rotary], axis=2)
        out = attend(self.layer, q, jnp.concatenate([latent, key], axis=1)[:, None], None)
        values = jnp.einsum("thi,hoi->tho", out, self.v_b[...])
        return self.out(values.reshape(n, -1))
