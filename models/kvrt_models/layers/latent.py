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
from kvrt_models.layers.linear import Linear, Matrix, rms_norm
from kvrt_models.spec import DecoderSpec, Latent


class LatentAttention(nnx.Module):
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

    def __call__(self, h: Float[Array, "T E"], attend: Attend) -> Float[Array, "T E"]:
        """What attention gives each token."""
        of, n = self.of, h.shape[0]
        if self.q_a is not None and self.q_a_norm is not None:
            q = self.q(rms_norm(self.q_a(h), self.q_a_norm[...], of.norm_eps))
        else:
            q = self.q(h)
        plain, rotary = jnp.split(q.reshape(n, self.n_heads, -1), [of.n_nope], axis=2)
        latent, key = jnp.split(self.kv_a(h), [of.rank], axis=1)
        latent = rms_norm(latent, self.kv_a_norm[...], of.norm_eps)
        absorbed = jnp.einsum("thi,hoi->tho", plain, self.k_b[...])
        q = jnp.concatenate([absorbed, rotary], axis=2)
        out = attend(self.layer, q, jnp.concatenate([latent, key], axis=1)[:, None], None)
        values = jnp.einsum("thi,hoi->tho", out, self.v_b[...])
        return self.out(values.reshape(n, -1))
