"""Attention over block lists on NVIDIA GPUs from Ampere on: one Pallas kernel, by Mosaic GPU.

The successor of `gpu`, whose way through Triton JAX 0.11 deprecates. What is read and what comes
out is the same; what differs:

- A program is one warpgroup with one block list, one kv head, up to `TileSizes.queries` queries
  and one split of the list's tiles. Tiles of keys and values are copied into shared memory
  `TileSizes.stages` at a time by the pipeline of Pallas: bulk copies (TMA) from Hopper on,
  asynchronous copies of 16 bytes a thread on Ampere. Swizzles and register layouts are inferred.
- Products are the instructions `mma.sync` that every GPU since Ampere has: with 16 queries the four
  warps share a tile's cells, with 64 its queries. Decoding waits for memory, so the larger
  instructions of Hopper and Blackwell would gain nothing.
- Operands are bfloat16 (float16 where queries and cache both are). A wider operand is a sum of
  bfloat16 terms, three for float32, whose products are added in float32: exact to float32's own
  rounding, and in the shadow of memory for a few queries.
- Positions and owners of a tile lie side by side, so that they are one copy of the pipeline.

What it does not read (grouped heads of other sizes, integers below eight bits, keys to rotate) it
refuses; `gpu` does. Without an `end` of its own XLA ends a decode step.

Source: arXiv:2205.14135; arXiv:1904.06376 (products of float32 as bfloat16 terms).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from kvrt.arrays import AnyArray, Array, Int32
from kvrt.attention.pallas import common
from kvrt.attention.pallas import mosaic_kernel as mosaic
from kvrt.attention.types import LayerAttention, LayerKV
from kvrt.errors import NoKernel
from kvrt.store.codec import KVArray, Quantized

# Much of it came with JAX 0.11, and type checkers see the JAX that is installed.
plgpu: Any = mosaic_gpu

# The first JAX whose pipeline and products serve Ampere, and whose interpreter is public.
_JAX = (0, 11, 1)
_CAPABILITY = (8, 0)
# Cells of a warpgroup's product at least: four warps of eight.
_LEAST = 32
# Queries of a tile: from JAX 0.12 on a store is of whole lines of the cache, here 32 of float32.
LEAST_QUERIES = 16 if jax.__version_info__ < (0, 12) else 32
# Programs that fill the largest GPUs of today, as in `gpu`.
_N_PROGRAMS = 1024
# Bytes of a tile's keys and values with what they are widened to, and of all of a program: three
# programs fill the shared memory of a Hopper multiprocessor, two that of an Ampere one.
_TILE_BYTES, _PROGRAM_BYTES = 48 * 1024, 72 * 1024
# Channels of the largest heads in float32, of which a tile lies in shared memory with its terms.
_F32_CHANNELS = 128


def kernel(*, interpret: bool = False, tiling: mosaic.TileSizes | None = None) -> common.Kernel:
    """The kernel, for attention; `interpret` and `tiling` as in `sums`.

    Raises:
      NoKernel: this JAX, or the GPU that is JAX's default device, is too old for it.
    """
    require_support()
    return common.Kernel(
        sums=functools.partial(sums, interpret=interpret, tiling=tiling),
        traits={"kernel": "", "Mosaic kernel": ""},
    )


def require_support(version: tuple[int, ...] = jax.__version_info__) -> None:
    """Refuses a JAX, or a GPU, that has no Mosaic GPU of this kind.

    A machine without a GPU may compile for another one, so it passes.

    Raises:
      NoKernel: says what is too old.
    """
    if version < _JAX:
        raise NoKernel(
            f"attention 'mosaic_gpu' needs JAX {_dotted(_JAX)} or later, this is "
            f"{_dotted(version)}; update JAX or use 'pallas_gpu'"
        )
    device = jax.devices()[0]
    if device.platform == "gpu":
        require_capability(str(device.compute_capability))


def require_capability(capability: str) -> None:
    """Refuses a GPU by its compute capability: "9.0", or "gfx942" as ROCm has it.

    Raises:
      NoKernel: it is older than Ampere, or no GPU of NVIDIA's.
    """
    if capability.startswith("gfx") or tuple(map(int, capability.split("."))) < _CAPABILITY:
        raise NoKernel(
            f"attention 'mosaic_gpu' runs on NVIDIA GPUs of capability {_dotted(_CAPABILITY)} and "
            f"later, this one has {capability}; use 'pallas_gpu'"
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def sums(
    work: common.KernelWork,
    kv: LayerKV,
    how: LayerAttention,
    *,
    interpret: bool = False,
    tiling: mosaic.TileSizes | None = None,
) -> common.Sums:
    """See `common.SumsOf`.

    Args:
      work: as there; block sizes and head sizes are multiples of 32.
      kv: as there; plain, or eight bits with scales by cell.
      how: as there; keys are rotated.
      interpret: runs the kernel in JAX's simulation of a GPU, on any device: for tests. Products
        are XLA's there, of the same bfloat16 terms.
      tiling: sizes of a program's work; None lets `choose_sizes` find them.
    """
    n_lists, n_kv, p, d = work.q.shape
    keys, values = common.readable(kv)
    _check_sizes(work, keys, values)
    tiling = tiling or choose_sizes(work, keys, values)
    n_pad = -p % tiling.queries
    arrays = _arrays(work, keys, values, n_pad, tiling)
    shape = _shape(work, kv, how, tiling)._replace(interpret=interpret)
    names = [name for name, x in arrays._asdict().items() if x is not None]
    found = jax.ShapeDtypeStruct((n_lists, n_kv, tiling.splits, p + n_pad), jnp.float32)
    m, total, acc = plgpu.kernel(
        functools.partial(mosaic.sum_split, shape, names),
        out_type=[found, found, jax.ShapeDtypeStruct((*found.shape, d), jnp.float32)],
        scratch_types=_scratch(shape, keys, values),
        grid=(n_kv * shape.n_query_tiles, tiling.splits, n_lists),
        grid_names=mosaic.AXES,
        kernel_name="attend_blocks",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(*(x for x in arrays if x is not None))
    return common.Sums(m=m[..., :p], l=total[..., :p], acc=acc[..., :p, :])


def choose_sizes(work: common.KernelWork, keys: KVArray, values: KVArray) -> mosaic.TileSizes:
    """Sizes for the shapes of some work; nothing here depends on how much is cached."""
    n_lists, n_kv, p, d = work.q.shape
    n_listed, b = work.blocks.shape[1], work.cell_pos.shape[1]
    each = sum(d * _plain(x).dtype.itemsize for x in (keys, values))
    widened = sum(2 * d * _n_widened(x, jnp.bfloat16) for x in (keys, values))
    fits = [n for n in (128, 64) if b % n == 0 and n * (each + widened) <= _TILE_BYTES]
    cells = fits[0] if fits else _LEAST
    queries = LEAST_QUERIES if p <= LEAST_QUERIES else 32
    n_programs, n_tiles = n_lists * n_kv * pl.cdiv(p, queries), n_listed * b // cells
    splits = 1
    while splits * 2 <= n_tiles and splits * 2 * n_programs <= _N_PROGRAMS:
        splits *= 2
    stages = min(4, max(2, (_PROGRAM_BYTES - cells * widened) // (cells * each)))
    return mosaic.TileSizes(cells=cells, queries=queries, splits=splits, stages=stages)


def _check_sizes(work: common.KernelWork, keys: KVArray, values: KVArray) -> None:
    d, b = work.q.shape[3], work.cell_pos.shape[1]
    if d > _F32_CHANNELS and jnp.float32 in [_plain(x).dtype for x in (keys, values)]:
        raise NoKernel(
            f"'mosaic_gpu' reads f32 in heads of {_F32_CHANNELS} channels at most, these have {d}: "
            "their terms fill the shared memory; use bf16, or 'pallas_gpu'"
        )
    groups = [common.form(keys, d, -2).group, common.form(values, d, -1).group]
    if any(n % _LEAST for n in (d, b, *groups)):
        raise NoKernel(
            f"'mosaic_gpu' reads heads, groups and blocks of multiples of {_LEAST}, these are of "
            f"{d}, {min(groups)} channels and {b} cells; use 'pallas_gpu'"
        )


def _plain(x: KVArray) -> AnyArray:
    return x.data if isinstance(x, Quantized) else x


def _arrays(
    work: common.KernelWork, keys: KVArray, values: KVArray, n_pad: int, tiling: mosaic.TileSizes
) -> mosaic.Inputs:
    """The kernel's inputs; queries of padding have no owner and see nothing."""
    pad = ((0, 0), (0, n_pad))
    return mosaic.Inputs(
        q=jnp.pad(work.q, ((0, 0), *pad, (0, 0))),
        pos=jnp.pad(work.pos, pad, constant_values=-1),
        bits=jnp.moveaxis(jnp.pad(work.bits, (*pad, (0, 0))), 2, 1),
        blocks=work.blocks,
        n_blocks=work.n_blocks,
        cells=_cells(work, tiling.cells),
        k=_plain(keys),
        v=_plain(values),
        k_scale=keys.scale if isinstance(keys, Quantized) else None,
        v_scale=jnp.swapaxes(values.scale, 2, 3) if isinstance(values, Quantized) else None,
    )


def _cells(work: common.KernelWork, n: int) -> Int32[Array, "N t r"]:
    """Positions and owners by tile, one behind the other: what a program copies at once.

    Filled up to a multiple of 128, for all threads of a warpgroup take part in a copy on Ampere.
    """
    n_blocks, b, n_words = work.cell_seqs.shape
    both = jnp.concatenate([work.cell_pos[:, None], jnp.swapaxes(work.cell_seqs, 1, 2)], axis=1)
    tiles = jnp.swapaxes(both.reshape(n_blocks, 1 + n_words, b // n, n), 1, 2)
    flat = tiles.reshape(n_blocks, b // n, (1 + n_words) * n)
    return jnp.pad(flat, ((0, 0), (0, 0), (0, -flat.shape[2] % 128)))


def _shape(
    work: common.KernelWork, kv: LayerKV, how: LayerAttention, tiling: mosaic.TileSizes
) -> mosaic.Traced:
    (_, _, p, d), (keys, values) = work.q.shape, common.readable(kv)
    return mosaic.Traced(
        tiling=tiling,
        group=how.group,
        head_dim=d,
        block_size=work.cell_pos.shape[1],
        n_query_tiles=pl.cdiv(p, tiling.queries),
        n_words=work.bits.shape[2],
        keys=common.form(keys, d, -2),
        values=common.form(values, d, -1),
        k_type=_operand(work.q.dtype, keys),
        v_type=_operand(work.q.dtype, values),
        exact=work.q.dtype == jnp.float32,
        interpret=False,
    )


def _operand(dtype: Any, x: KVArray) -> Any:
    """The type in which queries or weights are multiplied with x."""
    return jnp.float16 if dtype == _plain(x).dtype == jnp.float16 else jnp.bfloat16


def _scratch(shape: mosaic.Traced, keys: KVArray, values: KVArray) -> dict[str, Any]:
    """What a program writes into shared memory itself, see `mosaic_kernel.Scratch`.

    Only values of 16 bits can be loaded from a tile as a product wants them, for its pairs of
    channels lie in different rows.
    """
    (cells, queries, *_), d = shape.tiling, shape.head_dim
    found = {
        "weights": plgpu.SMEM((3 if shape.exact else 1, queries, cells), shape.v_type),
        "seen": plgpu.SMEM((cells,), jnp.float32),
    }
    if (n := _n_widened(keys, shape.k_type)) > 0:
        found["k"] = plgpu.SMEM((n, d, cells), shape.k_type)
    if (n := _n_widened(values, shape.v_type)) > 0:
        found["v"] = plgpu.SMEM((n, cells, d), shape.v_type)
    return found


def _n_widened(x: KVArray, kind: Any) -> int:
    """Terms as which keys or values are written once more before they are multiplied, or 0."""
    dtype = _plain(x).dtype
    return 0 if dtype.itemsize == 2 else mosaic.n_terms(dtype, kind)
