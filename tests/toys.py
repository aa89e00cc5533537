"""Tiny models for tests: a decoder with random weights, and one that shows attention bare."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvrt import GroupSpec, MaskSpec, RopeSpec


class RowModel(nnx.Module):
    """Looks q, k and v of each token up in a table and returns its attention output as logits.

    So a test knows every row that enters the cache, and sees what attention makes of them.
    """

    def __init__(self, *, n_vocab=32, n_heads=4, n_kv_heads=2, head_dim=8, seed=0, group=None):
        rng = np.random.default_rng(seed)
        rope = RopeSpec(n_rot=head_dim, base=100.0)
        self.group = group or GroupSpec(
            layers=(0,), n_kv_heads=n_kv_heads, head_dim=head_dim, rope=rope
        )
        self.n_heads, self.head_dim, self.n_tokens = n_heads, head_dim, n_vocab

        def table(n):
            return nnx.Param(jnp.asarray(rng.standard_normal((n_vocab, n, head_dim), np.float32)))

        self.q, self.k, self.v = table(n_heads), table(n_kv_heads), table(n_kv_heads)

    @property
    def groups(self):
        return (self.group,)

    @property
    def n_vocab(self):
        # The width of the logits; ids beyond n_tokens would read the table's last row.
        return self.n_tokens

    def __call__(self, tokens, attend, out_ids):
        out = attend(0, self.q[...][tokens], self.k[...][tokens], self.v[...][tokens])
        return out.reshape(tokens.shape[0], -1)[out_ids]


def windowed(model_group: GroupSpec, mask: MaskSpec) -> GroupSpec:
    return dataclasses.replace(model_group, mask=mask)


def tables(model: RowModel):
    """q, k and v of every token, as NumPy."""
    return tuple(np.asarray(x[...]) for x in (model.q, model.k, model.v))


def allclose(a, b, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def n_leaves(tree) -> int:
    return len(jax.tree.leaves(tree))
