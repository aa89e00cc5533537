"""Multi-head latent attention: keys and values of all heads are made of one latent a token.

The cache has the latents alone, and they are read as they are: what would make keys of them is
multiplied into the queries, and what would make values of them into the outputs (absorbed), so that
a step costs the same for any number of heads' keys.

Source: arXiv:2405.04434, sec. 2.1; DeepSeek-V3 `inference/model.py`, "absorb".
"""

import functools
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvrt.arrays import Array, Float
from kvrt.attention.contract import Attend
from kvrt_models.layers.linear import Linear, Matrix, layer_norm, rms_norm
from kvrt_models.layers.table import Layer
from kvrt_models.spec import DecoderSpec, Indexer, Latent

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

    @staticmethod
    def add_tensors(layer: Layer, of: DecoderSpec, to: Latent) -> None:
        """Adds the tensors of a layer; those of a head are products [H, O, I].

        `attn_k_b` makes of the part of a query without positions what the latent is compared with,
        and `attn_v_b` of a sum of latents that of values. GGUFs of before April 2025 have both in
        one, as folders do.
        """
        e, h = of.n_embd, of.n_heads
        q = h * (to.n_nope + to.n_rope)
        if to.q_rank:
            layer.add("attn_q_a", "self_attn.q_a_proj", to.q_rank, e)
            layer.add("attn_q_a_norm", "self_attn.q_a_layernorm", to.q_rank)
            layer.add("attn_q_b", "self_attn.q_b_proj", q, to.q_rank)
        else:
            layer.add("attn_q", "self_attn.q_proj", q, e)
        layer.add("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", to.rank + to.n_rope, e)
        layer.add("attn_kv_a_norm", "self_attn.kv_a_layernorm", to.rank)
        both = f"blk.{layer.number}.attn_kv_b.weight", (h * (to.n_nope + to.n_value), to.rank)
        for x, *sizes in (("k", to.rank, to.n_nope), ("v", to.n_value, to.rank)):
            make = functools.partial(_of_joined, x == "k", (h, to.n_nope + to.n_value, to.rank))
            called = "self_attn.kv_b_proj"
            layer.add(f"attn_{x}_b", called, h, *sizes, make=make, joined=both)
        layer.add("attn_output", "self_attn.o_proj", e, h * to.n_value)
        if to.indexer:
            n, d, at = to.indexer.n_heads, to.indexer.head_dim, "self_attn.indexer."
            layer.add("indexer_q_b", f"{at}wq_b", n * d, to.q_rank)
            layer.add("indexer_k", f"{at}wk", d, e)
            layer.add("indexer_k_norm", f"{at}k_norm", d)
            layer.add("indexer_k_norm", f"{at}k_norm", d, ends=(".bias", ".bias"))
            layer.add("indexer_weights", f"{at}weights_proj", n, e)

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


def _of_joined(
    is_key: bool, sizes: tuple[int, int, int], parts: Sequence[np.ndarray], shape: tuple[int, ...]
) -> np.ndarray:
    """One of the two matrices of every head that stand in one, keys first."""
    n_heads, width, rank = sizes
    if parts[0].shape != (n_heads * width, rank):
        return parts[0]
    by_head = parts[0].reshape(n_heads, -1, rank)
    n_nope = shape[2] if is_key else width - shape[1]
    found = by_head[:, :n_nope].swapaxes(1, 2) if is_key else by_head[:, n_nope:]
    return np.ascontiguousarray(found)
