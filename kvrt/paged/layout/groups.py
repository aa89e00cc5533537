"""Groups of layers with a block table each, and the pools that their blocks come from.

Arrays are typed, so a pool holds blocks of one storage shape: heads, channels, KV dtypes and block
size. States of recurrent layers are one pool more, whatever their shapes: an index means a state
in each of them. Inside a pool layers of one kind form groups of one size, and the i-th layers of
all groups share a buffer: a block id belongs to one group at a time.

Source: vLLM's hybrid KV cache manager, for the rule of sizes and the strided groups.
"""

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal

from kvrt.arrays import bytes_of
from kvrt.config import GroupSpec, RecurrentSpec
from kvrt.errors import BadConfig
from kvrt.kv_types import KeyDtype, KVDtype
from kvrt.options.cache import CacheConfig
from kvrt.paged.layout.spec import GroupKind, PagedGroup, PagedPlan, PoolSpec
from kvrt.sizes import Extent, StoreSpec, types_of
from kvrt.state_arrays import StateArray
from kvrt.store.blocks import in_blocks
from kvrt.store.kv import create
from kvrt.store.recurrent import empty_tables

SizeRule = Literal["balanced", "reference"]

# A group size is searched anew where it would pad a kind of layers by more than this share.
_MOST_PADDING = 0.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """What one layer keeps.

    Attributes:
      layer: index of the layer.
      kind: what its later tokens can see; "recurrent" keeps a state instead.
      size: window or chunk in tokens; 0 for the other kinds.
      n_sink: first tokens that stay visible beside it.
      block_size: tokens a block.
      n_kv_heads: kv heads; 0 for recurrent layers.
      head_dim: channels of a head; 0 for recurrent layers.
      head_dim_v: channels of a value where they are others.
      type_k: KV dtype of keys.
      type_v: KV dtype of values.
      state: arrays of a recurrent layer's state; empty for the others.
      shares: the layer whose keys and values it reads instead of its own (issue 20: `kv_of`).
      array_block: as of `PagedGroup`.
      group: the model's group that it is of, where each has a pool of its own; else -1.
      depth: as of `PagedGroup`.
    """

    layer: int
    kind: GroupKind
    size: int = 0
    n_sink: int = 0
    block_size: int = 16
    n_kv_heads: int = 0
    head_dim: int = 0
    head_dim_v: int | None = None
    type_k: KeyDtype = "f32"
    type_v: KVDtype = "f32"
    state: tuple[StateArray, ...] = ()
    shares: int | None = None
    array_block: int = 0
    group: int = -1
    depth: int = 1

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key and value; 0 where the layer is recurrent."""
        return 0 if self.kind == "recurrent" else self.block_bytes // self.block_size

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of a block of this layer alone: keys and values of its tokens, or one state."""
        if self.kind == "recurrent":
            return bytes_of(lambda: empty_tables(self.state, 1))
        store = StoreSpec(
            n_buffers=1,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            extent=Extent(n_cells=self.block_size, block_size=self.block_size),
            type_k=self.type_k,
            type_v=self.type_v,
        )
        return bytes_of(lambda: in_blocks(create(store)))

    @property
    def storage(self) -> Hashable:
        """What arrays must agree in to be one; states need not, for an index means one in all."""
        dims = self.head_dim, self.head_dim_v or self.head_dim
        kv = self.block_size, self.n_kv_heads, *dims, self.type_k, self.type_v, self.group
        return self.kind if self.kind == "recurrent" else kv


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolShape:
    """A pool before its number of blocks is known.

    Attributes:
      page_bytes: bytes of a block in each buffer that a block id points into.
    """

    page_bytes: tuple[int, ...]

    @property
    def n_buffers(self) -> int:
        """Arrays, or sets of them, that a block id points into."""
        return len(self.page_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all buffers, padding included."""
        return sum(self.page_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouping:
    """Groups of all layers, and the shapes of their pools.

    Attributes:
      groups: those of kind "shared" last, after the groups that they read.
      pools: shapes of the pools.
      buffers: by layer, the buffer of its pool that has its keys and values, or those it shares.
      filling: by layer, bytes of its page that it does not use; none in pools of one shape.
    """

    groups: tuple[PagedGroup, ...]
    pools: tuple[PoolShape, ...]
    buffers: Mapping[int, int]
    filling: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def n_missing(self, group: int) -> int:
        """Padding layers: buffers that no layer of a group uses."""
        found = self.groups[group]
        return 0 if found.target is not None else self._pool(found).n_buffers - len(found.layers)

    def padding_bytes(self, group: int) -> int:
        """Bytes of a block of this group that no layer uses: padding layers, and filling."""
        found = self.groups[group]
        if found.target is not None:
            return 0
        missing = self._pool(found).page_bytes[len(found.layers) :]
        return sum(missing) + sum(self.filling.get(layer, 0) for layer in found.layers)

    @property
    def n_padding(self) -> int:
        """Padding layers of all groups."""
        return sum(map(self.n_missing, range(len(self.groups))))

    def plan(self, n_blocks: Sequence[int]) -> PagedPlan:
        """The plan with so many blocks in each pool, null blocks included."""
        pools = tuple(
            PoolSpec(n_blocks=n, n_buffers=p.n_buffers, block_bytes=p.block_bytes)
            for n, p in zip(n_blocks, self.pools, strict=True)
        )
        return PagedPlan(groups=self.groups, pools=pools)

    def _pool(self, group: PagedGroup) -> PoolShape:
        return self.pools[group.pool]


def layer_caches(
    groups: Sequence[GroupSpec],
    recurrent: RecurrentSpec | None,
    config: CacheConfig,
    page: int | None = None,
) -> tuple[LayerCache, ...]:
    """What each layer of a model keeps, in the order of the layers.

    Layers that read the keys and values of others (`GroupSpec.kv_of`) keep nothing.
    With `swa_full` windows and chunks count as full, as symmetric windows always do: tokens that
    slide out of them are kept.

    Args:
      groups: attention layers.
      recurrent: recurrent layers, or None.
      config: sizes and types.
      page: tokens of a block, in arrays of blocks of block_size; None is that. Each group of the
        model has a pool of its own then, as blocks of two in one block of the arrays would mix.

    Raises:
      BadConfig: there are KV dtypes for another number of groups.
    """
    found = [
        LayerCache(
            layer=layer,
            kind=kind,
            size=size,
            n_sink=n_sink,
            block_size=page or config.block_size,
            array_block=config.block_size,
            group=-1 if page is None else i,
            n_kv_heads=group.n_kv_heads,
            head_dim=group.dim_k,
            head_dim_v=group.dim_v,
            type_k=type_k,
            type_v=type_v,
        )
        for i, (group, (type_k, type_v)) in enumerate(
            zip(groups, types_of(groups, config), strict=True)
        )
        for kind, size, n_sink in [_kind(group, config)]
        for layer in group.layers
    ]
    if recurrent:
        depth = 1 if page is None else 1 + config.n_rs_seq
        b = config.block_size if depth == 1 else 1
        found += [
            LayerCache(layer=layer, kind="recurrent", block_size=b, state=arrays, depth=depth)
            for layer, arrays in zip(recurrent.layers, recurrent.arrays, strict=True)
        ]
    return tuple(sorted(found, key=lambda x: x.layer))


def _kind(group: GroupSpec, config: CacheConfig) -> tuple[GroupKind, int, int]:
    """What later tokens see, the window or chunk, and the sinks beside it."""
    mask = group.mask
    if mask.kind in ("window", "chunked") and not config.swa_full:
        return mask.kind, mask.size, mask.n_sink
    return "full", 0, 0


def group_layers(layers: Sequence[LayerCache]) -> Grouping:
    """Groups and pools of layers, one pool a storage shape.

    Args:
      layers: what each layer keeps.

    Raises:
      BadConfig: layers that occur twice, or share what they cannot.
    """
    owners = checked(layers)
    groups: list[PagedGroup] = []
    pools: list[PoolShape] = []
    for members in by(owners, lambda x: x.storage):
        buckets = by(members, lambda x: (x.kind, x.size, x.n_sink))
        size = group_size([len(b) for b in buckets])
        for bucket in buckets:
            groups += strided(bucket, size, pool=len(pools))
        pools.append(PoolShape(page_bytes=tuple(x.block_bytes for x in members[:size])))
    shared = tuple(shared_groups(layers, groups))
    return Grouping(
        groups=(*groups, *shared), pools=tuple(pools), buffers=buffers_of(layers, groups)
    )


def group_size(counts: Sequence[int], rule: SizeRule = "balanced") -> int:
    """Layers of a group, for so many layers of each kind in a pool.

    "reference" is vLLM's rule: the greatest count if it is below 1.5 times the least, else the
    least. At 20 and 30 layers it takes 20 and pads the 30 by 10. "balanced" takes it too, unless a
    kind is padded by more than a quarter of its layers: then, of the sizes from there down to half
    the least count, the one whose most padded kind is padded least, the greatest of equals. It
    takes 10 for 20 and 30, and the reference's 10 for the 10 and 52 of Gemma 3 27B.
    """
    least, most = min(counts), max(counts)
    size = most if most < 1.5 * least else least
    if rule == "reference" or _worst(counts, size) <= _MOST_PADDING:
        return size
    return min(range(size, -(-least // 2) - 1, -1), key=lambda s: _worst(counts, s))


def _worst(counts: Sequence[int], size: int) -> float:
    """The greatest share by which a kind of layers is padded."""
    return max(-c % size / c for c in counts)


def strided(bucket: Sequence[LayerCache], size: int, pool: int) -> list[PagedGroup]:
    """Groups of at most `size` layers: of g groups the i-th takes layers i, i + g, i + 2g."""
    n, one = -(-len(bucket) // size), bucket[0]
    return [
        PagedGroup(
            kind=one.kind,
            layers=tuple(x.layer for x in bucket[i::n]),
            block_size=one.block_size,
            size=one.size,
            n_sink=one.n_sink,
            pool=pool,
            array_block=one.array_block,
            depth=one.depth,
        )
        for i in range(n)
    ]


def shared_groups(
    layers: Iterable[LayerCache], groups: Sequence[PagedGroup]
) -> Iterable[PagedGroup]:
    """Groups of the layers that read keys and values of others: one a group that is read."""
    of = {layer: i for i, g in enumerate(groups) for layer in g.layers}
    readers = [(of[x.shares], x.layer) for x in layers if x.shares is not None]
    for target in sorted({t for t, _ in readers}):
        read = groups[target]
        yield PagedGroup(
            kind="shared",
            layers=tuple(layer for t, layer in readers if t == target),
            block_size=read.block_size,
            pool=read.pool,
            target=target,
        )


def buffers_of(layers: Iterable[LayerCache], groups: Iterable[PagedGroup]) -> dict[int, int]:
    """By layer, the buffer of its pool: its place in its group, or that of the layer it shares."""
    own = {layer: i for g in groups for i, layer in enumerate(g.layers)}
    return own | {x.layer: own[x.shares] for x in layers if x.shares is not None}


def by(items: Iterable[LayerCache], key) -> list[list[LayerCache]]:
    """Lists of equal key, in the order in which the keys occur."""
    found: dict[Hashable, list[LayerCache]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def checked(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """The layers that keep something; refuses what no plan can hold."""
    by_layer = {x.layer: x for x in layers}
    if len(by_layer) < len(layers):
        raise BadConfig(f"{len(layers) - len(by_layer)} layers occur twice; give each one once")
    for x in layers:
        if x.shares is not None:
            _check_shared(x, by_layer.get(x.shares))
        elif x.block_bytes < 1:
            raise BadConfig(f"layer {x.layer} keeps nothing; give it heads and channels or shapes")
    return [x for x in layers if x.shares is None]


def _check_shared(x: LayerCache, read: LayerCache | None) -> None:
    """A target keeps keys and values of the same shape, as long as its reader sees them."""
    problem = ""
    if read is None or read.shares is not None:
        problem = "keeps none"
    elif "recurrent" in (x.kind, read.kind) or x.storage != read.storage:
        problem = "keeps others of another shape"
    elif read.kind != "full" and _sight(x) != _sight(read):
        problem = "frees those that it would still see"
    if problem:
        raise BadConfig(
            f"layer {x.layer} shares keys and values of layer {x.shares}, which {problem}; share "
            "with a layer of the same shape that sees as far"
        )


def _sight(x: LayerCache) -> tuple[GroupKind, int, int]:
    return x.kind, x.size, x.n_sink
