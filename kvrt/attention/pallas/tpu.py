"""Attention over block lists on TPUs: one Pallas kernel, lowered by Mosaic.

- The grid is (lists, groups of heads, tiles of queries, passes); the number of passes is a runtime
  value, so one program serves every length. The block lists are prefetched into scalar memory,
  and each pass's copies are addressed by them: Mosaic's pipeline loads the next pass's blocks while
  this one's are in use. A list that has ended asks for the same block again, which is not copied
  again.
- A pass takes one block of all heads of a group (up to 1 MiB of keys and values each, so that two
  in flight leave vector memory free), or several small blocks: the same arrays are handed over as
  often as there are blocks in a pass, each with an index of its own. A copy is then long enough to
  hide what a pass costs.
- Channels lie on sublanes and cells on lanes in a block of keys, as the store has them, so neither
  product needs a transposed tile; all queries of a kv head share one tile.
- A core takes the passes one after the other, so splits of a list would gain nothing; on chips of
  two cores lists and heads are divided among them (`parallel`).
- XLA lays out arrays on TPUs so that little is padded to 128 lanes: values of heads of 64, and
  scales of values, have their cells there. They are handed over as such (`swapaxes`, which moves
  nothing then), or XLA would copy a whole layer of the cache in each step.
- int8 values are never expanded: a group's scale goes onto its scores, or onto its weights.
- Unrotated keys are rotated in registers, by halves ("neox") along the sublanes; int8 ones are
  numbers again first.

Numbers: as in `gpu`; dots of float32 are exact (`Precision.HIGHEST`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvrt.arrays import AnyArray, Array, Float
from kvrt.attention import softmax
from kvrt.attention.pallas import common, tiles
from kvrt.attention.types import LayerAttention, LayerKV
from kvrt.cells import mask
from kvrt.config import GroupSpec
from kvrt.store.codec import KVArray, Quantized

# Bytes of the keys, or of the values, of one pass.
_PASS_BYTES = 1024 * 1024
# Cells of a pass where blocks are smaller, and how many blocks that may be at most.
_PASS_CELLS, _PASS_BLOCKS = 128, 8
# Lanes of a vector register.
_LANES = 128
# Queries of a tile, as high as the matrix unit.
_QUERIES = 128
# Sizes that a table of measured ones may name.
SIZES = ("pass_bytes", "queries")


class _Shape(NamedTuple):
    """What is fixed when the kernel is traced."""

    group: GroupSpec
    head_dim: int
    n_heads: int
    n_side: int
    n_words: int
    keys: common.Form
    values: common.Form
    n_pairs: int
    swapped: bool
    names: tuple[str, ...]


def kernel(*, interpret: bool = False, table: tiles.Table | None = None) -> common.Kernel:
    """The kernel, for attention; `interpret` and `table` as in `sums`."""
    return common.Kernel(
        sums=functools.partial(sums, interpret=interpret, table=table),
        traits={"kernel": "", "TPU kernel": ""},
    )


def sums(
    work: common.KernelWork,
    kv: LayerKV,
    how: LayerAttention,
    *,
    interpret: bool = False,
    table: tiles.Table | None = None,
) -> common.Sums:
    """See `common.SumsOf`.

    Args:
      work: as there.
      kv: as there; neither f16 nor less than eight bits.
      how: as there; RoPE of cached keys must be of the layout "neox".
      interpret: runs the kernel's program as XLA operations, on any device: for tests.
      table: of measured sizes, in place of the one that kvrt comes with.

    Raises:
      BadConfig: the table has sizes that this kernel does not know.
    """
    n_lists, n_kv, p, d = work.q.shape
    rotates = how.rope is not None and how.rope.cells
    found = {} if rotates else tiles.measured_sizes("tpu", work, *common.readable(kv), table)
    tiles.check_names(found, SIZES)
    shape, blocked = _shape(work, kv, how, found.get("pass_bytes", _PASS_BYTES))
    n_side, n_queries = shape.n_side, min(found.get("queries", _QUERIES), -(-p // 16) * 16)
    n_pad = -p % n_queries
    q = jnp.pad(work.q, ((0, 0), (0, 0), (0, n_pad), (0, 0)))
    pos = jnp.pad(work.pos, ((0, 0), (0, n_pad)), constant_values=-1)
    bits = jnp.pad(work.bits, ((0, 0), (0, n_pad), (0, 0)))
    n_passes = (jnp.max(work.n_blocks) + (n_side - 1)) // n_side
    # One pass at least, in which empty lists write their empty sums.
    found = (n_lists, n_kv, p + n_pad)
    grid = (n_lists, n_kv // shape.n_heads, found[2] // n_queries, jnp.maximum(n_passes, 1))
    m, total, acc = pl.pallas_call(
        functools.partial(_kernel, shape),
        grid_spec=_grid_spec(shape, grid, n_queries, blocked),
        out_shape=[jax.ShapeDtypeStruct((*found, n), jnp.float32) for n in (1, 1, d)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="attend_blocks",
    )(
        *(_padded_lists(work.blocks, n_side), work.n_blocks, q, pos[..., None], bits),
        *(x for x in blocked.values() for _ in range(n_side)),
    )
    one = jnp.expand_dims  # a single split
    return common.Sums(
        m=one(m[:, :, :p, 0], 2), l=one(total[:, :, :p, 0], 2), acc=one(acc[:, :, :p], 2)
    )


def _shape(
    work: common.KernelWork, kv: LayerKV, how: LayerAttention, pass_bytes: int
) -> tuple[_Shape, dict[str, AnyArray]]:
    """How the work is cut, and the arrays that are read block by block."""
    d, b = work.q.shape[3], work.cell_pos.shape[1]
    keys, values = common.readable(kv)
    tables = how.rope and how.rope.cells
    n_side = max(1, min(_PASS_BLOCKS, _PASS_CELLS // b))
    swapped = d % _LANES != 0 and b % _LANES == 0
    blocked = _blocked(work, keys, values, tables, swapped)
    shape = _Shape(
        group=how.group,
        head_dim=d,
        n_heads=_heads(keys, values, n_side, pass_bytes),
        n_side=n_side,
        n_words=work.bits.shape[2],
        keys=common.form(keys, d, -2),
        values=common.form(values, d, -1),
        n_pairs=tables[0].shape[1] if tables else 0,
        swapped=swapped,
        names=tuple(blocked),
    )
    return shape, blocked


def _grid_spec(
    shape: _Shape, grid: tuple, n_queries: int, blocked: dict[str, AnyArray]
) -> pltpu.PrefetchScalarGridSpec:
    """Which part of each array a program of the grid is given."""
    n_heads, n_side = shape.n_heads, shape.n_side

    def of_queries(n: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, n_heads, n_queries, n), lambda i, h, t, j, *_: (i, h, t, 0))

    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=grid,
        in_specs=[
            of_queries(shape.head_dim),
            pl.BlockSpec((1, n_queries, 1), lambda i, h, t, j, *_: (i, t, 0)),
            pl.BlockSpec((1, n_queries, shape.n_words), lambda i, h, t, j, *_: (i, t, 0)),
            *(_spec(x, n_heads, n_side, i) for x in blocked.values() for i in range(n_side)),
        ],
        out_specs=[of_queries(1), of_queries(1), of_queries(shape.head_dim)],
        scratch_shapes=[],
    )


def _heads(keys: KVArray, values: KVArray, n_side: int, pass_bytes: int) -> int:
    """Kv heads of a pass: as many as fit, in equal groups."""
    arrays = [x.data if isinstance(x, Quantized) else x for x in (keys, values)]
    n_kv = arrays[0].shape[1]
    each = max(n_side * x.shape[2] * x.shape[3] * x.dtype.itemsize for x in arrays)
    return max(n for n in range(1, n_kv + 1) if n_kv % n == 0 and n * each <= max(pass_bytes, each))


def _padded_lists(blocks: Array, n_side: int) -> Array:
    return jnp.pad(blocks, ((0, 0), (0, -blocks.shape[1] % n_side)))


def _blocked(
    work: common.KernelWork,
    keys: KVArray,
    values: KVArray,
    tables: tuple[Array, Array] | None,
    swapped: bool,
) -> dict[str, AnyArray]:
    """Arrays with blocks on their first axis, by what they are; scales have cells on the last."""
    found: dict[str, AnyArray] = {
        "pos": work.cell_pos[:, None],
        "owners": jnp.swapaxes(work.cell_seqs, 1, 2),
    }
    found["k"] = keys.data if isinstance(keys, Quantized) else keys
    if isinstance(keys, Quantized):
        found["k_scale"] = keys.scale
    plain = values.data if isinstance(values, Quantized) else values
    found["v"] = jnp.swapaxes(plain, 2, 3) if swapped else plain
    if isinstance(values, Quantized):
        found["v_scale"] = jnp.swapaxes(values.scale, 2, 3)
    if tables:
        found["cos"], found["sin"] = tables
    return found


def _spec(x: AnyArray, n_heads: int, n_side: int, side: int) -> pl.BlockSpec:
    """Which block of an array is copied for the side-th place of a pass."""
    by_head = x.ndim == 4

    def index(i: Any, h: Any, t: Any, j: Any, blocks: Any, n_blocks: Any) -> tuple:
        last = jnp.maximum(n_blocks[i] - 1, 0)
        block = blocks[i, jnp.minimum(j * n_side + side, last)]
        return (block, h, 0, 0) if by_head else (block, 0, 0)

    return pl.BlockSpec((1, n_heads, *x.shape[2:]) if by_head else (1, *x.shape[1:]), index)


def _kernel(shape: _Shape, blocks: Any, n_blocks: Any, *refs: Any) -> None:
    """Adds the blocks of one pass to the sums of a list's queries."""
    q_ref, pos_ref, bits_ref, *inputs, m_ref, l_ref, acc_ref = refs
    pass_, nth = pl.program_id(3), pl.program_id(0)

    @pl.when(pass_ == 0)
    def _start() -> None:
        m_ref[...] = jnp.full(m_ref.shape, softmax.MASKED, jnp.float32)
        l_ref[...] = jnp.zeros(l_ref.shape, jnp.float32)
        acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

    for side in range(shape.n_side):
        held = dict(zip(shape.names, inputs[side :: shape.n_side], strict=True))

        @pl.when(pass_ * shape.n_side + side < n_blocks[nth])
        def _add(held: dict[str, Any] = held) -> None:
            sees = _sees(shape, held, pos_ref[0], bits_ref[0])
            for h in range(shape.n_heads):
                part = m_ref[0, h], l_ref[0, h], acc_ref[0, h]
                found = _added(shape, held, h, q_ref[0, h], sees, part)
                m_ref[0, h], l_ref[0, h], acc_ref[0, h] = found


def _sees(shape: _Shape, held: dict[str, Any], pos: Array, bits: Array) -> Array:
    """Which cells of a block each query sees."""
    k_pos = held["pos"][0]
    sees = (k_pos >= 0) & mask.in_sight(shape.group.mask, k_pos, pos)
    shares = None
    for w in range(shape.n_words):
        word = (held["owners"][0, w : w + 1] & bits[:, w : w + 1]) != 0
        shares = word if shares is None else shares | word
    return sees & shares


def _added(
    shape: _Shape, held: dict[str, Any], h: int, q: Array, sees: Array, part: tuple
) -> tuple[Array, Array, Array]:
    """Sums of one kv head with one more block."""
    m, total, acc = part
    s = jnp.where(sees, _scores(shape, held, h, q), softmax.MASKED)
    top = jnp.maximum(m, jnp.max(s, axis=1, keepdims=True))
    p = jnp.where(sees, jnp.exp(s - top), 0.0)
    old = jnp.exp(m - top)
    return (
        top,
        total * old + jnp.sum(p, axis=1, keepdims=True),
        acc * old + _weighed(shape, held, h, p, sees, q.dtype),
    )


def _scores(shape: _Shape, held: dict[str, Any], h: int, q: Array) -> Array:
    group, d = shape.group, shape.head_dim
    s = jnp.zeros((q.shape[0], held["k"].shape[3]), jnp.float32)
    n = shape.n_pairs
    for pair in common.pairs(shape.keys, n, "neox") if n else ():
        rows = slice(pair.table, pair.table + pair.a.n)
        cos, sin = held["cos"][0, rows], held["sin"][0, rows]
        a, b = (_dequantized(shape, held, h, span) for span in (pair.a, pair.b))
        s += _dot(q[:, _channels(pair.a)], a * cos - b * sin)
        s += _dot(q[:, _channels(pair.b)], a * sin + b * cos)
    for span in common.spans(shape.keys, 2 * n, d):
        at = _channels(span)
        part = _dot(q[:, at], _plain(held["k"][0, h, at]))
        s += part if "k_scale" not in held else part * _key_scale(shape, held, h, span)
    s *= jnp.float32(group.score_scale)
    return softmax.capped(s, group.soft_cap)


def _channels(span: common.Span) -> slice:
    return slice(span.start, span.start + span.n)


def _key_scale(shape: _Shape, held: dict[str, Any], h: int, span: common.Span) -> Array:
    """The scale of each cell, for channels of one group: [1, B]."""
    g = span.start // shape.keys.group
    return held["k_scale"][0, h, g : g + 1].astype(jnp.float32)


def _dequantized(shape: _Shape, held: dict[str, Any], h: int, span: common.Span) -> Array:
    """Some channels of a block's keys, times their scales; a rotation joins two of them."""
    x = _plain(held["k"][0, h, _channels(span)]).astype(jnp.float32)
    return x * _key_scale(shape, held, h, span) if "k_scale" in held else x


def _weighed(
    shape: _Shape, held: dict[str, Any], h: int, p: Array, sees: Array, dtype: Any
) -> Array:
    """Values of a block, weighed and added up; what no query sees may hold anything."""
    v = _plain(held["v"][0, h])
    some = jnp.max(sees.astype(jnp.float32), axis=0, keepdims=True) > 0
    if "v_scale" not in held:
        v = jnp.where(some if shape.swapped else _column(some), v.astype(jnp.float32), 0.0)
        v = v.astype(held["v"].dtype if held["v"].dtype != jnp.uint16 else jnp.bfloat16)
    parts = []
    for span in common.spans(shape.values, 0, shape.head_dim):
        at, weights = slice(span.start, span.start + span.n), p
        if "v_scale" in held:
            g = span.start // shape.values.group
            scale = held["v_scale"][0, h, g : g + 1].astype(jnp.float32)
            weights = p * jnp.where(some, scale, 0.0)
        weights = weights.astype(dtype) if v.dtype != jnp.float32 else weights
        parts.append(_dot(weights, v[at] if shape.swapped else v[:, at], swapped=shape.swapped))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _column(flags: Array) -> Array:
    """Flags of cells as a column; by a product, for flags have no transpose."""
    ones = jnp.ones((1, 1), jnp.float32)
    return lax.dot_general(flags.astype(jnp.float32), ones, (((0,), (1,)), ((), ()))) > 0


def _plain(x: Array) -> Array:
    """Stored values as floats; quantized ones as integers."""
    if x.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x, jnp.bfloat16)
    return x


def _dot(a: Array, b: Array, *, swapped: bool = False) -> Float[Array, "P _"]:
    """The product of a with b, or with b transposed, in float32."""
    axes = (((1,), (1,) if swapped else (0,)), ((), ()))
    if a.dtype == jnp.bfloat16 and b.dtype in (jnp.bfloat16, jnp.int8):
        b, precision = b.astype(jnp.float32).astype(jnp.bfloat16), None
    else:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        precision = lax.Precision.HIGHEST
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)
