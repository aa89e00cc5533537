"""What every Pallas kernel is given and gives: its work, the spans of channels it reads, its sums.

A kernel sees rows of work. Each row has P = G * T queries for every kv head, and a list of blocks:
a step's tokens that share one list are a single row, each token with blocks of its own is a row of
one token. What a kernel returns are unnormalised sums over parts of the list (splits).

Source: arXiv:2205.14135; flash-decoding (splits over keys, merged by their log-sum-exp).
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Float, Int32, state
from kvrt.attention import softmax, view
from kvrt.attention.rotation import Rotation
from kvrt.config import GroupSpec, MaskSpec
from kvrt.errors import NoKernel
from kvrt.store.codec import Coded, Rows

_FAR = jnp.iinfo(jnp.int32).max // 2


@state
class Work:
    """Rows of queries with their lists of blocks.

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
    n_tokens: int = dataclasses.field(metadata=dict(static=True))


@state
class Sums:
    """What a kernel returns: softmax sums of each split of each row."""

    m: Float[Array, "S H K P"]
    l: Float[Array, "S H K P"]  # noqa: E741 (the letter of the papers)
    acc: Float[Array, "S H K P D"]


class Kernel(NamedTuple):
    """What a module of a kernel offers.

    Attributes:
      sums: of rows of work over the key and value rows of a layer.
      end: of tokens that are rows of their own, from the sums, their keys and values, which of them
        see themselves, group and sinks: output and log-sum-exp. None leaves it to XLA.
    """

    sums: Callable[[Work, Rows, Rows, GroupSpec, Rotation | None], Sums]
    end: Callable[..., tuple[Array, Array]] | None = None


def work(
    q: Float[Array, "T Q D"],
    n_kv: int,
    sight: view.View | view.RowView,
    lists: Int32[AnyArray, "S M"],
    n_blocks: Int32[AnyArray, " S"],
    rule: MaskSpec,
) -> Work:
    """Work of T tokens in S rows: T / S tokens, one behind the other, share a list of blocks."""
    n_rows, (n_all, n_q, d) = len(lists), q.shape
    n_tokens, n_heads = n_all // n_rows, n_q // n_kv
    by_head = jnp.transpose(q.reshape(n_rows, n_tokens, n_kv, n_heads, d), (0, 2, 3, 1, 4))
    pos = jnp.asarray(sight.pos).reshape(n_rows, n_tokens)
    bits = _signed(sight.bits).reshape(n_rows, n_tokens, -1)
    blocks, n_blocks = _needed(sight, lists, n_blocks, pos, rule)
    return Work(
        q=by_head.reshape(n_rows, n_kv, n_heads * n_tokens, d),
        pos=jnp.tile(pos, (1, n_heads)),
        bits=jnp.tile(bits, (1, n_heads, 1)),
        blocks=blocks,
        n_blocks=n_blocks,
        cell_pos=jnp.asarray(sight.cell_pos),
        cell_seqs=_signed(sight.cell_seqs),
        n_tokens=n_tokens,
    )


def merged(work: Work, sums: Sums) -> softmax.Partial:
    """Sums of all splits as one, by token and query head: [T, Q] and [T, Q, D].

    This reads what the kernel wrote: 4 (D + 2) bytes a split, head and query.
    """
    m = jnp.max(sums.m, axis=2)
    weight = jnp.exp(sums.m - m[:, :, None])
    acc = jnp.sum(sums.acc * weight[..., None], axis=2)
    parts = m, jnp.sum(sums.l * weight, axis=2), acc
    m, total, acc = (by_token(x, work.n_tokens) for x in parts)
    return softmax.Partial(m=m, l=total, acc=acc)


def by_token(x: Float[Array, "S H P *D"], n_tokens: int) -> Array:
    """[S, H, G * T, ...] to [S * T, H * G, ...]."""
    n_rows, n_kv, n_queries, *rest = x.shape
    n_heads = n_queries // n_tokens
    x = jnp.moveaxis(x.reshape(n_rows, n_kv, n_heads, n_tokens, *rest), 3, 1)
    return x.reshape(n_rows * n_tokens, n_kv * n_heads, *rest)


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
