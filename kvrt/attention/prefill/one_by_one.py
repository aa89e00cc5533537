"""Attention of tokens of a step that see each other as later steps will: as the cache has them.

A token of a decode step sees itself as it was computed and those before it in their KV dtype. The
tokens of one step see each other as they were computed. Where the two differ, a step that verifies
drafts takes the first way, so that it gives what single steps would.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvrt.arrays import Array, Float
from kvrt.attention import softmax
from kvrt.attention.api import attend
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import BlockView
from kvrt.store.codec import KVArray, decode, encode


def is_exact(kv: LayerKV) -> bool:
    """Whether a layer's cache holds keys and values as they are computed, in float32."""
    return all(x.dtype == jnp.float32 for x in jax.tree.leaves(kv))


def as_cached(x: Float[Array, "T H D"], like: KVArray) -> Float[Array, "T H D"]:
    """Keys or values as they come back from a cache of the KV dtype of others."""
    return decode(encode(x, like, -1), -1)


def attend_one_by_one(
    args: tuple[TokenQKV, LayerKV, BlockView, LayerAttention],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H V"],
) -> Float[Array, "T Q V"]:
    """The output of `attend(*args)`, if tokens saw those before them with other keys and values.

    Args:
      args: as `attend` takes them.
      k: keys as later tokens of the step see them, compared as those of `args` are.
      v: values likewise.
    """
    qkv, kv, view, how = args
    before = attend(qkv, kv, dataclasses.replace(view, own=jnp.asarray(False)), how)
    merged = softmax.merge_outputs(before, _own(qkv, view, how, (k, v)))
    # A token of padding has seen nothing.
    real = jnp.asarray(view.pos) >= 0
    return jnp.where(real[:, None, None], merged, 0.0).astype(qkv.q.dtype)


def _own(
    qkv: TokenQKV, view: BlockView, how: LayerAttention, seen: tuple[Array, Array]
) -> tuple[Float[Array, "T Q V"], Float[Array, "T Q"]]:
    """Attention over the step's own tokens, each of them exact to itself alone."""
    n_tokens, n_q, d = qkv.q.shape
    n_kv, group = qkv.k.shape[1], how.group
    q = qkv.q.astype(jnp.float32).reshape(n_tokens, n_kv, n_q // n_kv, d)
    itself = jnp.eye(n_tokens, dtype=bool)[:, None, None]

    def compared(k: Array) -> Array:
        s = jnp.einsum("thgd,shd->thgs", q, k.astype(jnp.float32))
        return softmax.capped(s * jnp.float32(group.score_scale), group.soft_cap)

    sees = jnp.asarray(view.sees_own(group.mask))[:, None, None]
    s = jnp.where(itself, compared(qkv.k), compared(seen[0]))
    s = jnp.where(sees, s, softmax.MASKED)
    m = jnp.max(s, axis=3, keepdims=True)
    p = jnp.where(sees, jnp.exp(s - m), 0.0)
    total = jnp.sum(p, axis=3, keepdims=True)
    # A refused token's value may be anything: those that do not see it take nothing of it.
    out = jnp.einsum("thgs,shd->thgd", jnp.where(itself, 0.0, p), seen[1].astype(jnp.float32))
    mine = jnp.sum(jnp.where(itself, p, 0.0), axis=3, keepdims=True)
    out = out + mine * qkv.v.astype(jnp.float32)[:, :, None]
    some = total != 0
    safe = jnp.where(some, total, 1.0)
    lse = jnp.where(some, m + jnp.log(safe), softmax.MASKED)
    return (out / safe).reshape(n_tokens, n_q, -1), lse.reshape(n_tokens, n_q)
