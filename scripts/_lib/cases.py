"""One case of a benchmark: sequences of equal length in a random cache, and a step of them.

At the end caches for K-shift and defrag, and the bytes that these move.

The blocks of a sequence lie anywhere in the cache, as they do after a while of use. Nothing here
depends on the device: a case is made in JAX arrays and NumPy plans, as the runtime makes them.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.arrays import array_bytes
from kvrt.attention.view import AnyView, BlockView, SeqView, blocked
from kvrt.cells import Cells, create, owner_bits, place, seq_rm
from kvrt.cells.slots import Places, SeqBlocks
from kvrt.config import GroupSpec
from kvrt.kv_types import KVDtype
from kvrt.options.cache import CacheConfig, Implementation, RopeMode
from kvrt.program import estimate
from kvrt.program.batch import Batch
from kvrt.program.layout import Layout, cell_layout
from kvrt.program.step import Cache, on_device
from kvrt.sizes import Extent
from kvrt.store.codec import KVArray, encode, zeros
from kvrt.store.kv import KVStore
from kvrt_models.spec import DecoderSpec
from kvrt_models.weights.types import WeightType
from scripts._lib import shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences with `context` tokens each, and a step of `n_new` more of each.

    Attributes:
      spec: of the model.
      dtype: of its matrices.
      n_batch: sequences.
      context: tokens that each has in the cache.
      n_new: tokens of each in the step.
      type_k: KV dtype of keys.
      type_v: KV dtype of values.
      rope: whether keys are rotated when they are written or read.
      attention: implementation.
      block_size: cells of a block.
    """

    spec: DecoderSpec
    dtype: WeightType
    n_batch: int
    context: int
    n_new: int = 1
    type_k: KVDtype = "f32"
    type_v: KVDtype = "f32"
    rope: RopeMode = "write"
    attention: Implementation = "chunked"
    block_size: int = 256

    @property
    def config(self) -> CacheConfig:
        """A cache with room for the step, in windowed layers too."""
        b = self.block_size
        n_blocks = -(-(self.context + self.n_new) // b)
        return CacheConfig(
            n_ctx=self.n_batch * n_blocks * b,
            n_seq_max=self.n_batch,
            block_size=b,
            n_ubatch=self.n_batch * (self.n_new + 2 * b),
            type_k=self.type_k,
            type_v=self.type_v,
            rope=self.rope,
            attention=self.attention,
        )

    @property
    def layout(self) -> Layout:
        """A store for each group."""
        return cell_layout(self.spec.groups, None, self.config)

    @property
    def n_bytes(self) -> int:
        """What weights, cache and logits take; nothing is allocated to know it."""
        cache = estimate.of_cells(self.spec.groups, None, self.config).n_bytes
        logits = 2 * 4 * self.n_batch * self.spec.n_vocab
        return shapes.weight_bytes(self.spec, self.dtype)[0] + cache + logits

    @property
    def figures(self) -> dict[str, object]:
        """What a line of results says of the case."""
        return {
            "n_layers": self.spec.n_layers,
            "dtype": self.dtype,
            "batch": self.n_batch,
            "context": self.context,
            "n_new": self.n_new,
            "type_k": self.type_k,
            "type_v": self.type_v,
            "rope": self.rope,
            "attention": self.attention,
            "block_size": self.block_size,
        }

    def of_group(self, group: GroupSpec, n_layers: int) -> "Case":
        """The case with so many layers of one group and no others, for attention alone."""
        alone = dataclasses.replace(group, layers=tuple(range(n_layers)))
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, groups=(alone,)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """Where the sequences of a case lie in the cells of one group.

    Attributes:
      first: position of the first token that the group still has, the start of a block.
      table: blocks of each sequence, with room for the step. `[S, M]`
      n_read: blocks of each with a token from before the step.
    """

    first: int
    table: np.ndarray
    n_read: int


def held(case: Case, group: GroupSpec, extent: Extent) -> Held:
    """Blocks of the sequences, at random."""
    b = extent.block_size
    first = max(case.context - group.mask.size + 1, 0) // b * b if group.mask.size else 0
    n = -(-(case.context + case.n_new - first) // b)
    # Arrays may have more blocks than there are cells to give.
    ids = np.random.default_rng(0).permutation(-(-extent.n_cells // b))[: n * case.n_batch]
    table = ids.astype(np.int32).reshape(case.n_batch, n)
    return Held(first=first, table=table, n_read=-(-(case.context - first) // b))


def n_seen(case: Case, group: GroupSpec) -> int:
    """Cells that the first new token of a sequence sees."""
    return min(case.context, group.mask.size - 1) if group.mask.size else case.context


def cells(case: Case, at: Held, extent: Extent) -> Cells:
    """Cells of one group in which the sequences have their tokens, on the host."""
    n, b = extent.n_blocks, extent.block_size
    pos = np.full((n, b), -1, np.int32)
    owner = np.full((n, b), -1, np.int32)
    along = at.first + np.arange(at.table.shape[1] * b, dtype=np.int32)
    along = np.where(along < case.context, along, -1).reshape(-1, b)
    pos[at.table] = along[None]
    owner[at.table] = np.where(along[None] >= 0, np.arange(case.n_batch)[:, None, None], -1)
    pos, owner = (x.reshape(-1)[: extent.n_cells] for x in (pos, owner))
    words = np.arange(-(-case.n_batch // 32), dtype=np.int32)
    bit = np.left_shift(np.uint32(1), (owner % 32).astype(np.uint32))
    mine = (owner[:, None] >= 0) & (owner[:, None] // 32 == words[None])
    seqs = np.where(mine, bit[:, None], np.uint32(0))
    return Cells(pos=pos, delta=np.zeros_like(pos), seqs=seqs)


def cache(case: Case) -> Cache:
    """Random keys and values of all groups, and their cells."""
    stores, held_cells = [], []
    for group, spec in zip(case.layout.groups, case.layout.stores, strict=True):
        keys = jax.random.split(jax.random.key(1), 2 * spec.n_buffers)
        n, b = spec.extent.n_blocks, spec.extent.block_size
        h, d = spec.n_kv_heads, spec.head_dim
        k = tuple(_rows(key, case.type_k, (n, h, d, b), 2) for key in keys[::2])
        v = tuple(_rows(key, case.type_v, (n, h, b, d), 3) for key in keys[1::2])
        stores.append(KVStore(k=k, v=v))
        at = held(case, group, spec.extent)
        held_cells.append(on_device(cells(case, at, spec.extent)))
    return Cache(stores=tuple(stores), cells=tuple(held_cells))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _rows(key: jax.Array, row_type: KVDtype, size: tuple[int, ...], axis: int) -> KVArray:
    """Keys and values of a layer: one block at random, and all others like it."""
    none = zeros(row_type, size, axis)
    one = encode(jax.random.normal(key, (1, *size[1:])), none, axis - 4)
    return jax.tree.map(lambda x, new: jnp.broadcast_to(new, x.shape), none, one)


def batch(case: Case) -> Batch:
    """The step of all sequences, its plan on the device.

    Many sequences that decode have blocks of their own each, as an `Engine` has them; else all
    tokens read one list.
    """
    s, t = case.n_batch, case.n_new
    pos = np.tile(case.context + np.arange(t, dtype=np.int32), s)
    seq_ids = np.repeat(np.arange(s, dtype=np.int32), t)
    places = [
        _places(case, held(case, group, spec.extent), spec.extent)
        for group, spec in zip(case.layout.groups, case.layout.stores, strict=True)
    ]
    tokens = np.random.default_rng(1).integers(0, case.spec.n_vocab, s * t).astype(np.int32)
    out_ids = np.arange(1, s + 1, dtype=np.int32) * t - 1
    return jax.device_put(
        Batch(tokens=tokens, pos=pos, seq_ids=seq_ids, places=tuple(places), out_ids=out_ids)
    )


def each_its_blocks(case: Case) -> bool:
    """Whether each token reads a list of blocks of its own."""
    return case.n_new == 1 and case.n_batch > 1


def _places(case: Case, at: Held, extent: Extent) -> Places:
    b = extent.block_size
    new = case.context - at.first + np.arange(case.n_new)
    slots = (at.table[:, new // b] * b + new % b).astype(np.int32).reshape(-1)
    if each_its_blocks(case):
        n = np.full(case.n_batch, at.n_read, np.int32)
        rows = SeqBlocks(tables=at.table, n_blocks=n)
        none = np.zeros(1, np.int32)
        return Places(slots=slots, blocks=none, n_blocks=np.asarray(0, np.int32), seq_blocks=rows)
    read = at.table[:, : at.n_read].reshape(-1)
    blocks = np.zeros(extent.n_blocks, np.int32)
    blocks[: len(read)] = read
    return Places(slots=slots, blocks=blocks, n_blocks=np.asarray(len(read), np.int32))


def view(case: Case, held_cells: Cells, step: Batch, extent: Extent) -> AnyView:
    """What the tokens of the step see of a case with one group."""
    cell_pos, cell_seqs = blocked(
        held_cells.pos, held_cells.seqs, extent.n_blocks, extent.block_size
    )
    (places,) = step.places
    pos, bits = step.pos, owner_bits(held_cells, step.seq_ids)
    if places.seq_blocks is None:
        return BlockView(
            pos=pos,
            bits=bits,
            blocks=places.blocks,
            n_blocks=places.n_blocks,
            cell_pos=cell_pos,
            cell_seqs=cell_seqs,
        )
    return SeqView(
        pos=pos,
        bits=bits,
        blocks=places.seq_blocks.tables,
        n_blocks=places.seq_blocks.n_blocks,
        cell_pos=cell_pos,
        cell_seqs=cell_seqs,
    )


def read_bytes(case: Case, stores: Sequence[KVStore]) -> int:
    """Bytes of the cached keys and values that a step sees, scales included, in all layers."""
    found = 0
    for group, spec, store in zip(case.layout.groups, case.layout.stores, stores, strict=True):
        found += array_bytes(store) * case.n_batch * n_seen(case, group) // spec.extent.n_slots
    return found


# --- upkeep ---------------------------------------------------------------------------------------


def all_layers(spec: DecoderSpec) -> GroupSpec:
    """All layers as one kind: those that see all, wherever a model has windows too."""
    full = next((g for g in spec.groups if not g.mask.size), spec.groups[0])
    return GroupSpec(
        layers=tuple(range(spec.n_layers)),
        n_kv_heads=full.n_kv_heads,
        head_dim=full.head_dim,
        rope=full.rope,
    )


def filled(n_ctx: int, *, n_used: int | None = None, n_seqs: int = 1) -> Cells:
    """Tokens of some sequences, one beside the other, in the first n_used cells or in all."""
    slots = np.arange(n_ctx if n_used is None else n_used, dtype=np.int32)
    return place(create(n_ctx, 32), slots, slots.copy(), slots % n_seqs)


def every_second_freed(n_ctx: int) -> Cells:
    """A full cache of which every second cell was freed."""
    return seq_rm(filled(n_ctx, n_seqs=2), 1)


def bytes_touched(store: KVStore, n_blocks: int, src: np.ndarray, dst: np.ndarray) -> int:
    """Bytes of the blocks that moves touch.

    A block that gets cells is read and written, one that they come from is read.

    Args:
      store: keys and values of n_blocks blocks.
      n_blocks: that it has.
      src: blocks that cells come from; any block may be there more than once.
      dst: blocks that get them.
    """
    n_touched = len(np.unique(dst)) + len(np.union1d(src, dst))
    return array_bytes(store) * n_touched // n_blocks
