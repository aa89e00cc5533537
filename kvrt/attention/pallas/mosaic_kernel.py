"""The kernel of `mosaic`, traced by Pallas: what one program does, tile by tile.

Register layouts and swizzles of shared memory are not written down: Mosaic GPU infers them from the
products. Arrays keep one shape throughout, [queries, cells] or [queries, channels], for a row or a
column is of another layout than a matrix with a side of one.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from kvrt.arrays import Array, Float
from kvrt.attention import softmax
from kvrt.attention.pallas import common
from kvrt.cells import mask
from kvrt.config import GroupSpec

# Much of it came with JAX 0.11, and type checkers see the JAX that is installed.
plgpu: Any = mosaic_gpu

# Names of the grid's axes.
AXES = ("head", "split", "list")
# The upper half of a float32: a bfloat16, rounded towards zero.
_UPPER = -(1 << 16)


class TileSizes(NamedTuple):
    """Sizes of a program's work.

    Attributes:
      cells: of a tile, a multiple of 32 that divides a block.
      queries: of a tile, 16, 32 or 64.
      splits: parts of a block list that different programs read.
      stages: tiles that are copied or worked on at a time.
    """

    cells: int
    queries: int
    splits: int
    stages: int


class Traced(NamedTuple):
    """What is fixed when the kernel is traced.

    Attributes:
      tiling: sizes of a program's work.
      group: the layers' mask, scale and soft cap.
      head_dim: channels of a head.
      block_size: cells of a block.
      n_query_tiles: tiles of a kv head's queries.
      n_words: words of owners, of a cell and of a query.
      keys: how a key's channels are found.
      values: how a value's are.
      k_type: in which queries and keys are multiplied.
      v_type: in which weights and values are.
      exact: whether float32 weights are kept.
      interpret: whether a GPU is simulated, which has no `mma`.
    """

    tiling: TileSizes
    group: GroupSpec
    head_dim: int
    block_size: int
    n_query_tiles: int
    n_words: int
    keys: common.Form
    values: common.Form
    k_type: Any
    v_type: Any
    exact: bool
    interpret: bool


class Inputs(NamedTuple):
    """Arrays in the GPU's memory; scales only where there are any."""

    q: Any
    pos: Any
    bits: Any
    blocks: Any
    n_blocks: Any
    cells: Any
    k: Any
    v: Any
    k_scale: Any = None
    v_scale: Any = None


class Scratch(NamedTuple):
    """Shared memory that a program writes itself.

    Attributes:
      weights: of a tile's cells, by terms. In the first product each warp has some of the cells, in
        the second some of the channels.
      seen: of each cell of a tile, whether some query sees it; it changes hands likewise.
      k: a tile's keys in the type of a product, by terms; None where they have it as they are.
      v: its values, likewise.
    """

    weights: Any
    seen: Any
    k: Any = None
    v: Any = None


def sum_split(shape: Traced, names: list[str], *refs: Any, **scratch: Any) -> None:
    """Softmax sums of some queries of a kv head over one split of a list's tiles."""
    *inputs, m_ref, l_ref, acc_ref = refs
    at = Inputs(**dict(zip(names, inputs, strict=True)))
    program = _Program(shape, at, Scratch(**scratch))
    size, at = shape.tiling, (program.nth, program.head, program.split)
    start = (
        jnp.full((size.queries,), softmax.MASKED, jnp.float32),
        jnp.zeros((size.queries,), jnp.float32),
        tuple(jnp.zeros((size.queries, x.n), jnp.float32) for x in program.value_spans),
    )
    m, total, acc = program.all_tiles(start)
    m_ref[*at, program.queries] = m
    l_ref[*at, program.queries] = total
    for span, x in zip(program.value_spans, acc, strict=True):
        acc_ref[*at, program.queries, _channels(span)] = x


class _Program:
    """One program of the kernel while it is traced: its queries, and what it does to a tile."""

    def __init__(self, shape: Traced, at: Inputs, scratch: Scratch):
        """Loads the queries, once for all tiles."""
        self.shape, self.at, self.scratch = shape, at, scratch
        size = shape.tiling
        both, self.split, self.nth = (lax.axis_index(x) for x in AXES)
        self.head = lax.div(both, shape.n_query_tiles)
        self.queries = _slice(lax.rem(both, shape.n_query_tiles) * size.queries, size.queries)
        self.pos = self._wide(_load(at.pos.at[self.nth, self.queries]), 0)
        # A query of padding has no owner and sees nothing.
        self.bits = [
            self._wide(_load(at.bits.at[self.nth, w, self.queries]), 0)
            for w in range(shape.n_words)
        ]
        self.value_spans = common.spans(shape.values, 0, shape.head_dim)
        self.key_spans = [(x, self._query(x)) for x in common.spans(shape.keys, 0, shape.head_dim)]
        per_block = shape.block_size // size.cells
        n_tiles = at.n_blocks[self.nth] * per_block
        each = lax.div(n_tiles + (size.splits - 1), size.splits)
        self.first = self.split * each
        self.n_tiles = jnp.maximum(jnp.minimum(each, n_tiles - self.first), 0)

    def _query(self, span: common.Span) -> list[Array]:
        q = _load(self.at.q.at[self.nth, self.head, self.queries, _channels(span)])
        return _terms(q, self.shape.k_type)

    def _wide(self, x: Array, axis: int, n: int | None = None) -> Array:
        """Values of queries (axis 0) or cells (axis 1) for all cells, or n channels, or queries."""
        size = self.shape.tiling
        return lax.broadcast_in_dim(x, (size.queries, n or size.cells), (axis,))

    def all_tiles(self, start: tuple) -> tuple:
        """Sums over the tiles of this split, copied ahead by the pipeline of Pallas."""
        shape, size = self.shape, self.shape.tiling
        n_cells = self.at.cells.shape[2]
        heads, none = (None, None), (None, None)

        def spec(block: tuple, index: Any) -> Any:
            return plgpu.BlockSpec(block, lambda i: index(*self._place(i)))

        pipeline = plgpu.emit_pipeline(
            self._step,
            grid=(self.n_tiles,),
            in_specs=[
                spec((*none, n_cells), lambda block, tile: (block, tile, 0)),
                spec(
                    (*heads, shape.head_dim, size.cells),
                    lambda block, tile: (block, self.head, 0, tile),
                ),
                spec(
                    (*heads, size.cells, shape.head_dim),
                    lambda block, tile: (block, self.head, tile, 0),
                ),
            ],
            max_concurrent_steps=size.stages,
            init_carry=start,
        )
        return pipeline(self.at.cells, self.at.k, self.at.v)

    def _place(self, i: Array) -> tuple[Array, Array]:
        """Block of tile i of this split, and which tile of that block it is."""
        tile = self.first + i
        per_block = self.shape.block_size // self.shape.tiling.cells
        return self.at.blocks[self.nth, lax.div(tile, per_block)], lax.rem(tile, per_block)

    def _step(self, indices: tuple[Array], cells: Any, k: Any, v: Any, carry: tuple) -> tuple:
        """The sums with one more tile."""
        m, total, acc = carry
        place = self._place(indices[0])
        sees = self._sees(cells)
        s = jnp.where(sees, self._scores(place, k), softmax.MASKED)
        top = jnp.maximum(m, jnp.max(s, axis=1))
        # Not exp(0) where a query has seen nothing yet.
        p = jnp.where(sees, jnp.exp(s - self._wide(top, 0)), 0.0)
        old = jnp.exp(m - top)
        # What no query sees may hold anything, and 0 * NaN is NaN.
        self.scratch.seen[...] = jnp.max(jnp.where(sees, 1.0, 0.0), axis=0)
        self._widen_values(v)
        acc = tuple(
            self._weighed(place, v, span, p, x * self._wide(old, 0, span.n))
            for x, span in zip(acc, self.value_spans, strict=True)
        )
        return top, total * old + jnp.sum(p, axis=1), acc

    def _sees(self, cells: Any) -> Array:
        """Which cells of a tile each query sees."""
        n = self.shape.tiling.cells
        pos, *owners = (
            self._wide(cells[_slice(w * n, n)], 1) for w in range(1 + self.shape.n_words)
        )
        shared = [(x & bits) != 0 for x, bits in zip(owners, self.bits, strict=True)]
        ours = functools.reduce(operator.or_, shared) & (pos >= 0)
        return ours & mask.in_sight(self.shape.group.mask, pos, self.pos)

    def _scores(self, place: tuple, k: Any) -> Array:
        """Scaled and capped scores of a tile's cells."""
        shape, (block, tile) = self.shape, place
        cells = _slice(tile * shape.tiling.cells, shape.tiling.cells)
        s = jnp.zeros((shape.tiling.queries, shape.tiling.cells), jnp.float32)
        held = self.scratch.k
        if held is not None:
            _store_terms(held, _rows(k))
        for span, q in self.key_spans:
            at = _channels(span)
            x = _terms(_values(k[at]), shape.k_type) if held is None else _each(held, at)
            if self.at.k_scale is None:
                s = self._product(s, q, x)
                continue
            group = span.start // shape.keys.group
            scale = _load(self.at.k_scale.at[block, self.head, group, cells])
            part = self._product(jnp.zeros_like(s), q, x)
            s += part * self._wide(scale.astype(jnp.float32), 1)
        return softmax.capped(s * jnp.float32(shape.group.score_scale), shape.group.soft_cap)

    def _widen_values(self, v: Any) -> None:
        """Writes a tile's values as terms, if they are multiplied as such."""
        if self.scratch.v is not None:
            x = _rows(v)
            _store_terms(self.scratch.v, x if self.at.v_scale is not None else self._real(x))

    def _real(self, x: Array) -> Array:
        """Values of a tile's cells without those that no query sees."""
        x = _values(x)
        seen = lax.broadcast_in_dim(self.scratch.seen[...] > 0, x.shape, (0,))
        return jnp.where(seen, x, jnp.zeros_like(x))

    def _weighed(self, place: tuple, v: Any, span: common.Span, p: Array, start: Array) -> Array:
        """The sum `start` and values of some channels, weighed and added up over a tile."""
        shape, held, at = self.shape, self.scratch.v, _channels(span)
        if self.at.v_scale is not None:
            p = p * self._wide(self._value_scale(place, span), 1)
        for i, term in enumerate(_terms(p, shape.v_type) if shape.exact else [p]):
            self.scratch.weights[i] = term.astype(shape.v_type)
        if held is None:
            x = _terms(self._real(v[:, at]), shape.v_type)
        else:
            x = _each(held, slice(None), at)
        return self._product(start, _each(self.scratch.weights), x)

    def _value_scale(self, place: tuple, span: common.Span) -> Array:
        """Scales of a tile's cells, 0 where no query sees one."""
        (block, tile), n = place, self.shape.tiling.cells
        group = span.start // self.shape.values.group
        scale = _load(self.at.v_scale.at[block, self.head, group, _slice(tile * n, n)])
        return jnp.where(self.scratch.seen[...] > 0, scale.astype(jnp.float32), 0.0)

    def _product(self, s: Array, a: list[Array], b: list[Array]) -> Float[Array, "P _"]:
        """The sum s with a times b, both given by terms, the greatest first."""
        n = max(len(a), len(b))
        for i, x in enumerate(a):
            for y in b[: n - i]:
                s = _dot(s, x, y) if self.shape.interpret else plgpu.mma(s, x, y)
        return s


def _dot(s: Array, a: Array, b: Array) -> Array:
    """What `mma` does, by XLA."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return s + jnp.dot(a, b, precision=lax.Precision.HIGHEST)


def n_terms(dtype: Any, kind: Any) -> int:
    """How many of a product's operands add up to any value of a type."""
    of = {kind: 1, jnp.dtype(jnp.int8): 1, jnp.dtype(jnp.float16): 2, jnp.dtype(jnp.float32): 3}
    return of[jnp.dtype(dtype)]


def _terms(x: Array, kind: Any) -> list[Array]:
    """What adds up to x, each in the type of a product's operands, the greatest first.

    Eight bits of a float32's 24 a term: what is cut off is exact, so three of them are x.
    """
    kind = jnp.dtype(kind)
    if x.dtype == kind:
        return [x]
    rest, found = x.astype(jnp.float32), []
    for _ in range(n_terms(x.dtype, kind)):
        bits = lax.bitcast_convert_type(rest, jnp.int32) & jnp.int32(_UPPER)
        upper = lax.bitcast_convert_type(bits, jnp.float32)
        found.append(upper.astype(kind))
        rest = rest - upper
    return found


def _store_terms(held: Any, x: Array) -> None:
    for i, term in enumerate(_terms(x, held.dtype)):
        held[i] = term


def _rows(tile: Any) -> Array:
    """A tile in registers that hold neighbours of a row, as it lies in shared memory."""
    return plgpu.load(tile, layout=plgpu.Layout.MMA_ACC(jnp.bfloat16, m_warps=1), optimized=False)


def _each(held: Any, *at: Any) -> list[Array]:
    return [held[i, *at] for i in range(held.shape[0])]


def _values(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def _load(at: Any) -> Array:
    """A few values from the GPU's memory, once or a tile."""
    return plgpu.load(at, optimized=False)


def _channels(span: common.Span) -> Any:
    return _slice(span.start, span.n)


def _slice(start: Any, n: int) -> Any:
    return pl.ds(start, n)
