"""Attention over block lists on GPUs: one Pallas kernel, lowered by Triton (CUDA and ROCm).

Decoding reads every key and value once and computes little, so the kernel is made for the bus.

- A program has one block list, one kv head, up to `Tiling.queries` of its queries and one split
  of the list's cells. All query heads of a kv head lie in one tile, padded to the 16 rows a tensor
  core takes, so K and V come from memory once for all of them; the padding costs arithmetic only.
- Cells come `Tiling.cells` at a time, 8 or 16 KiB of K and V, of which two are in flight while a
  third is worked on (`num_stages`). For a decoded token that leaves three programs or more on a
  multiprocessor, with no register spilled (float32 keys and values with heads of 256: two), as
  `scripts/gpu_code.py` finds for sm_90. Where a block is smaller, a tile takes its cells from
  several: the address of a cell is its block's, read from the list, and its offset; runs of a block
  stay wide loads.
- The loop's bound is a runtime scalar: one program of machine code serves every length. There is
  no branch in the loop, which would keep Triton from loading ahead; blocks that hold nothing for a
  list's queries leave it before (`common`), and what a query may see of the others is decided by
  positions and owners here: 4 (1 + W) bytes a cell.
- Splits (flash-decoding) fill the multiprocessors where lists and heads do not; each writes its
  sums. Where a list has one token, a second small kernel makes attention of them (`gpu_end`).
- Quantized values are never expanded: a score over a group's channels is the dot of q with the
  integers, times the cell's scale; a value's scale goes into the weight of its cell. That is 16
  products a cell and group in place of one a channel. A byte of several integers is loaded once;
  each part of it is a dot with the channels that lie there.
- Unrotated keys are rotated in registers: q1 . (k1 cos - k2 sin) + q2 . (k2 cos + k1 sin). Cells
  lie side by side in a channel, so pairs of neighbours ("norm") are as good as halves ("neox"). The
  tables are another 4 D bytes a cell, which the programs of other heads find in L2.

Numbers: scores, weights and sums are float32. Where q and the cache are of the same half type, dots
take them as they are, and weights are rounded to that type. Else both sides are float32: exact
(`Precision.HIGHEST`) if q is float32, and TF32 if q is of a half type, which loses nothing of such
a q, of f16 or bf16 values or of integers; rotated keys and weights are rounded to it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvrt.arrays import Array
from kvrt.attention.pallas import common, gpu_end, tiles
from kvrt.attention.pallas import gpu_kernel as gpu
from kvrt.attention.types import LayerAttention, LayerKV
from kvrt.store.codec import KVArray, Quantized

# Programs that fill the largest GPUs of today (about 130 multiprocessors) several times over.
_N_PROGRAMS = 1024
# Sizes that a table of measured ones may name: those of `Tiling`, for splits how many programs
# they shall make at least, so that one entry serves any number of sequences.
SIZES = ("cells", "queries", "programs", "warps", "stages")


def kernel(
    *,
    interpret: bool = False,
    tiling: gpu.Tiling | None = None,
    table: tiles.Table | None = None,
) -> common.Kernel:
    """The kernel, for attention; `interpret`, `tiling` and `table` as in `sums`."""
    return common.Kernel(
        sums=functools.partial(sums, interpret=interpret, tiling=tiling, table=table),
        traits={"kernel": ""},
        end=functools.partial(gpu_end.end, interpret=interpret),
    )


def choose_tiling(
    work: common.KernelWork,
    keys: KVArray,
    values: KVArray,
    table_bytes: int = 0,
    measured: tiles.Sizes | None = None,
) -> gpu.Tiling:
    """Sizes for the shapes of some work; nothing here depends on how much is cached.

    Args:
      work: block lists with their queries.
      keys: of the layer.
      values: of the layer.
      table_bytes: what rotates a cached key, for each cell.
      measured: of `SIZES`, in place of what follows from shapes alone.

    Raises:
      BadConfig: measured ones that this kernel does not know.
    """
    measured = measured or {}
    tiles.check_names(measured, SIZES)
    n_lists, n_kv, p, d = work.q.shape
    each = sum(_cell_bytes(x, d) for x in (keys, values)) + table_bytes
    n_bytes = min(_tile_bytes(x, d) for x in (keys, values))
    cells = min(128, max(gpu.DOT, gpu.power(n_bytes // each + 1) // 2))
    cells = measured.get("cells", cells)
    # Their sums stay in registers: 64 queries with heads of 128 take half of them.
    most = min(64, max(gpu.DOT, 8192 // gpu.power(d)))
    queries = min(measured.get("queries", most), max(gpu.DOT, gpu.power(p)))
    n_tiles = pl.cdiv(work.blocks.shape[1] * work.cell_pos.shape[1], cells)
    n_unsplit = n_lists * n_kv * pl.cdiv(p, queries)
    splits, n_programs = 1, measured.get("programs", _N_PROGRAMS)
    while splits * 2 <= n_tiles and splits * 2 * n_unsplit <= n_programs:
        splits *= 2
    return gpu.Tiling(
        cells=cells,
        queries=queries,
        splits=splits,
        warps=measured.get("warps", 4),
        stages=measured.get("stages"),
    )


def _tile_bytes(x: KVArray, head_dim: int) -> int:
    """Bytes of a tile's keys and values; several scales a head take a product each."""
    several = isinstance(x, Quantized) and x.codec.sizes(head_dim)[1] > 1
    return (8 if several else 16) * 1024


def _cell_bytes(x: KVArray, head_dim: int) -> int:
    """About the bytes of a cell and head; scales do not count."""
    if isinstance(x, Quantized):
        return head_dim * x.codec.bits // 8
    return head_dim * x.dtype.itemsize


def sums(
    work: common.KernelWork,
    kv: LayerKV,
    how: LayerAttention,
    *,
    interpret: bool = False,
    tiling: gpu.Tiling | None = None,
    table: tiles.Table | None = None,
) -> common.Sums:
    """See `common.SumsOf`.

    Args:
      work: as there.
      kv: as there; scales are by cell, those of keys may be by channel and group of cells.
      how: as there.
      interpret: runs the kernel's program as XLA operations, on any device: for tests.
      tiling: sizes of a program's work; None finds them in the table, or by `choose_tiling`.
      table: of measured sizes, in place of the one that kvrt comes with.
    """
    n_lists, n_kv, p, d = work.q.shape
    keys, values = common.readable(kv)
    tables = how.rope and how.rope.cells
    if tiling is None:
        table_bytes = sum(x.shape[1] * x.dtype.itemsize for x in tables or ())
        # Measured over keys that are not rotated.
        found = None if tables else tiles.measured_sizes("gpu", work, keys, values, table)
        tiling = choose_tiling(work, keys, values, table_bytes, found)
    arrays = _arrays(work, keys, values, tables)
    shape = _shape(work, kv, how, tiling)
    names = [name for name, x in arrays._asdict().items() if x is not None]
    found = jax.ShapeDtypeStruct((n_lists, n_kv, tiling.splits, p), jnp.float32)
    m, total, acc = pl.pallas_call(
        functools.partial(gpu.attend_split, shape, names),
        grid=(n_kv * pl.cdiv(p, tiling.queries), tiling.splits, n_lists),
        out_shape=(found, found, jax.ShapeDtypeStruct((*found.shape, d), jnp.float32)),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=_stages(shape)),
        interpret=interpret,
        name="attend_blocks",
    )(*(x for x in arrays if x is not None))
    return common.Sums(m=m, l=total, acc=acc)


def _arrays(
    work: common.KernelWork,
    keys: KVArray,
    values: KVArray,
    tables: tuple[Array, Array] | None,
) -> gpu.Refs:
    """The kernel's inputs; None for scales and tables that there are not."""
    return gpu.Refs(
        q=work.q,
        pos=work.pos,
        bits=work.bits,
        blocks=work.blocks,
        n_blocks=work.n_blocks,
        cell_pos=work.cell_pos,
        cell_seqs=work.cell_seqs,
        **_stored("k", keys),
        **_stored("v", values),
        cos=tables and tables[0],
        sin=tables and tables[1],
    )


def _shape(
    work: common.KernelWork, kv: LayerKV, how: LayerAttention, tiling: gpu.Tiling
) -> gpu.Shape:
    (_, _, p, d), (keys, values) = work.q.shape, common.readable(kv)
    tables = how.rope and how.rope.cells
    return gpu.Shape(
        tiling=tiling,
        group=how.group,
        block_size=work.cell_pos.shape[1],
        head_dim=d,
        n_queries=p,
        n_words=work.bits.shape[2],
        keys=common.form(keys, d, -2, by_channel=True),
        values=common.form(values, d, -1),
        n_pairs=tables[0].shape[1] if tables else 0,
        layout=how.rope.layout if how.rope else "",
    )


def _stages(shape: gpu.Shape) -> int:
    """How far ahead Triton loads.

    Five are two tiles in flight while a third is worked on, for the numbers of blocks are read a
    stage before what lies in them; with three or four there is one, and nothing overlaps. Two where
    bytes come from several blocks: Triton (3.9) would ask for asynchronous copies of single bytes,
    which do not exist.
    """
    quantized = shape.keys.bits or shape.values.bits
    if quantized and shape.block_size % shape.tiling.cells:
        return 2
    return shape.tiling.stages or 5


def _stored(side: str, x: KVArray) -> dict[str, Any]:
    if not isinstance(x, Quantized):
        return {side: x}
    return {side: x.data, f"{side}_scale": x.scale, f"{side}_zero_point": x.zero_point}
