"""Attention over a runtime list of blocks, for any XLA device.

The loop bound is a traced value, so one compiled program serves every context length, and only
blocks that hold something for these tokens are read. The step's own tokens join the same softmax;
they are written afterwards, because writing first makes XLA copy every layer.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Shaped
from kvrt.attention import softmax, view
from kvrt.attention.rotation import Rotation
from kvrt.config import GroupSpec
from kvrt.store.store import widen

# Blocks of one turn, side by side like heads: half the turns, each with work for more threads.
LANES = 2


def attend_chunked(
    q: Float[Array, "T Q D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    k_rows: Shaped[Array, "N H D B"],
    v_rows: Shaped[Array, "N H B D"],
    sight: view.View,
    group: GroupSpec,
    turn: Rotation | None,
    sinks: Float[Array, " Q"] | None,
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """Attention of T tokens over the blocks of `sight` and over themselves.

    Args:
      q: rotated queries.
      k: the tokens' own keys, rotated.
      v: the tokens' own values.
      k_rows: key rows of the layer, before the step's write.
      v_rows: value rows likewise.
      sight: positions, owners and blocks.
      group: mask, scale and soft cap of the layer.
      turn: turns stored keys to their positions where they are stored raw; None without RoPE.
      sinks: a logit a query head, or None.

    Returns:
      Output in q's dtype and log-sum-exp in float32.
    """
    n_tokens, n_q, d = q.shape
    n_kv = k.shape[1]
    scale = d**-0.5 if group.scale is None else group.scale
    heads = _by_kv_head(q, n_kv)

    def tile(
        part: softmax.Partial, q: Array, k: Array, v: Array, sees: AnyArray
    ) -> softmax.Partial:
        s = softmax.scores(q, k, scale, group.soft_cap)
        return softmax.add_tile(part, s, v, _for_heads(sees, n_q // n_kv))

    def one(block: Array) -> tuple[Array, Array, AnyArray]:
        keys = widen(k_rows[block])
        if turn is not None:
            keys = turn.cells(keys, block)
        return keys, widen(v_rows[block]), view.sees_block(sight, block, group.mask)

    def step(i: Array, part: softmax.Partial) -> softmax.Partial:
        mine = [LANES * i + lane for lane in range(LANES)]
        keys, values, sees = zip(*(one(blocks[j]) for j in mine), strict=True)
        listed = [s & (j < sight.n_blocks) for s, j in zip(sees, mine, strict=True)]
        sees = jnp.repeat(jnp.stack(listed), n_kv, axis=0)
        return tile(part, lanes, jnp.concatenate(keys), jnp.concatenate(values), sees)

    blocks = jnp.pad(sight.blocks, (0, -sight.blocks.shape[0] % LANES))
    lanes = jnp.tile(heads, (LANES, 1, 1))
    part = softmax.empty(LANES * n_kv, heads.shape[1], d)
    n_turns = (sight.n_blocks + (LANES - 1)) // LANES
    part = _join(lax.fori_loop(0, n_turns, step, part), n_kv)
    own_keys = jnp.transpose(k, (1, 2, 0)).astype(jnp.float32)
    own_values = jnp.transpose(v, (1, 0, 2)).astype(jnp.float32)
    part = tile(part, heads, own_keys, own_values, view.sees_own(sight, group.mask)[None])
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(n_kv, -1), n_tokens, axis=1)
    out, lse = softmax.finish(part, sinks)
    return _by_token(out, n_tokens).astype(q.dtype), _by_token(lse[:, :, None], n_tokens)[:, :, 0]


def _by_kv_head(q: Float[Array, "T Q D"], n_kv: int) -> Float[Array, "H P D"]:
    """Queries of one kv head side by side, heads before tokens: [T, H*G, D] to [H, G*T, D]."""
    n_tokens, n_q, d = q.shape
    q = q.astype(jnp.float32).reshape(n_tokens, n_kv, n_q // n_kv, d)
    return jnp.transpose(q, (1, 2, 0, 3)).reshape(n_kv, n_q // n_kv * n_tokens, d)


def _by_token(x: Float[Array, "H P D"], n_tokens: int) -> Float[Array, "T Q D"]:
    """The inverse of `_by_kv_head`."""
    n_kv, n, d = x.shape
    x = x.reshape(n_kv, n // n_tokens, n_tokens, d)
    return jnp.transpose(x, (2, 0, 1, 3)).reshape(n_tokens, n_kv * (n // n_tokens), d)


def _for_heads(sees: Bool[AnyArray, "L T B"], n_heads: int) -> Bool[Array, "L P B"]:
    """The tokens' mask for every query head of a kv head."""
    n, n_tokens, b = sees.shape
    wide = jnp.broadcast_to(sees[:, None], (n, n_heads, n_tokens, b))
    return wide.reshape(n, n_heads * n_tokens, b)


def _join(part: softmax.Partial, n_kv: int) -> softmax.Partial:
    """The lanes of a partial result as one."""
    by_lane = jax.tree.map(lambda x: x.reshape(LANES, n_kv, *x.shape[1:]), part)
    lanes = [jax.tree.map(operator.itemgetter(i), by_lane) for i in range(LANES)]
    return functools.reduce(softmax.merge, lanes)
