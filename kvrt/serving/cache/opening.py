"""Makes the cache of an engine for a model: the arrays on the device, and who holds them."""

from flax import nnx

from kvrt.cache import checks
from kvrt.cache.cell_cache import open_cell_cache
from kvrt.cellcache.host_cells import Retention
from kvrt.config import CacheConfig, GroupSpec, RecurrentSpec
from kvrt.errors import BadConfig
from kvrt.paged.layout.checkpoints import with_checkpoints
from kvrt.paged.layout.groups import group_layers, layer_caches
from kvrt.paged.layout.sizing import for_tokens
from kvrt.policies import Policy
from kvrt.program.device import Device
from kvrt.program.layout import paged_layout
from kvrt.program.mesh import Placement
from kvrt.serving.cache.base import Space
from kvrt.serving.cache.cells import CellSpace
from kvrt.serving.cache.engine_cells import EngineCells
from kvrt.serving.cache.paged import PagedSpace
from kvrt.serving.cache.prefixes import N_KEPT
from kvrt.serving.config import EngineConfig


def open_space(
    model: nnx.Module,
    config: CacheConfig,
    options: EngineConfig,
    place: Placement | None,
    policy: Policy | None,
) -> tuple[Device, Space]:
    """An empty cache, in cells or in blocks.

    Args:
      model: a `kvrt.attention.Decoder`.
      config: sizes and types.
      options: of the engine, its rules given.
      place: the mesh; None is one device.
      policy: of requests that name none of their own.

    Raises:
      BadConfig: blocks, tiers, SelfExtend and the model's layers do not fit together.
    """
    groups: tuple[GroupSpec, ...] = model.groups  # pyright: ignore[reportAttributeAccessIssue]
    recurrent: RecurrentSpec | None
    recurrent = model.recurrent  # pyright: ignore[reportAttributeAccessIssue]
    if options.mode == "cell":
        kept = Retention(
            n_seqs=N_KEPT if options.prefix_cache else 0,
            n_pinned=policy.n_keep if policy else None,
        )
        cache = open_cell_cache(model, config, place, retention=kept, host_type=EngineCells)
        return cache.device, CellSpace(cache, prefix_cache=options.prefix_cache)
    _check_extend(config, groups)
    assert options.rules is not None, "an engine has rules"
    grouping = group_layers(layer_caches(groups, recurrent, config))
    plan = for_tokens(
        grouping,
        n_tokens=config.n_ctx,
        n_seq=config.n_seq_max,
        n_inflight=options.rules.n_batch,
    )
    plan = with_checkpoints(plan, grouping, config)
    layout, group_of = paged_layout(groups, recurrent, plan, config)
    if _moves(config) and len(layout.stores) < len(layout.groups):
        raise BadConfig(
            "SelfExtend in the cache works in blocks only where all layers rotate alike, for those "
            "of other rotations share blocks; use mode='cell'"
        )
    device = Device(model, config, layout, place)
    return device, PagedSpace(groups, plan, group_of, device, options)


def _moves(config: CacheConfig) -> bool:
    return config.self_extend is not None and config.self_extend.kind == "cache"


def _check_extend(config: CacheConfig, groups: tuple[GroupSpec, ...]) -> None:
    """Refuses SelfExtend where a `CellCache` does; raises BadConfig."""
    if config.self_extend:
        checks.self_extend(config.self_extend, groups, shifts=False)
