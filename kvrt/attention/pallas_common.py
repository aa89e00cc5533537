"""Attention around a Pallas kernel: its work, the spans of channels it reads, and the last sum.

A kernel sees rows of work. Each row has P = G * T queries for every kv head, and a list of blocks:
a step's tokens that share one list are a single row, each token with blocks of its own is a row of
one token. What a kernel returns are unnormalised sums over parts of the list (splits); the tokens'
own keys join them here, in the same softmax.

Source: arXiv:2205.14135; flash-decoding (splits over keys, merged by their log-sum-exp).
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.attention import softmax, view
from kvrt.attention.grouped import Far
from kvrt.attention.rotation import Rotation
from kvrt.config import GroupSpec, MaskSpec
from kvrt.errors import NoKernel
from kvrt.store.codec import Coded, Rows

_FAR = jnp.iinfo(jnp.int32).max // 2


@state
class Work:
    """Rows of queries with their lists of blocks, and the tokens' own keys and values.

    Only blocks that hold something for a row's queries are listed, n_blocks[i] of them. Owners are
    int32 bits, which every backend can load.
    """

    q: Float[Array, "S H P D"]
    pos: Int32[Array, "S P"]
    bits: Int32[Array, "S P W"]
    blocks: Int32[Array, "S M"]
    n_blocks: Int32[Array, " S"]
    cell_pos: Int32[Array, "N B"]
    cell_seqs: Int32[Array, "N B W"]
    own_k: Float[Array, "S H D O"]
    own_v: Float[Array, "S H O D"]
    own_sees: Bool[Array, "S P O"]
    n_tokens: int = dataclasses.field(metadata=dict(static=True))


@state
class Sums:
    """What a kernel returns: softmax sums of each split of each row."""

    m: Float[Array, "S H K P"]
    l: Float[Array, "S H K P"]  # noqa: E741 (the letter of the papers)
    acc: Float[Array, "S H K P D"]


# A kernel: the sums of rows of work over the key and value rows of a layer.
Kernel = Callable[[Work, Rows, Rows, GroupSpec, Rotation | None], Sums]


def attend_list(
    kernel: Kernel,
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
      kernel: what sums over the blocks.
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
    work = of_list(q, k, v, sight, group.mask)
    return finish(work, kernel(work, k_rows, v_rows, group, turn), group, sinks)


def attend_rows(
    kernel: Kernel,
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
    work = of_rows(q, k, v, sight, group.mask)
    return finish(work, kernel(work, k_rows, v_rows, group, turn), group, sinks)


def of_list(q: Array, k: Array, v: Array, sight: view.View, rule: MaskSpec) -> Work:
    """Work of T tokens that share a list: one row."""
    n_tokens, n_q, d = q.shape
    n_kv = k.shape[1]
    per_head = jnp.transpose(q.reshape(n_tokens, n_kv, n_q // n_kv, d), (1, 2, 0, 3))
    pos, bits = jnp.asarray(sight.pos), _signed(sight.bits)
    sees = view.sees_own(sight, rule)
    blocks, n = _needed(sight, sight.blocks[None], sight.n_blocks[None], pos[None], rule)
    return Work(
        q=per_head.reshape(1, n_kv, -1, d),
        pos=jnp.tile(pos, n_q // n_kv)[None],
        bits=jnp.tile(bits, (n_q // n_kv, 1))[None],
        blocks=blocks,
        n_blocks=n,
        cell_pos=jnp.asarray(sight.cell_pos),
        cell_seqs=_signed(sight.cell_seqs),
        own_k=jnp.transpose(k, (1, 2, 0))[None],
        own_v=jnp.transpose(v, (1, 0, 2))[None],
        own_sees=jnp.tile(sees, (n_q // n_kv, 1))[None],
        n_tokens=n_tokens,
    )


def of_rows(q: Array, k: Array, v: Array, sight: view.RowView, rule: MaskSpec) -> Work:
    """Work of S tokens with lists of their own: a row each."""
    n_rows, n_q, d = q.shape
    n_kv = k.shape[1]
    n_heads = n_q // n_kv
    pos = jnp.asarray(sight.pos)
    blocks, n = _needed(sight, sight.tables, sight.n_blocks, pos[:, None], rule)
    return Work(
        q=q.reshape(n_rows, n_kv, n_heads, d),
        pos=jnp.repeat(pos[:, None], n_heads, axis=1),
        bits=jnp.repeat(_signed(sight.bits)[:, None], n_heads, axis=1),
        blocks=blocks,
        n_blocks=n,
        cell_pos=jnp.asarray(sight.cell_pos),
        cell_seqs=_signed(sight.cell_seqs),
        own_k=k[..., None],
        own_v=v[:, :, None],
        own_sees=jnp.repeat(view.row_sees_own(sight)[:, None, None], n_heads, axis=1),
        n_tokens=1,
    )


def _signed(bits: AnyArray) -> Int32[Array, "..."]:
    return lax.bitcast_convert_type(jnp.asarray(bits), jnp.int32)


def _needed(
    sight: view.View | view.RowView,
    blocks: Int32[AnyArray, "S M"],
    n_blocks: Int32[AnyArray, " S"],
    pos: Int32[Array, "S T"],
    rule: MaskSpec,
) -> tuple[Int32[Array, "S M"], Int32[Array, " S"]]:
    """The listed blocks that may hold a visible cell, side by side, and how many.

    A block is judged by the lowest and highest position of its cells that share an owner with a
    token of the row, so some that hold nothing visible stay: the kernel masks cell by cell. This
    reads 4 (1 + W) bytes a cell beside the cell's rows in all heads, and XLA does it once for all
    layers of a group.
    """
    n_rows, n_listed = blocks.shape
    bits = jnp.asarray(sight.bits).reshape(n_rows, -1, sight.bits.shape[1])
    owners = lax.reduce(bits, jnp.uint32(0), lax.bitwise_or, (1,))
    cell_pos, cell_seqs = sight.cell_pos[blocks], sight.cell_seqs[blocks]
    ours = jnp.any((cell_seqs & owners[:, None, None]) != 0, axis=3) & (cell_pos >= 0)
    low = jnp.min(jnp.where(ours, cell_pos, _FAR), axis=2)
    high = jnp.max(jnp.where(ours, cell_pos, -_FAR), axis=2)
    first = jnp.min(jnp.where(pos >= 0, pos, _FAR), axis=1)[:, None]
    last = jnp.max(pos, axis=1)[:, None]
    listed = jnp.arange(n_listed)[None] < jnp.asarray(n_blocks)[:, None]
    listed &= jnp.any(ours, axis=2) & _in_reach(rule, low, high, first, last)
    at = jnp.where(listed, jnp.cumsum(listed, axis=1, dtype=jnp.int32) - 1, n_listed)
    rows = jnp.arange(n_rows)[:, None]
    found = jnp.zeros((n_rows, n_listed), jnp.int32).at[rows, at].set(blocks, mode="drop")
    return found, jnp.sum(listed, axis=1, dtype=jnp.int32)


def _in_reach(rule: MaskSpec, low: Array, high: Array, first: Array, last: Array) -> Array:
    """Whether queries at first to last may see a position from low to high."""
    past = low <= last
    match rule.kind:
        case "full":
            return past
        case "window":
            near = past & (high > first - rule.size)
        case "chunked":
            near = past & (high >= first // rule.size * rule.size)
        case "symmetric":
            near = (low <= last + rule.size // 2) & (high >= first - rule.size // 2)
    return near | (past & (low < rule.n_sink)) if rule.n_sink else near


def finish(
    work: Work, sums: Sums, group: GroupSpec, sinks: Float[Array, " Q"] | None
) -> tuple[Float[Array, "T Q D"], Float[Array, "T Q"]]:
    """Output and log-sum-exp of all splits and the tokens' own rows.

    This reads what the kernel wrote: 4 (D + 2) bytes a split, head and query.
    """
    n_rows, n_kv, p, d = work.q.shape
    scale = d**-0.5 if group.scale is None else group.scale
    lanes = [
        x.reshape(n_rows * n_kv, *x.shape[2:]).astype(jnp.float32)
        for x in (work.q, work.own_k, work.own_v)
    ]
    # What XLA would round to bfloat16 or TF32 on its own stays float32 here.
    with jax.default_matmul_precision("highest"):
        s = softmax.scores(lanes[0], lanes[1], scale, group.soft_cap)
        sees = jnp.repeat(work.own_sees, n_kv, axis=0)
        own = softmax.add_tile(softmax.empty(n_rows * n_kv, p, d), s, lanes[2], sees)
    if sinks is not None:
        by_head = jnp.repeat(sinks.astype(jnp.float32).reshape(n_kv, -1), work.n_tokens, axis=1)
        sinks = jnp.tile(by_head, (n_rows, 1))
    out, lse = softmax.finish(softmax.merge(_merged(sums), own), sinks)
    out = _by_token(out.reshape(n_rows, n_kv, -1, work.n_tokens, d))
    return out.astype(work.q.dtype), _by_token(lse.reshape(n_rows, n_kv, -1, work.n_tokens))


def _merged(sums: Sums) -> softmax.Partial:
    """All splits of a row and head as one."""
    m = jnp.max(sums.m, axis=2)
    weight = jnp.exp(sums.m - m[:, :, None])
    acc = jnp.sum(sums.acc * weight[..., None], axis=2)
    parts = m, jnp.sum(sums.l * weight, axis=2), acc
    m, total, acc = (x.reshape(-1, *x.shape[2:]) for x in parts)
    return softmax.Partial(m=m, l=total, acc=acc)


def _by_token(x: Float[Array, "S H G T *D"]) -> Array:
    """[S, H, G, T, ...] to [S * T, H * G, ...]."""
    n_rows, n_kv, n_heads, n_tokens, *rest = x.shape
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(n_rows * n_tokens, n_kv * n_heads, *rest)


class Span(NamedTuple):
    """Channels start, start + stride, ... of a head, n of them.

    All lie in one group of a codec and at the same bits of their bytes.
    """

    start: int
    stride: int
    n: int


class Pair(NamedTuple):
    """Spans that RoPE turns into each other, and the first of their rows in the tables."""

    a: Span
    b: Span
    row: int


@dataclasses.dataclass(frozen=True)
class Form:
    """How a kernel finds channel c of a row of D: bytes, bits and groups.

    Attributes:
      n_bytes: rows of codes (or of plain values) of a head; channel c is in row c % n_bytes.
      bits: of a code; 0 for plain rows.
      group: channels that share a scale.
      affine: codes count from a minimum.
    """

    n_bytes: int
    bits: int
    group: int
    affine: bool

    @property
    def steps(self) -> tuple[int, int]:
        """Widths at which a span must be cut."""
        return self.n_bytes, self.group


def form(rows: Rows, head_dim: int, channel_axis: int) -> Form:
    """The form of a layer's rows.

    Raises:
      NoKernel: scales are not by cell and group of channels.
    """
    if not isinstance(rows, Coded):
        return Form(n_bytes=head_dim, bits=0, group=head_dim, affine=False)
    n_bytes, n_groups = rows.codec.sizes(head_dim)
    wanted = list(rows.codes.shape)
    wanted[channel_axis] = n_groups
    if rows.scale.shape != tuple(wanted):
        raise NoKernel(
            f"kernels read scales by cell and group of channels, {tuple(wanted)}; these rows have "
            f"{rows.scale.shape}; use attention='chunked'"
        )
    return Form(
        n_bytes=n_bytes,
        bits=rows.codec.bits,
        group=head_dim // n_groups,
        affine=rows.codec.affine,
    )


def spans(form: Form, first: int, last: int) -> list[Span]:
    """Channels [first, last) cut where bytes, bits or groups end."""
    cuts = {c for step in form.steps for c in range(0, last, step) if first < c < last}
    edges = sorted({first, last} | cuts)
    return [Span(start, 1, stop - start) for start, stop in itertools.pairwise(edges)]


def pairs(form: Form, n_pairs: int, layout: str) -> list[Pair]:
    """Channels that RoPE turns, cut where either of two partners meets an end.

    Raises:
      NoKernel: two neighbours of a pair lie in different groups.
    """
    if layout == "norm":
        if any(step % 2 for step in form.steps):
            raise NoKernel(f"pairs of neighbours across groups of {form.steps} channels")
        cuts = [x.start // 2 for x in spans(form, 0, 2 * n_pairs)]
        edges = itertools.pairwise([*cuts, n_pairs])
        return [Pair(Span(2 * i, 2, j - i), Span(2 * i + 1, 2, j - i), i) for i, j in edges]
    lower = {x.start for x in spans(form, 0, n_pairs)}
    upper = {x.start - n_pairs for x in spans(form, n_pairs, 2 * n_pairs)}
    edges = itertools.pairwise([*sorted(lower | upper), n_pairs])
    return [Pair(Span(i, 1, j - i), Span(i + n_pairs, 1, j - i), i) for i, j in edges]


def raw_tables(turn: Rotation | None) -> tuple[Array, Array] | None:
    """Cosines and sines of the cells where keys are stored raw, else None."""
    if turn is None or turn.cell_cos is None or turn.cell_sin is None:
        return None
    return turn.cell_cos, turn.cell_sin
