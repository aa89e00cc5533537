"""Attention by a Pallas kernel: over cached blocks and over the step's own tokens, one softmax.

A step's own tokens come as they are: a few in one product beside the kernel, many as blocks that
the kernel reads, cut into lists of `OWN` tokens so that what is later, or out of a window, is not
read. No public function serves them, for their sums must join those of the cached tokens:
`jax.nn.dot_product_attention` gives the log-sum-exp in the inputs' type, and bfloat16 would put the
parts' weights wrong by percents; tokamax 0.0.12 gives none.

Source: arXiv:2205.14135; flash-decoding (splits over keys, merged by their log-sum-exp).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvrt.arrays import AnyArray, Array, Bool, Float
from kvrt.attention import softmax
from kvrt.attention.pallas import common, runs, sides
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import AnyView, BlockView, SeqView, blocked
from kvrt.config import GroupSpec
from kvrt.errors import NoKernel

# Own tokens of one block for the kernel; so many are still a single product.
OWN = 128


def attend(
    kernel: common.Kernel, qkv: TokenQKV, kv: LayerKV, view: AnyView, how: LayerAttention
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """See `kvrt.attention.attend`; the blocks are read by `kernel`.

    Raises:
      NoKernel: latents, or keys and values that the kernel cannot read.
    """
    if how.group.latent_rank:
        raise NoKernel(
            "layers that keep a latent read their keys from two arrays, kernels from one; use "
            "attention='chunked'"
        )
    several = isinstance(view, SeqView)
    lists = (view.blocks, view.n_blocks) if several else (view.blocks[None], view.n_blocks[None])
    found = sides.sides_of(qkv, view, how)
    work, sums = sides.over_lists(kernel, found, [kv] * len(found), *lists)
    if isinstance(view, SeqView) and view.shared is not None:
        shared = runs.over_shared(kernel, qkv, kv, view, how)
        stored = softmax.merge(common.merged(work, sums), shared)
        own = _own(qkv, view.sees_own()[:, None, None], how.group)
        return _joined(stored, own, how.sinks, qkv.q.dtype)
    if several:
        return _one_each(kernel, work, sums, qkv, view.sees_own(), how)
    if view.n_tokens > OWN:
        own = _own_blocks(kernel, qkv, view, how)
        return _joined(common.merged(work, sums), own, how.sinks, qkv.q.dtype)
    sees = view.sees_own(how.group.mask)
    if view.n_tokens == 1:
        return _one_each(kernel, work, sums, qkv, sees[0], how)
    near = how.grouped and how.grouped.is_near(view.pos, view.pos[None])
    own = _own(qkv, sees[None], how.group, near)
    return _joined(common.merged(work, sums), own, how.sinks, qkv.q.dtype)


def _one_each(
    kernel: common.Kernel,
    work: common.KernelWork,
    sums: common.Sums,
    qkv: TokenQKV,
    sees: Bool[AnyArray, " S"],
    how: LayerAttention,
) -> tuple[Float[Array, "S Q D"], Float[Array, "S Q"]]:
    """The end of attention of tokens that have a list each."""
    if kernel.end is not None:
        return kernel.end(work, sums, qkv, jnp.asarray(sees), how)
    own = _own(qkv, sees[:, None, None], how.group)
    return _joined(common.merged(work, sums), own, how.sinks, qkv.q.dtype)


def _joined(
    stored: softmax.Partial, own: softmax.Partial, sinks: Float[Array, " Q"] | None, dtype: Any
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32), stored.m.shape)
    out, lse = softmax.finish(softmax.merge(stored, own), sinks)
    return out.astype(dtype), lse


def _own(
    qkv: TokenQKV,
    sees: Bool[AnyArray, "S O O"],
    group: GroupSpec,
    near: Bool[AnyArray, "O O"] | None = None,
) -> softmax.Partial:
    """Tokens in S lists of O over those of their list, in one product a list and head.

    With grouped positions `near` says which pairs are compared by exact ones.
    """
    n_lists, n_own = sees.shape[:2]
    (_, n_q, d), n_kv = qkv.q.shape, qkv.k.shape[1]

    def lanes(x: Array, *axes: int) -> Float[Array, "L _ _"]:
        x = jnp.transpose(x.reshape(n_lists, n_own, n_kv, -1, d).astype(jnp.float32), axes)
        return x.reshape(n_lists * n_kv, -1, x.shape[-1])

    # What XLA would round to bfloat16 or TF32 on its own stays float32 here.
    with jax.default_matmul_precision("highest"):

        def compared(q: Array, k: Array) -> Array:
            pair = lanes(q, 0, 2, 3, 1, 4), lanes(k, 0, 2, 3, 4, 1)
            return softmax.scores(*pair, group.score_scale, group.soft_cap)

        s = compared(qkv.q, qkv.k)
        if near is not None and qkv.grouped is not None:
            by_query = jnp.tile(near, (n_q // n_kv, 1))
            s = jnp.where(by_query[None], s, compared(*qkv.grouped))
        visible = jnp.repeat(jnp.tile(sees, (1, n_q // n_kv, 1)), n_kv, axis=0)
        empty = softmax.empty(s.shape[0], s.shape[1], d)
        part = softmax.add_tile(empty, s, lanes(qkv.v, 0, 2, 3, 1, 4), visible)
    by_list = jax.tree.map(lambda x: x.reshape(n_lists, n_kv, *x.shape[1:]), part)
    return jax.tree.map(lambda x: common.by_token(x, n_own), by_list)


def _own_blocks(
    kernel: common.Kernel, qkv: TokenQKV, view: BlockView, how: LayerAttention
) -> softmax.Partial:
    """The same for one list of many tokens, by the kernel: blocks of tokens, and as many lists."""
    n = -(-view.n_tokens // OWN)
    lacking = n * OWN - view.n_tokens
    pos = jnp.pad(jnp.asarray(view.pos), (0, lacking), constant_values=-1)
    bits, padded = jax.tree.map(
        lambda x: jnp.pad(x, ((0, lacking), *[(0, 0)] * (x.ndim - 1))),
        (jnp.asarray(view.bits), qkv),
    )
    cell_pos, cell_seqs = blocked(pos, bits, n, OWN)
    tokens = BlockView(
        pos=pos,
        bits=bits,
        blocks=jnp.arange(n, dtype=jnp.int32),
        n_blocks=jnp.int32(n) if view.own is None else n * jnp.asarray(view.own, jnp.int32),
        cell_pos=cell_pos,
        cell_seqs=cell_seqs,
    )
    # Their keys are rotated already.
    found = [
        dataclasses.replace(x, how=dataclasses.replace(x.how, rope=None))
        for x in sides.sides_of(padded, tokens, how)
    ]
    values = jnp.transpose(padded.v.reshape(n, OWN, *qkv.v.shape[1:]), (0, 2, 1, 3))
    kvs = [
        LayerKV(k=jnp.transpose(x.k.reshape(n, OWN, *x.k.shape[1:]), (0, 2, 3, 1)), v=values)
        for x in found
    ]
    lists = jnp.broadcast_to(tokens.blocks, (n, n)), jnp.full(n, tokens.n_blocks)
    work, sums = sides.over_lists(kernel, found, kvs, *lists)
    return jax.tree.map(lambda x: x[: len(x) - lacking], common.merged(work, sums))
