"""Somebody's own model on the cache: all that kvrt asks of a decoder, in forty lines.

    python -m scripts.toy_decoder

The model below knows nothing of positions, masks or storage. It says how its keys are shaped
(`groups`), calls `attend` once a layer, and returns logits.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from absl import app
from flax import nnx

from kvrt import Attend, CacheConfig, ContextShift, GroupSpec, RopeSpec, Runtime


class ToyDecoder(nnx.Module):
    """Two layers of attention with random weights: nonsense, but exact nonsense."""

    n_vocab, n_layers, n_heads, n_kv_heads, head_dim = 64, 2, 4, 2, 16
    recurrent = None  # no layer keeps a state

    def __init__(self, seed: int = 0):
        """Draws the weights."""
        e, d = self.n_heads * self.head_dim, self.head_dim
        keys = iter(jax.random.split(jax.random.key(seed), 2 + 2 * self.n_layers))
        self.embedding = nnx.Param(jax.random.normal(next(keys), (self.n_vocab, e)))
        self.head = nnx.Param(jax.random.normal(next(keys), (e, self.n_vocab)))
        width = (self.n_heads + 2 * self.n_kv_heads) * d
        self.qkv = nnx.List(
            [nnx.Param(0.3 * jax.random.normal(next(keys), (e, width))) for _ in range(2)]
        )

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        """Both layers have the same kind of attention."""
        rope = RopeSpec(n_rot=self.head_dim)
        return (GroupSpec(layers=(0, 1), n_kv_heads=2, head_dim=self.head_dim, rope=rope),)

    def __call__(self, tokens: jax.Array, attend: Attend, out_ids: jax.Array) -> jax.Array:
        """Logits of the tokens out_ids."""
        x = self.embedding[...][tokens]
        for layer, weight in enumerate(self.qkv):
            rows = (x @ weight[...]).reshape(x.shape[0], -1, self.head_dim)
            q, k, v = jnp.split(rows, (self.n_heads, self.n_heads + self.n_kv_heads), axis=1)
            x = x + attend(layer, q, k, v).reshape(x.shape)
        return x[out_ids] @ self.head[...]


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    runtime = Runtime(ToyDecoder(), CacheConfig(n_ctx=32), policy=ContextShift(n_keep=4))
    runtime.prefill([1, 2, 3])
    print(*(token.id for token in runtime.generate(100)))
    print(runtime.stats())


if __name__ == "__main__":
    app.run(main)
