"""What a cache takes: cells and blocks of each group, arrays of each store, and KV dtypes."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal, TypeVar

from kvrt.config import GroupSpec
from kvrt.errors import BadConfig
from kvrt.kv_types import KeyDtype, KVDtype
from kvrt.options.cache import CacheConfig

Type = TypeVar("Type", KVDtype, KeyDtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DividedConfig(CacheConfig):
    """The config of a cache whose blocks devices divide; `program.mesh.placement` makes it.

    Attributes:
      n_shards: parts that the blocks are divided into.
    """

    n_shards: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """The cells of one group, and the blocks of the arrays that hold them.

    Arrays come in few sizes, so that caches of almost one size share compiled programs: what lies
    behind n_cells exists on the device alone, and is never given to a token.

    Attributes:
      n_cells: how many there are to give.
      block_size: consecutive cells that attention reads at a time.
      rolls: cells that no later token can see are reused.
      n_shards: parts that the blocks are divided into.
      n_null: blocks of n_cells that stand for "nothing here"; they are not rounded up.
    """

    n_cells: int
    block_size: int
    rolls: bool = False
    n_shards: int = 1
    n_null: int = 0

    @functools.cached_property
    def n_blocks(self) -> int:
        """Blocks of the arrays: those of n_cells, rounded up, and as many in every part."""
        n = -(-self.n_cells // self.block_size) - self.n_null
        return -(-(rounded_up(n) + self.n_null) // self.n_shards) * self.n_shards

    @functools.cached_property
    def n_slots(self) -> int:
        """Cells of the arrays: whole blocks."""
        return self.n_blocks * self.block_size


def pool_extent(n_blocks: int, block_size: int, array_block: int = 0) -> Extent:
    """The extent of a pool of blocks, of which one is the null block.

    Args:
      n_blocks: blocks, the null block included.
      block_size: cells of a block.
      array_block: cells of a block of the arrays; 0 is block_size. In larger ones the null block
        has no cells.
    """
    if array_block > block_size:
        return Extent(n_cells=(n_blocks - 1) * block_size, block_size=array_block)
    return Extent(n_cells=n_blocks * block_size, block_size=block_size, n_null=1)


def rounded_up(n: int) -> int:
    """The least k * 2^j with 8 <= k <= 16 that is at least n; n itself up to 16.

    At most an eighth more than n, and eight sizes from one power of two to the next.
    """
    step = 1 << max((n - 1).bit_length() - 4, 0)
    return -(-n // step) * step


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """Rows of one shape: as many arrays as layers point into at once.

    Attributes:
      n_buffers: arrays of keys, and of values.
      n_kv_heads: kv heads (H).
      head_dim: channels of a head (D).
      extent: cells and blocks.
      type_k: KV dtype of keys.
      type_v: KV dtype of values.
      n_seq_max: sequences that may write at once.
      head_dim_v: channels of a value where they are others: those of a latent.
      run: of keys by channel, cells that are quantized with the last of them, as `PerChannel.run`.
    """

    n_buffers: int
    n_kv_heads: int
    head_dim: int
    extent: Extent
    type_k: KeyDtype = "f32"
    type_v: KVDtype = "f32"
    n_seq_max: int = 1
    head_dim_v: int | None = None
    run: int = 0


def store_specs(
    groups: Sequence[GroupSpec], config: CacheConfig, n_pinned: int = 0
) -> tuple[StoreSpec, ...]:
    """The arrays of each group, where each has a store of its own; `n_pinned` as in `extent`.

    Raises:
      BadConfig: there are types for another number of groups.
    """
    return tuple(
        StoreSpec(
            n_buffers=len(group.layers),
            n_kv_heads=group.n_kv_heads,
            head_dim=group.dim_k,
            head_dim_v=group.dim_v,
            extent=extent(group, config, n_pinned),
            type_k=type_k,
            type_v=type_v,
            n_seq_max=config.n_seq_max,
        )
        for group, (type_k, type_v) in zip(groups, types_of(groups, config), strict=True)
    )


def store_spec(group: GroupSpec, config: CacheConfig) -> StoreSpec:
    """The arrays of a model's only group."""
    return store_specs((group,), config)[0]


def types_of(
    groups: Sequence[GroupSpec], config: CacheConfig
) -> tuple[tuple[KeyDtype, KVDtype], ...]:
    """Types of keys and values, by group.

    Raises:
      BadConfig: there are types for another number of groups, or the platform's are not chosen.
    """
    n = len(groups)
    keys, values = _by_group("type_k", config.type_k, n), _by_group("type_v", config.type_v, n)
    return tuple(zip(keys, values, strict=True))


def _by_group(
    name: str, types: Type | Literal["auto"] | tuple[Type, ...], n: int
) -> tuple[Type, ...]:
    if types == "auto":
        raise BadConfig(
            f"{name} is 'auto', which a Runtime or an Engine decides; take "
            "config.for_platform(jax.default_backend()), or name a type"
        )
    if not isinstance(types, tuple):
        return (types,) * n
    if len(types) != n:
        raise BadConfig(
            f"{name} has {len(types)} types ({', '.join(types)}), the model {n} groups of layers; "
            "give one type for all, or one a group"
        )
    return types


def extent(group: GroupSpec, config: CacheConfig, n_pinned: int = 0) -> Extent:
    """Cells of a group: n_ctx, or what its window and one step need where that is less.

    With n_pinned the first positions of each sequence stay beside its window, for a policy that
    drops what follows them.
    """
    mask, b = group.mask, config.block_size
    n_shards = config.n_shards if isinstance(config, DividedConfig) else 1
    if mask.kind in ("window", "chunked") and not mask.n_sink and not config.swa_full:
        n = -(-((mask.size + n_pinned) * config.n_seq_max + config.n_ubatch) // b) * b
        if n < config.n_ctx:
            return Extent(n_cells=n, block_size=b, rolls=True, n_shards=n_shards)
    return Extent(n_cells=config.n_ctx, block_size=b, n_shards=n_shards)
