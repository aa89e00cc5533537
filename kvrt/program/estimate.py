"""The memory of a cache before it is made: by kind of layers, in cell mode and in paged mode.

Nothing is allocated; what is then made from the same config takes these bytes.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from kvrt.arrays import array_bytes
from kvrt.cells.cells import mask_words
from kvrt.config import GroupSpec, RecurrentSpec
from kvrt.kv_types import any_by_channel
from kvrt.options.cache import CacheConfig
from kvrt.paged.layout.checkpoints import checkpoint_bytes, with_checkpoints
from kvrt.paged.layout.groups import Grouping, LayerCache, group_layers, layer_caches
from kvrt.paged.layout.sizing import for_tokens, greatest, most_blocks
from kvrt.paged.layout.spec import PagedPlan
from kvrt.paged.layout.unified import unify
from kvrt.program.layout import Layout, cell_layout, paged_layout
from kvrt.program.step import kept_arrays
from kvrt.sizes import Extent, StoreSpec, pool_extent
from kvrt.store.blocks import in_blocks
from kvrt.store.kv import cell_bytes
from kvrt.store.recurrent import bytes_of_one

# What positions, pending moves and each 32 owners of a cell take.
_INT_BYTES = 4
# Tokens by which kernels would have blocks grow, for one page size.
_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What layers of one kind keep.

    Attributes:
      kind: what later tokens can see, or "recurrent".
      size: window or chunk in tokens; 0 for the other kinds.
      n_layers: layers.
      n_held: cells, blocks of all its groups together, or states of a layer.
      unit: "cells", "blocks" or "states".
      n_bytes: of keys and values, or of states.
      n_groups: groups of the layers in paged mode; 1 in cell mode.
      block_size: tokens a block; 0 for states in cell mode.
      pool: pool of the blocks; 0 in cell mode.
      empty_bytes: of n_bytes, those of padding.
      types: of keys and values, as "f16/f16"; several where pages hold layers of several.
    """

    kind: str
    size: int
    n_layers: int
    n_held: int
    unit: str
    n_bytes: int
    n_groups: int = 1
    block_size: int = 0
    pool: int = 0
    empty_bytes: int = 0
    types: str = "f32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory of a cache.

    Attributes:
      parts: keys and values, and states, by kind of layers.
      null_bytes: the blocks that stand for "nothing here", one a pool.
      policy_bytes: blocks of windows for what a policy keeps beside them.
      rounding_bytes: blocks that nothing is put in, because arrays come in few sizes (see
        `kvrt.sizes`); those of cells are counted with their part.
      tail_bytes: in paged mode, what is float16 of keys by channel; in cell mode it is counted with
        its part.
      index_bytes: positions, pending moves and owners of cells, on the device and on the host.
      label_bytes: labels beside keys, where decode reads sparsely.
      checkpoint_bytes: context checkpoints at most: made while a text is read, or in paged mode
        room for their blocks in the pools.
      n_padding: padding layers of all groups.
      plan: of paged mode; None in cell mode.
    """

    parts: tuple[Part, ...]
    index_bytes: int
    null_bytes: int = 0
    policy_bytes: int = 0
    rounding_bytes: int = 0
    label_bytes: int = 0
    tail_bytes: int = 0
    checkpoint_bytes: int = 0
    n_padding: int = 0
    plan: PagedPlan | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys, values, states and labels on the device, but for checkpoints."""
        beside = self.null_bytes + self.policy_bytes + self.rounding_bytes
        return sum(p.n_bytes for p in self.parts) + beside + self.tail_bytes + self.label_bytes

    @property
    def n_bytes(self) -> int:
        """All of it."""
        return self.cache_bytes + self.index_bytes + self.checkpoint_bytes

    @property
    def empty_bytes(self) -> int:
        """Bytes of padding."""
        return sum(p.empty_bytes for p in self.parts)


def of_cells(
    groups: Sequence[GroupSpec],
    recurrent: RecurrentSpec | None,
    config: CacheConfig,
    *,
    n_pinned: int = 0,
) -> Estimate:
    """What a `Runtime` allocates beside its weights.

    Args:
      groups: of the model.
      recurrent: its recurrent layers.
      config: sizes and types.
      n_pinned: first positions that windows keep, for the policy of an engine or a `Runtime`.

    Raises:
      BadConfig: these layers cannot have these KV dtypes.
    """
    layout = cell_layout(groups, recurrent, config, n_pinned)
    arrays = _shapes(layout, config)
    each = zip(groups, layout.stores, map(array_bytes, arrays["stores"]), strict=True)
    parts = [_cells(*group) for group in each]
    if recurrent:
        parts.append(_states(recurrent, layout.n_states, array_bytes(arrays["states"])))
    # The host has the cells that are given out, the device those of whole arrays.
    sizes = [store.extent for store in layout.stores]
    n_cells = sum(size.n_cells + size.n_slots for size in sizes)
    return Estimate(
        parts=tuple(parts),
        index_bytes=n_cells * _index_bytes(config),
        label_bytes=array_bytes(arrays["labels"]),
        checkpoint_bytes=_checkpoints(layout, config),
    )


def of_blocks(
    groups: Sequence[GroupSpec],
    recurrent: RecurrentSpec | None,
    config: CacheConfig,
    *,
    plan: PagedPlan | None = None,
    page: int | None = None,
) -> Estimate:
    """What paged mode allocates beside its weights: a pool a storage shape.

    Args:
      groups: of the model.
      recurrent: its recurrent layers, or None.
      config: n_ctx tokens of n_seq_max sequences together, in blocks of block_size; a step adds
        n_ubatch of them at most.
      plan: of an engine, whose pools may have more blocks than those tokens take; None has none.
      page: as of `layer_caches`; 1 in cell mode of an engine.

    Raises:
      BadConfig: checkpoint_bytes are too few for one checkpoint.
    """
    layers = layer_caches(groups, recurrent, config, page)
    return _of_grouping(group_layers(layers), layers, groups, config, plan)


def of_pages(
    groups: Sequence[GroupSpec], recurrent: RecurrentSpec | None, config: CacheConfig
) -> Estimate:
    """What one pool with one page size for all layers would take, as in vLLM; to compare.

    Raises:
      BadConfig: pages of which none is a multiple of another.
    """
    layers = layer_caches(groups, recurrent, config)
    grouping = unify(layers, alignment=_ALIGNMENT)
    return _of_grouping(grouping, layers, groups, config)


def plan_bytes(plan: PagedPlan, config: CacheConfig) -> int:
    """What pools of so many blocks take, with what arrays are rounded up by, and their cells."""
    n_blocks = _array_counts(plan)
    n_bytes = sum(pool.block_bytes * n_blocks[i] for i, pool in enumerate(plan.pools))
    return n_bytes + _cell_bytes(_pool_arrays(plan), config)


def paged_tail_bytes(
    groups: Sequence[GroupSpec],
    plan: PagedPlan,
    config: CacheConfig,
    hash_block_size: int | None = None,
) -> int:
    """What is float16 of keys by channel in pools; `hash_block_size` as in `paged_layout`."""
    if not any_by_channel(config.type_k):
        return 0
    layout, _ = paged_layout(groups, None, plan, config, hash_block_size)
    stores = _shapes(layout, config)["stores"]
    return array_bytes(stores) - array_bytes([in_blocks(x) for x in stores])


def most_tokens(
    estimate: Callable[[CacheConfig], Estimate], config: CacheConfig, n_bytes: int
) -> int:
    """The greatest n_ctx whose cache fits into n_bytes, the rest of config as it is; 0 if none."""

    def fits(n_ctx: int) -> bool:
        return estimate(dataclasses.replace(config, n_ctx=n_ctx)).n_bytes <= n_bytes

    return greatest(fits)


def _cells(group: GroupSpec, store: StoreSpec, n_bytes: int) -> Part:
    size = store.extent
    return Part(
        kind=group.mask.kind,
        size=group.mask.size,
        n_layers=len(group.layers),
        n_held=size.n_cells,
        unit="cells",
        n_bytes=n_bytes,
        block_size=size.block_size,
        types=f"{store.type_k}/{store.type_v}",
    )


def _states(recurrent: RecurrentSpec, n: int, n_bytes: int) -> Part:
    return Part(
        kind="recurrent",
        size=0,
        n_layers=len(recurrent.layers),
        n_held=n,
        unit="states",
        n_bytes=n_bytes,
    )


def _checkpoints(layout: Layout, config: CacheConfig) -> int:
    """Context checkpoints of all sequences: windows of groups that roll, and a state each."""
    if not config.n_checkpoints:
        return 0
    most = one_checkpoint_bytes(layout) * config.n_checkpoints * config.n_seq_max
    return most if config.checkpoint_bytes is None else min(most, config.checkpoint_bytes)


def one_checkpoint_bytes(layout: Layout) -> int:
    """Bytes of a context checkpoint of cells: windows of groups that roll, and a state."""
    windows = (g.mask.size * cell_bytes(s) for g, s in layout.stored if s.extent.rolls)
    return bytes_of_one(layout.recurrent) + sum(windows)


def _of_grouping(
    grouping: Grouping,
    layers: Sequence[LayerCache],
    groups: Sequence[GroupSpec],
    config: CacheConfig,
    wanted: PagedPlan | None = None,
) -> Estimate:
    n_seq, n_batch = config.n_seq_max, config.n_ubatch
    least = for_tokens(grouping, n_tokens=config.n_ctx, n_seq=n_seq, n_inflight=n_batch)
    least = with_checkpoints(least, grouping, config)
    plan = wanted or least
    alike: dict[tuple, list[int]] = {}
    for i, group in enumerate(grouping.groups):
        alike.setdefault((group.kind, group.size, group.n_sink, group.pool), []).append(i)
    arrays, n_blocks = _pool_arrays(plan), _array_counts(plan)
    types = {x.layer: f"{x.type_k}/{x.type_v}" for x in layers if x.kind != "recurrent"}
    return Estimate(
        parts=tuple(_blocks(grouping, ids, types, config, n_batch) for ids in alike.values()),
        index_bytes=_cell_bytes(arrays, config),
        policy_bytes=sum(
            (x.n_blocks - y.n_blocks) * x.block_bytes
            for x, y in zip(plan.pools, least.pools, strict=True)
        ),
        rounding_bytes=sum(
            (n_blocks[i] - pool.n_blocks) * pool.block_bytes for i, pool in enumerate(plan.pools)
        ),
        null_bytes=sum(p.block_bytes for p in plan.pools),
        tail_bytes=paged_tail_bytes(groups, plan, config),
        checkpoint_bytes=checkpoint_bytes(grouping, config),
        n_padding=grouping.n_padding,
        plan=plan,
        label_bytes=_label_bytes(groups, plan, config) if config.select else 0,
    )


def _label_bytes(groups: Sequence[GroupSpec], plan: PagedPlan, config: CacheConfig) -> int:
    layout, _ = paged_layout(groups, None, plan, config)
    return array_bytes(_shapes(layout, config)["labels"])


def _shapes(layout: Layout, config: CacheConfig) -> dict[str, Any]:
    """The shapes of `kept_arrays`."""
    return jax.eval_shape(functools.partial(kept_arrays, layout, config))


def _pool_arrays(plan: PagedPlan) -> dict[int, Extent]:
    """The arrays of pools with cells; those of states alone have as many blocks as they give."""
    sizes = {g.pool: (0, 0) for g in plan.groups}
    for g in plan.groups:
        # States lie in no cells.
        of_group = (0, 0) if g.kind == "recurrent" else (g.block_size, g.array_block)
        sizes[g.pool] = max(sizes[g.pool], of_group)
    return {p: pool_extent(plan.pools[p].n_blocks, *x) for p, x in sizes.items() if x[0]}


def _array_counts(plan: PagedPlan) -> list[int]:
    """By pool the blocks that the arrays have room for."""
    out = [pool.n_blocks for pool in plan.pools]
    for p, size in _pool_arrays(plan).items():
        n_span = max(g.n_span for g in plan.groups if g.pool == p and g.kind != "recurrent")
        out[p] = size.n_blocks * n_span
    return out


def _cell_bytes(arrays: Mapping[int, Extent], config: CacheConfig) -> int:
    """Positions and owners: the host has as many cells as the device."""
    return 2 * sum(x.n_slots for x in arrays.values()) * _index_bytes(config)


def _blocks(
    grouping: Grouping,
    ids: Sequence[int],
    types: Mapping[int, str],
    config: CacheConfig,
    n_batch: int,
) -> Part:
    """Of groups that differ in their layers alone."""
    one = grouping.groups[ids[0]]
    layers = [layer for i in ids for layer in grouping.groups[i].layers]
    # Each of them holds as many.
    n = most_blocks(one, config.n_ctx, config.n_seq_max, n_batch)
    return Part(
        kind=one.kind,
        size=one.size,
        n_layers=len(layers),
        n_held=n * len(ids),
        unit="blocks",
        n_bytes=n * len(ids) * grouping.pools[one.pool].block_bytes,
        n_groups=len(ids),
        block_size=one.block_size,
        pool=one.pool,
        empty_bytes=n * sum(map(grouping.padding_bytes, ids)),
        types=", ".join(dict.fromkeys(types.get(x, "f32") for x in layers)),
    )


def _index_bytes(config: CacheConfig) -> int:
    """Of one cell, on the host or on the device."""
    return _INT_BYTES * (2 + mask_words(config.n_seq_max))
