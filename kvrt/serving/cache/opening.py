"""Makes the cache of an engine for a model: the arrays on the device, and who holds them."""

import dataclasses

from jax.sharding import Mesh

from kvrt.attention.contract import Decoder
from kvrt.cache import checks
from kvrt.cache.cell_cache import layers_of
from kvrt.config import GroupSpec
from kvrt.options.cache import CacheConfig
from kvrt.options.engine import EngineConfig
from kvrt.policies import AnyPolicy, ScoredPolicy, by_position
from kvrt.program.device import Device
from kvrt.program.labels import indexed
from kvrt.program.layout import paged_layout
from kvrt.program.mesh import MeshSpec, placement
from kvrt.serving.cache.space import Space
from kvrt.serving.sizing.budget import fit_budget
from kvrt.serving.sizing.pool_sizes import engine_plan


def open_space(
    model: Decoder,
    config: CacheConfig,
    options: EngineConfig,
    mesh: MeshSpec | Mesh | None,
    policy: AnyPolicy | None,
) -> tuple[Device, Space, CacheConfig]:
    """An empty cache, in cells or in blocks, and the config of the size that it became.

    Args:
      model: a `kvrt.attention.Decoder`.
      config: sizes and types; a budget of the options decides its n_ctx.
      options: of the engine, its rules given.
      mesh: devices that divide the cache; None is one.
      policy: of requests that name none of their own; or, by score, of all.

    Raises:
      BadConfig: blocks, tiers, SelfExtend and the model's layers do not fit together, a budget has
        no room for a request, layers have an indexer, or there are too few devices.
    """
    drops, scored = by_position(policy), policy if isinstance(policy, ScoredPolicy) else None
    layers = layers_of(model, config, scored)
    if options.shared_reads:
        indexed.refuse_shared_reads(layers.groups)
    sized = fit_budget(layers.groups, layers.recurrent, layers.config, options, drops)
    if sized.n_ctx != config.n_ctx:
        config = dataclasses.replace(config, n_ctx=sized.n_ctx)
    place, divided = placement(mesh, config)
    layers = layers_of(model, divided, scored)
    _check_extend(config, layers.groups)
    assert options.rules is not None, "an engine has rules"
    plan = engine_plan(
        layers.groups,
        layers.recurrent,
        layers.config,
        options.rules,
        drops,
        page=options.page(config),
    )
    layout, group_of = paged_layout(
        layers.groups, layers.recurrent, plan, layers.config, options.fine(config)
    )
    layout = dataclasses.replace(layout, scored=layers.scored)
    device = Device(model, layers.config, layout, place)
    return device, Space(layers.groups, plan, group_of, device, options), config


def _check_extend(config: CacheConfig, groups: tuple[GroupSpec, ...]) -> None:
    """Refuses SelfExtend where a `CellCache` does; raises BadConfig."""
    if config.self_extend:
        checks.self_extend(config.self_extend, groups, shifts=False)
