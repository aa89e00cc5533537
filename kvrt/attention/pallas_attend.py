"""Attention by a Pallas kernel: over stored blocks and over the step's own tokens, one softmax.

A step's own tokens come as they are: a few in one product beside the kernel, many as blocks that
the kernel reads, cut into rows of `OWN` tokens so that what is later, or out of a window, is not
read. No public function serves them, for their sums must join those of the stored rows:
`jax.nn.dot_product_attention` gives the log-sum-exp in the rows' type, and bfloat16 would put the
parts' weights wrong by percents; tokamax 0.0.12 gives none.

Source: arXiv:2205.14135; flash-decoding (splits over keys, merged by their log-sum-exp).
"""

from typing import Any

import jax
import jax.numpy as jnp

from kvrt.arrays import AnyArray, Array, Bool, Float
from kvrt.attention import pallas_common as common
from kvrt.attention import softmax, view
from kvrt.attention.grouped import Far
from kvrt.attention.rotation import Rotation
from kvrt.config import GroupSpec
from kvrt.errors import NoKernel
from kvrt.store.codec import Rows

# Own tokens of one block for the kernel; so many are still a single product.
OWN = 128


def attend_list(
    kernel: common.Kernel,
    q: Float[Array, "T Q D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    k_rows: Rows,
    v_rows: Rows,
    sight: view.View,
    group: GroupSpec,
    turn: Rotation | None,
    far: Far | None,
    sinks: Float[Array, " Q"] | None,
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """Attention of T tokens over the blocks of `sight` and over themselves, by a kernel.

    Args:
      kernel: what reads the blocks.
      q: rotated queries.
      k: the tokens' own keys, rotated.
      v: the tokens' own values.
      k_rows: key rows of the layer, [N, H, D, B] or codes of them, before the step's write.
      v_rows: value rows, [N, H, B, D], likewise.
      sight: positions, owners and blocks.
      group: mask, scale and soft cap of the layer.
      turn: turns stored keys to their positions where they are stored raw; None without RoPE.
      far: None; see Raises.
      sinks: a logit a query head, or None.

    Returns:
      Output in q's dtype and log-sum-exp in float32.

    Raises:
      NoKernel: `far`, or rows that the kernel cannot read.
    """
    if far is not None:
        raise NoKernel(
            "SelfExtend as in the paper compares a key by its exact and by its grouped position, "
            "kernels have one; use attention='chunked'"
        )
    lists, n_blocks = sight.blocks[None], sight.n_blocks[None]
    work = common.work(q, k.shape[1], sight, lists, n_blocks, group.mask)
    sums = kernel.sums(work, k_rows, v_rows, group, turn)
    if len(q) > OWN:
        own = _own_blocks(kernel, q, k, v, sight, group)
        return _joined(common.merged(work, sums), own, sinks, q.dtype)
    sees = view.sees_own(sight, group.mask)
    if len(q) == 1:
        return _one_each(kernel, work, sums, k, v, sees[0], group, sinks)
    own = _own(q, k, v, sees[None], group)
    return _joined(common.merged(work, sums), own, sinks, q.dtype)


def attend_rows(
    kernel: common.Kernel,
    q: Float[Array, "S Q D"],
    k: Float[Array, "S H D"],
    v: Float[Array, "S H D"],
    k_rows: Rows,
    v_rows: Rows,
    sight: view.RowView,
    group: GroupSpec,
    turn: Rotation | None,
    sinks: Float[Array, " Q"] | None,
) -> tuple[Float[Array, "S Q D"], Float[Array, "S Q"]]:
    """As `kvrt.attention.rows.attend_rows`, by a kernel; see `attend_list`."""
    work = common.work(q, k.shape[1], sight, sight.tables, sight.n_blocks, group.mask)
    sums = kernel.sums(work, k_rows, v_rows, group, turn)
    return _one_each(kernel, work, sums, k, v, view.row_sees_own(sight), group, sinks)


def _one_each(
    kernel: common.Kernel,
    work: common.Work,
    sums: common.Sums,
    k: Float[Array, "S H D"],
    v: Float[Array, "S H D"],
    sees: Bool[AnyArray, " S"],
    group: GroupSpec,
    sinks: Float[Array, " Q"] | None,
) -> tuple[Float[Array, "S Q D"], Float[Array, "S Q"]]:
    """The end of attention of tokens that are rows of their own."""
    if kernel.end is not None:
        return kernel.end(work, sums, k, v, jnp.asarray(sees), group, sinks)
    n_rows, _, _, d = work.q.shape
    q = work.q.reshape(n_rows, -1, d)
    own = _own(q, k, v, sees[:, None, None], group)
    return _joined(common.merged(work, sums), own, sinks, q.dtype)


def _joined(
    stored: softmax.Partial, own: softmax.Partial, sinks: Float[Array, " Q"] | None, dtype: Any
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32), stored.m.shape)
    out, lse = softmax.finish(softmax.merge(stored, own), sinks)
    return out.astype(dtype), lse


def _own(
    q: Float[Array, "T Q D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    sees: Bool[AnyArray, "S O O"],
    group: GroupSpec,
) -> softmax.Partial:
    """Tokens in S rows of O over those of their row, in one product a row and head."""
    n_rows, n_own = sees.shape[:2]
    (_, n_q, d), n_kv = q.shape, k.shape[1]

    def lanes(x: Array, *axes: int) -> Float[Array, "L _ _"]:
        x = jnp.transpose(x.reshape(n_rows, n_own, n_kv, -1, d).astype(jnp.float32), axes)
        return x.reshape(n_rows * n_kv, -1, x.shape[-1])

    # What XLA would round to bfloat16 or TF32 on its own stays float32 here.
    with jax.default_matmul_precision("highest"):
        pair = lanes(q, 0, 2, 3, 1, 4), lanes(k, 0, 2, 3, 4, 1)
        s = softmax.scores(*pair, group.score_scale, group.soft_cap)
        visible = jnp.repeat(jnp.tile(sees, (1, n_q // n_kv, 1)), n_kv, axis=0)
        empty = softmax.empty(s.shape[0], s.shape[1], d)
        part = softmax.add_tile(empty, s, lanes(v, 0, 2, 3, 1, 4), visible)
    by_row = jax.tree.map(lambda x: x.reshape(n_rows, n_kv, *x.shape[1:]), part)
    return jax.tree.map(lambda x: common.by_token(x, n_own), by_row)


def _own_blocks(
    kernel: common.Kernel,
    q: Float[Array, "T Q D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    sight: view.View,
    group: GroupSpec,
) -> softmax.Partial:
    """The same for one row of many tokens, by the kernel: blocks of tokens, and rows as long."""
    n = -(-len(q) // OWN)
    lacking = n * OWN - len(q)
    pos = jnp.pad(jnp.asarray(sight.pos), (0, lacking), constant_values=-1)
    bits, q, k, v = (
        jnp.pad(x, ((0, lacking), *[(0, 0)] * (x.ndim - 1)))
        for x in (jnp.asarray(sight.bits), q, k, v)
    )
    k_rows, v_rows = (x.reshape(n, OWN, *x.shape[1:]) for x in (k, v))
    cell_pos, cell_seqs = view.blocked(pos, bits, n, OWN)
    tokens = view.View(
        pos=pos,
        bits=bits,
        blocks=jnp.arange(n, dtype=jnp.int32),
        n_blocks=jnp.int32(n) if sight.own is None else n * jnp.asarray(sight.own, jnp.int32),
        cell_pos=cell_pos,
        cell_seqs=cell_seqs,
    )
    lists = jnp.broadcast_to(tokens.blocks, (n, n))
    work = common.work(q, k.shape[1], tokens, lists, jnp.full(n, tokens.n_blocks), group.mask)
    sums = kernel.sums(
        work, jnp.transpose(k_rows, (0, 2, 3, 1)), jnp.transpose(v_rows, (0, 2, 1, 3)), group, None
    )
    return jax.tree.map(lambda x: x[: len(x) - lacking], common.merged(work, sums))
