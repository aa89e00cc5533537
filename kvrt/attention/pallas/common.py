"""What every Pallas kernel is given and gives: its work, the spans of channels it reads, its sums.

A kernel sees S block lists, and for each P = G * T queries of every kv head: a step's tokens that
share one list, or the one token of a sequence with a list of its own. What it returns are
unnormalised sums over parts of each list (splits).

Source: arXiv:2205.14135; flash-decoding (splits over keys, merged by their log-sum-exp).
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.attention import softmax
from kvrt.attention.types import LayerAttention, LayerKV, TokenQKV
from kvrt.attention.view import View
from kvrt.config import MaskSpec
from kvrt.errors import NoKernel
from kvrt.store.codec import KVArray, Quantized
from kvrt.store.per_channel import PerChannel

_BEYOND = jnp.iinfo(jnp.int32).max // 2


@state
class KernelWork:
    """Block lists with the queries that read them.

    Only blocks that hold something for a list's queries are listed, n_blocks[i] of them. Owners are
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
    """What a kernel returns: softmax sums of each split of each list."""

    m: Float[Array, "S H K P"]
    l: Float[Array, "S H K P"]  # noqa: E741 (the letter of the papers)
    acc: Float[Array, "S H K P D"]


class SumsOf(Protocol):
    """A kernel: softmax sums of queries over the cached keys and values of a layer."""

    def __call__(self, work: KernelWork, kv: LayerKV, how: LayerAttention) -> Sums:
        """Runs the kernel over all lists.

        Args:
          work: block lists with their queries.
          kv: cached keys and values of the layer, in blocks.
          how: mask, scale and soft cap, and what rotates cached keys; sinks are ignored.

        Returns:
          Sums over the listed blocks; the step's own tokens are not among them.

        Raises:
          NoKernel: keys or values of a type, or with scales, that the kernel does not read.
        """
        ...


class EndOf(Protocol):
    """What ends attention of tokens that have a list each: all splits, the own token, sinks."""

    def __call__(
        self,
        work: KernelWork,
        sums: Sums,
        qkv: TokenQKV,
        sees: Bool[Array, " S"],
        how: LayerAttention,
    ) -> tuple[Array, Array]:
        """Output in the queries' dtype and log-sum-exp in float32.

        Args:
          work: lists of one token each.
          sums: of the cached keys and values.
          qkv: the tokens themselves.
          sees: which of them see themselves.
          how: scale, soft cap and sinks.
        """
        ...


class Kernel(NamedTuple):
    """The functions of a kernel's module; without an `end` XLA does that part.

    `traits` is what it cannot read, see `kvrt.options.compose`.
    """

    sums: SumsOf
    traits: Mapping[str, str]
    end: EndOf | None = None


def kernel_work(
    q: Float[Array, "T Q D"],
    n_kv: int,
    view: View,
    lists: Int32[AnyArray, "S M"],
    n_blocks: Int32[AnyArray, " S"],
    rule: MaskSpec,
) -> KernelWork:
    """Work of T tokens with S lists: T / S tokens, one behind the other, share a block list."""
    n_lists, (n_all, n_q, d) = len(lists), q.shape
    n_tokens, n_heads = n_all // n_lists, n_q // n_kv
    by_head = jnp.transpose(q.reshape(n_lists, n_tokens, n_kv, n_heads, d), (0, 2, 3, 1, 4))
    pos = jnp.asarray(view.pos).reshape(n_lists, n_tokens)
    bits = _signed(view.bits).reshape(n_lists, n_tokens, -1)
    blocks, n_blocks = _needed(view, lists, n_blocks, pos, rule)
    return KernelWork(
        q=by_head.reshape(n_lists, n_kv, n_heads * n_tokens, d),
        pos=jnp.tile(pos, (1, n_heads)),
        bits=jnp.tile(bits, (1, n_heads, 1)),
        blocks=blocks,
        n_blocks=n_blocks,
        cell_pos=jnp.asarray(view.cell_pos),
        cell_seqs=_signed(view.cell_seqs),
        n_tokens=n_tokens,
    )


def merged(work: KernelWork, sums: Sums) -> softmax.Partial:
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
    n_lists, n_kv, n_queries, *rest = x.shape
    n_heads = n_queries // n_tokens
    x = jnp.moveaxis(x.reshape(n_lists, n_kv, n_heads, n_tokens, *rest), 3, 1)
    return x.reshape(n_lists * n_tokens, n_kv * n_heads, *rest)


def _signed(bits: AnyArray) -> Int32[Array, "..."]:
    return lax.bitcast_convert_type(jnp.asarray(bits), jnp.int32)


def _needed(
    view: View,
    blocks: Int32[AnyArray, "S M"],
    n_blocks: Int32[AnyArray, " S"],
    pos: Int32[Array, "S T"],
    rule: MaskSpec,
) -> tuple[Int32[Array, "S M"], Int32[Array, " S"]]:
    """The listed blocks that may hold a visible cell, side by side, and how many.

    A block is judged by the lowest and highest position of its cells that share an owner with a
    token of the list, so some that hold nothing visible stay: the kernel masks cell by cell. This
    reads 4 (1 + W) bytes a cell beside its keys and values in all heads, and XLA does it once for
    all layers of a group.
    """
    n_lists, n_listed = blocks.shape
    bits = jnp.asarray(view.bits).reshape(n_lists, -1, view.bits.shape[1])
    owners = lax.reduce(bits, jnp.uint32(0), lax.bitwise_or, (1,))
    cell_pos, cell_seqs = view.cell_pos[blocks], view.cell_seqs[blocks]
    ours = jnp.any((cell_seqs & owners[:, None, None]) != 0, axis=3) & (cell_pos >= 0)
    low = jnp.min(jnp.where(ours, cell_pos, _BEYOND), axis=2)
    high = jnp.max(jnp.where(ours, cell_pos, -_BEYOND), axis=2)
    first = jnp.min(jnp.where(pos >= 0, pos, _BEYOND), axis=1)[:, None]
    last = jnp.max(pos, axis=1)[:, None]
    listed = jnp.arange(n_listed)[None] < jnp.asarray(n_blocks)[:, None]
    listed &= jnp.any(ours, axis=2) & _in_reach(rule, low, high, first, last)
    at = jnp.where(listed, jnp.cumsum(listed, axis=1, dtype=jnp.int32) - 1, n_listed)
    nth = jnp.arange(n_lists)[:, None]
    found = jnp.zeros((n_lists, n_listed), jnp.int32).at[nth, at].set(blocks, mode="drop")
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
    """Spans that RoPE rotates into each other, and where their first channels are in the tables."""

    a: Span
    b: Span
    table: int


@dataclasses.dataclass(frozen=True)
class Form:
    """How a kernel finds channel c of D of a key or value: bytes, bits and groups.

    Attributes:
      n_bytes: bytes of a quantized head (or its plain values); channel c is in c % n_bytes.
      bits: of a quantized channel; 0 for plain values.
      group: channels that share a scale; by channel all of a head, each with a scale of its own.
      affine: quantized values count from a minimum.
      cells: that share a scale, of keys by channel; 1 is a scale a cell.
    """

    n_bytes: int
    bits: int
    group: int
    affine: bool
    cells: int = 1

    @property
    def steps(self) -> tuple[int, int]:
        """Widths at which a span must be cut."""
        return self.n_bytes, self.group


def readable(kv: LayerKV) -> tuple[KVArray, KVArray]:
    """Keys and values of a layer as kernels read them; `attend` has parted keys by channel."""
    assert not isinstance(kv.k, PerChannel), "their tail is read apart, see channel_tail"
    return kv.k, kv.v


def form(x: KVArray, head_dim: int, channel_axis: int, *, by_channel: bool = False) -> Form:
    """The form of a layer's keys or values; `by_channel` is for kernels that know such scales.

    Raises:
      NoKernel: scales are not by cell and group of channels.
    """
    if not isinstance(x, Quantized):
        return Form(n_bytes=head_dim, bits=0, group=head_dim, affine=False)
    n_bytes, n_groups = x.codec.sizes(head_dim)
    if by_channel and x.codec.cells > 1:
        cells, affine = x.codec.cells, x.codec.affine
        return Form(n_bytes=n_bytes, bits=x.codec.bits, group=head_dim, affine=affine, cells=cells)
    wanted = list(x.data.shape)
    wanted[channel_axis] = n_groups
    if x.scale.shape != tuple(wanted):
        raise NoKernel(
            f"kernels read scales by cell and group of channels, {tuple(wanted)}; these are "
            f"{x.scale.shape}; use attention='chunked'"
        )
    return Form(
        n_bytes=n_bytes,
        bits=x.codec.bits,
        group=head_dim // n_groups,
        affine=x.codec.affine,
    )


def spans(form: Form, first: int, last: int) -> list[Span]:
    """Channels [first, last) cut where bytes, bits or groups end."""
    cuts = {c for step in form.steps for c in range(0, last, step) if first < c < last}
    edges = sorted({first, last} | cuts)
    return [Span(start, 1, stop - start) for start, stop in itertools.pairwise(edges)]


def pairs(form: Form, n_pairs: int, layout: str) -> list[Pair]:
    """Channels that RoPE rotates, cut where either of two partners meets an end.

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
