"""The kernel of `gpu`, traced by Pallas: what one program does, tile by tile.

Every array in it has sides that are powers of two, as Triton wants; what fills one up is masked
when it is loaded. How the work is cut, and why, stands in `gpu`.
"""

import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvrt.arrays import Array, Float
from kvrt.attention import softmax
from kvrt.attention.pallas import common
from kvrt.cells import mask
from kvrt.config import GroupSpec

# The least side of a tensor core's operand.
DOT = 16


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of a program's work: all powers of two but stages, the first two at least 16.

    Attributes:
      cells: of a tile.
      queries: of a tile, tokens times the query heads of a kv head.
      splits: parts of a block list that different programs read.
      warps: of a program.
      stages: how far ahead Triton loads, see `gpu`; None leaves that to the kernel.
    """

    cells: int
    queries: int
    splits: int
    warps: int = 4
    stages: int | None = None


class Shape(NamedTuple):
    """What is fixed when the kernel is traced."""

    tiling: Tiling
    group: GroupSpec
    block_size: int
    head_dim: int
    n_queries: int
    n_words: int
    keys: common.Form
    values: common.Form
    n_pairs: int
    layout: str


class Refs(NamedTuple):
    """Arrays in the GPU's memory; scales and tables only where there are any."""

    q: Any
    pos: Any
    bits: Any
    blocks: Any
    n_blocks: Any
    cell_pos: Any
    cell_seqs: Any
    k: Any
    v: Any
    k_scale: Any = None
    k_zero_point: Any = None
    v_scale: Any = None
    v_zero_point: Any = None
    cos: Any = None
    sin: Any = None


class _Tile(NamedTuple):
    """Some cells side by side: a block of each or of all, offsets in it, and which are listed."""

    block: Any
    offset: Any
    listed: Any

    def place(self, channels: Array, cells_axis: int) -> tuple[Any, Any, Any]:
        """Block, channel and offset of each entry of a tile of channels and cells."""
        block, offset = (
            x if jnp.ndim(x) == 0 else jnp.expand_dims(x, 1 - cells_axis)
            for x in (self.block, self.offset)
        )
        return block, jnp.expand_dims(channels, cells_axis), offset


def attend_split(shape: Shape, names: list[str], *refs: Any) -> None:
    """Softmax sums of some queries of a kv head over one split of a list's cells."""
    *inputs, m_ref, l_ref, acc_ref = refs
    at = Refs(**dict(zip(names, inputs, strict=True)))
    size = shape.tiling
    n_query_tiles = pl.cdiv(shape.n_queries, size.queries)
    nth, split = pl.program_id(2), pl.program_id(1)
    head, query_tile = pl.program_id(0) // n_query_tiles, pl.program_id(0) % n_query_tiles
    queries = query_tile * size.queries + jnp.arange(size.queries, dtype=jnp.int32)
    real = queries < shape.n_queries
    of = _Program(shape, at, nth, head, queries, real)

    n_blocks = at.n_blocks[nth]
    n_tiles = (n_blocks * shape.block_size + (size.cells - 1)) // size.cells
    each = (n_tiles + (size.splits - 1)) // size.splits
    first = split * each
    last = jnp.minimum(first + each, n_tiles)
    values = [jnp.zeros((size.queries, _padded(span.n)), jnp.float32) for span in of.value_spans]
    start = (
        jnp.full(size.queries, softmax.MASKED, jnp.float32),
        jnp.zeros(size.queries, jnp.float32),
        tuple(values),
    )
    m, total, acc = lax.fori_loop(first, last, functools.partial(of.step, n_blocks), start)
    plgpu.store(m_ref.at[nth, head, split, queries], m, mask=real)
    plgpu.store(l_ref.at[nth, head, split, queries], total, mask=real)
    for span, x in zip(of.value_spans, acc, strict=True):
        channels = _channels(span)
        plgpu.store(
            acc_ref.at[nth, head, split, queries[:, None], channels[None]],
            x,
            mask=real[:, None] & _within(span)[None],
        )


class _Program:
    """One program of the kernel while it is traced: its queries, and what it does to a tile."""

    def __init__(self, shape: Shape, at: Refs, nth: Any, head: Any, queries: Any, real: Any):
        """Loads the queries, once for all tiles."""
        self.shape, self.at, self.nth, self.head = shape, at, nth, head
        self.queries, self.real = queries, real
        self.pos = plgpu.load(at.pos.at[nth, queries], mask=real, other=-1)
        # A query of padding has no owner and sees nothing.
        self.bits = [
            plgpu.load(at.bits.at[nth, queries, w], mask=real, other=0)
            for w in range(shape.n_words)
        ]
        n_rotated = 2 * shape.n_pairs
        self.value_spans = _halves(common.spans(shape.values, 0, shape.head_dim))
        plain = _halves(common.spans(shape.keys, n_rotated, shape.head_dim))
        rotated = common.pairs(shape.keys, shape.n_pairs, shape.layout) if n_rotated else []
        self.plain = [(span, self._query(span)) for span in plain]
        self.rotated = [
            (pair, self._query(pair.a), self._query(pair.b)) for x in rotated for pair in _both(x)
        ]

    def _query(self, span: common.Span) -> Array:
        at = self.at.q.at[self.nth, self.head, self.queries[:, None], _channels(span)[None]]
        return plgpu.load(at, mask=self.real[:, None] & _within(span)[None], other=0)

    def step(self, n_blocks: Any, i: Any, carry: tuple) -> tuple:
        """The sums with tile i."""
        m, total, acc = carry
        tile = self._tile(i, n_blocks)
        sees = self._sees(tile)
        s = jnp.where(sees, self._scores(tile), softmax.MASKED)
        top = jnp.maximum(m, jnp.max(s, axis=1))
        # Not exp(0) where a query has seen nothing yet.
        p = jnp.where(sees, jnp.exp(s - top[:, None]), 0.0)
        old = jnp.exp(m - top)
        # What no query sees may hold anything, and 0 * NaN is NaN.
        some = jnp.max(sees.astype(jnp.int32), axis=0) > 0
        bytes_of: dict[common.Span, Array] = {}
        acc = tuple(
            x * old[:, None] + self._weighed(tile, span, p, some, bytes_of)
            for x, span in zip(acc, self.value_spans, strict=True)
        )
        return top, total * old + jnp.sum(p, axis=1), acc

    def _tile(self, i: Any, n_blocks: Any) -> _Tile:
        n, b = self.shape.tiling.cells, self.shape.block_size
        lane = jnp.arange(n, dtype=jnp.int32)
        # lax's quotients round to zero: jnp's look at signs, which hides from Triton that the cells
        # of a block lie side by side, and it would load them one by one.
        if b % n == 0:
            block = self.at.blocks[self.nth, lax.div(i, b // n)]
            return _Tile(block, lax.rem(i, b // n) * n + lane, None)
        cell = i * n + lane
        slot = lax.div(cell, jnp.full_like(cell, b))
        listed = slot < n_blocks
        block = plgpu.load(self.at.blocks.at[self.nth, slot], mask=listed, other=0)
        return _Tile(block, lax.rem(cell, jnp.full_like(cell, b)), listed)

    def _sees(self, tile: _Tile) -> Array:
        """Which cells of a tile each query sees."""
        pos = plgpu.load(self.at.cell_pos.at[tile.block, tile.offset])
        real = pos >= 0 if tile.listed is None else (pos >= 0) & tile.listed
        shared = []
        for w, bits in enumerate(self.bits):
            owners = plgpu.load(self.at.cell_seqs.at[tile.block, tile.offset, w])
            shared.append((owners[None] & bits[:, None]) != 0)
        ours = functools.reduce(operator.or_, shared) & real[None]
        return ours & mask.in_sight(self.shape.group.mask, pos[None], self.pos[:, None])

    def _scores(self, tile: _Tile) -> Array:
        """Scaled and capped scores of a tile's cells."""
        group = self.shape.group
        s = jnp.zeros((self.shape.tiling.queries, self.shape.tiling.cells), jnp.float32)
        bytes_of: dict[common.Span, Array] = {}
        for span, q in self.plain:
            if self.shape.keys.cells > 1:  # a scale a channel, so that none can be taken out
                s += _dot(q, self._key(tile, span, bytes_of), exact=q.dtype == jnp.float32)
                continue
            x = self._values(self.at.k, self.shape.keys, tile, span, bytes_of, cells_axis=1)
            part = _dot(q, x, exact=q.dtype == jnp.float32)
            scale, zero_point = self._scales(
                self.at.k_scale, self.at.k_zero_point, tile, span, keys=True
            )
            part = part if scale is None else part * scale[None]
            if zero_point is not None:
                part += jnp.sum(q.astype(jnp.float32), axis=1)[:, None] * zero_point[None]
            s += part
        for pair, qa, qb in self.rotated:
            a, b = (self._key(tile, span, bytes_of) for span in (pair.a, pair.b))
            cos, sin = (self._table(x, tile, pair) for x in (self.at.cos, self.at.sin))
            exact = qa.dtype == jnp.float32
            s += _dot(qa, a * cos - b * sin, exact) + _dot(qb, a * sin + b * cos, exact)
        s *= jnp.float32(group.score_scale)
        return softmax.capped(s, group.soft_cap)

    def _key(self, tile: _Tile, span: common.Span, bytes_of: dict) -> Array:
        """Some channels of a tile's keys, float32."""
        x = self._values(self.at.k, self.shape.keys, tile, span, bytes_of, cells_axis=1)
        x = x.astype(jnp.float32)
        if self.shape.keys.cells > 1:
            scale, zero_point = (
                self._of_channels(ref, tile, span)
                for ref in (self.at.k_scale, self.at.k_zero_point)
            )
            return x * scale + zero_point
        scale, zero_point = self._scales(
            self.at.k_scale, self.at.k_zero_point, tile, span, keys=True
        )
        x = x if scale is None else x * scale[None]
        return x if zero_point is None else x + zero_point[None]

    def _of_channels(self, ref: Any, tile: _Tile, span: common.Span) -> Array:
        """Scale or minimum of each channel of a span in the group of each cell."""
        block, channels, offset = tile.place(_channels(span), 1)
        group = lax.div(offset, jnp.full_like(offset, self.shape.keys.cells))
        found = _load(ref.at[block, self.head, channels, group], span, 1)
        return found.astype(jnp.float32)

    def _table(self, ref: Any, tile: _Tile, pair: common.Pair) -> Array:
        channels = pair.table + jnp.arange(_padded(pair.a.n), dtype=jnp.int32)
        return _load(ref.at[tile.place(channels, 1)], pair.a, 1)

    def _weighed(
        self, tile: _Tile, span: common.Span, p: Array, some: Array, bytes_of: dict
    ) -> Array:
        """Values of some channels, weighed and added up over a tile's cells."""
        x = self._values(self.at.v, self.shape.values, tile, span, bytes_of, cells_axis=0)
        scale, zero_point = self._scales(
            self.at.v_scale, self.at.v_zero_point, tile, span, keys=False
        )
        exact = self.at.q.dtype == jnp.float32
        if scale is None:
            return _dot(_like(p, x, exact), jnp.where(some[:, None], x, 0).astype(x.dtype), exact)
        found = _dot(_like(p * jnp.where(some, scale, 0.0)[None], x, exact), x, exact)
        if zero_point is not None:
            found += jnp.sum(p * jnp.where(some, zero_point, 0.0)[None], axis=1)[:, None]
        return found

    def _values(
        self,
        ref: Any,
        form: common.Form,
        tile: _Tile,
        span: common.Span,
        bytes_of: dict,
        cells_axis: int,
    ) -> Array:
        """Quantized or plain values of a span of channels, in the queries' type if that holds them.

        What lies in the same bytes is loaded once.
        """
        start = span.start % form.n_bytes
        key = common.Span(start, span.stride, span.n)
        if key not in bytes_of:
            block, channels, offset = tile.place(_channels(key), cells_axis)
            index = (channels, offset) if cells_axis else (offset, channels)
            bytes_of[key] = _load(ref.at[block, self.head, *index], span, cells_axis)
        x = bytes_of[key]
        if form.bits == 0:
            return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
        if form.bits < 8:
            x = x.astype(jnp.int32)
            shift = span.start // form.n_bytes * form.bits
            x = (x >> shift) & (2**form.bits - 1)
        half = self.at.q.dtype == jnp.bfloat16
        return x.astype(jnp.float32).astype(jnp.bfloat16 if half else jnp.float32)

    def _scales(
        self, scale: Any, zero_point: Any, tile: _Tile, span: common.Span, *, keys: bool
    ) -> tuple[Array | None, Array | None]:
        """Scale and minimum of a span's group in each cell."""
        form = self.shape.keys if keys else self.shape.values
        group = span.start // form.group

        def of(ref: Any) -> Array | None:
            if ref is None:
                return None
            index = (group, tile.offset) if keys else (tile.offset, group)
            return plgpu.load(ref.at[tile.block, self.head, *index]).astype(jnp.float32)

        return of(scale), of(zero_point)


def _halves(spans: list[common.Span]) -> list[common.Span]:
    """Spans cut to powers of two, the last of a span may be filled up to 16."""
    found = []
    for span in spans:
        start, n = span.start, span.n
        while n:
            part = n if n <= DOT else 1 << (n.bit_length() - 1)
            found.append(common.Span(start, span.stride, part))
            start, n = start + part * span.stride, n - part
    return found


def _both(pair: common.Pair) -> list[common.Pair]:
    """A pair of spans, both cut in halves."""
    parts = zip(_halves([pair.a]), _halves([pair.b]), strict=True)
    return [common.Pair(a, b, pair.table + (a.start - pair.a.start) // a.stride) for a, b in parts]


def power(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _padded(n: int) -> int:
    return max(DOT, power(n))


def _channels(span: common.Span) -> Array:
    return span.start + span.stride * jnp.arange(_padded(span.n), dtype=jnp.int32)


def _within(span: common.Span) -> Array:
    return jnp.arange(_padded(span.n), dtype=jnp.int32) < span.n


def _load(at: Any, span: common.Span, cells_axis: int) -> Array:
    """A tile of some channels; what fills it up to a power of two is zero."""
    if span.n == _padded(span.n):
        return plgpu.load(at)
    return plgpu.load(at, mask=jnp.expand_dims(_within(span), cells_axis), other=0)


def _like(p: Array, x: Array, exact: bool) -> Array:
    """Weights in the type in which they are multiplied with x."""
    return p if exact or x.dtype == jnp.float32 else p.astype(x.dtype)


def _dot(a: Array, b: Array, exact: bool) -> Float[Array, "P _"]:
    if a.dtype == b.dtype and a.dtype != jnp.float32:
        return jnp.dot(a, b, preferred_element_type=jnp.float32)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)
