"""The parts of a runtime: what the host knows, what the device has, and what joins the two."""

from collections.abc import Sequence
from typing import NamedTuple

from flax import nnx

from kvrt.cache.cell_cache import CellCache
from kvrt.cellcache.planning import HostCells
from kvrt.config import CacheConfig, GroupSpec
from kvrt.policies import Policy
from kvrt.program.device import Device
from kvrt.program.layout import cell_layout
from kvrt.program.mesh import Placement
from kvrt.runtime.stepper import Stepper


class Sides(NamedTuple):
    """HostCells and device, what keeps them in step between two steps, and what runs a step."""

    host: HostCells
    device: Device
    keeper: CellCache
    stepper: Stepper


def open_sides(
    model: nnx.Module, config: CacheConfig, policy: Policy | None, place: Placement | None
) -> Sides:
    """The parts for a model, with an empty cache.

    Raises:
      BadConfig: n_keep leaves nothing to drop, or groups lack layers.
    """
    groups: Sequence[GroupSpec] = model.groups  # pyright: ignore[reportAttributeAccessIssue]
    recurrent = model.recurrent  # pyright: ignore[reportAttributeAccessIssue]
    n_vocab: int = model.n_vocab  # pyright: ignore[reportAttributeAccessIssue]
    device = Device(model, config, cell_layout(groups, recurrent, config), place)
    host = HostCells(groups, recurrent, config)
    keeper = CellCache(host, device, config, groups, policy)
    return Sides(host, device, keeper, Stepper(host, device, keeper, config, n_vocab))
