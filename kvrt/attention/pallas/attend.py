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
from kvrt.attention.pallas import channel_tail, common, runs, sides
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import AnyView, BlockView, SeqView, blocked
from kvrt.config import GroupSpec
from kvrt.options.compose import check_together
from kvrt.store.per_channel import PerChannel
from kvrt.store.quantized import Quantized

# Own tokens of one block for the kernel; so many are still a single product.
OWN = 128


def attend(
    kernel: common.Kernel, qkv: TokenQKV, kv: LayerKV, view: AnyView, how: LayerAttention
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """See `kvrt.attention.attend`; the blocks are read by `kernel`.

    Raises:
      NoKernel: latents, or keys and values that the kernel cannot read.
    """
    check_together(kernel.traits, how.group.traits, _traits(kv, how))
    tail = None
    if isinstance(kv.k, PerChannel):
        tail = _stored(kernel, qkv, *channel_tail.tail_part(kv, kv.k, view, how))
        kv, view = channel_tail.without_tail(kv, kv.k, view)
    shared = view.shared if isinstance(view, SeqView) else None
    work, sums = _over_lists(kernel, qkv, kv, view, how)
    if tail is None and shared is None and kernel.end is not None and _has_one_each(view):
        return kernel.end(work, sums, qkv, _sees_itself(view, how), how)
    stored = common.merged(work, sums)
    if isinstance(view, SeqView) and shared is not None:
        stored = softmax.merge(stored, runs.over_shared(kernel, qkv, kv, view, how))
    stored = stored if tail is None else softmax.merge(stored, tail)
    return _joined(stored, _own(kernel, qkv, view, how), how.sinks, qkv.q.dtype)


def _traits(kv: LayerKV, how: LayerAttention) -> dict[str, str]:
    """Traits of a layer's arrays and RoPE, see `kvrt.options.compose`."""
    leaves = [x.dtype for x in jax.tree.leaves((kv.k, kv.v))]
    arrays = [kv.k.quantized if isinstance(kv.k, PerChannel) else kv.k, kv.v]
    codecs = [x.codec for x in arrays if isinstance(x, Quantized)]
    bits = [c.bits for c in codecs if c.bits != 8 or c.affine]
    rope = how.rope if how.rope is not None and how.rope.cells is not None else None
    found = {
        "fp8": any(c.floating for c in codecs),
        "float16": jnp.float16 in leaves,
        "few bits": bits and bits[0],
        "rotated at read": rope is not None,
        "neighbours rotated at read": rope is not None and rope.layout != "neox",
    }
    return {name: str(x) for name, x in found.items() if x}


def _over_lists(
    kernel: common.Kernel, qkv: TokenQKV, kv: LayerKV, view: AnyView, how: LayerAttention
) -> tuple[common.KernelWork, common.Sums]:
    """Sums over the block lists of a view, but for what they share."""
    several = isinstance(view, SeqView)
    lists = (view.blocks, view.n_blocks) if several else (view.blocks[None], view.n_blocks[None])
    found = sides.sides_of(qkv, view, how)
    return sides.over_lists(kernel, found, [kv] * len(found), *lists)


def _stored(
    kernel: common.Kernel, qkv: TokenQKV, kv: LayerKV, view: AnyView, how: LayerAttention
) -> softmax.Partial:
    """The same by token and query head."""
    return common.merged(*_over_lists(kernel, qkv, kv, view, how))


def _has_one_each(view: AnyView) -> bool:
    """Whether each token has a list of its own."""
    return isinstance(view, SeqView) or view.n_tokens == 1


def _sees_itself(view: AnyView, how: LayerAttention) -> Bool[Array, " S"]:
    """Of tokens that have a list each, which see themselves."""
    several = isinstance(view, SeqView)
    return jnp.asarray(view.sees_own() if several else view.sees_own(how.group.mask)[0])


def _own(
    kernel: common.Kernel, qkv: TokenQKV, view: AnyView, how: LayerAttention
) -> softmax.Partial:
    """Tokens of a step over those of their list."""
    if isinstance(view, SeqView):
        return _own_product(qkv, view.sees_own()[:, None, None], how.group)
    if view.n_tokens > OWN:
        return _own_blocks(kernel, qkv, view, how)
    near = None
    if view.n_tokens > 1 and how.grouped:
        near = how.grouped.is_near(view.pos, view.pos[None])
    return _own_product(qkv, view.sees_own(how.group.mask)[None], how.group, near)


def _joined(
    stored: softmax.Partial, own: softmax.Partial, sinks: Float[Array, " Q"] | None, dtype: Any
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32), stored.m.shape)
    out, lse = softmax.finish(softmax.merge(stored, own), sinks)
    return out.astype(dtype), lse


def _own_product(
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
