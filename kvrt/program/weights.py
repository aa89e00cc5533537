"""How a mesh divides a model's parameters: as the model says, whole where it says nothing."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvrt.arrays import array_bytes
from kvrt.attention.contract import ParamPath, ShardedDecoder
from kvrt.errors import BadConfig
from kvrt.store.shards import HEADS


def param_shardings(model: Any, params: Any, mesh: Mesh) -> tuple[NamedSharding, ...]:
    """Where each parameter lies, in the order of their leaves; warns of those that stay whole.

    Raises:
      BadConfig: the model names a parameter or an axis that there is not.
    """
    shapes = {param_path(keys): x.shape for keys, x in jax.tree.leaves_with_path(params)}
    if isinstance(model, ShardedDecoder):
        specs = _checked(model, shapes, mesh)
    else:
        specs = {}
        _tell_of_whole(model, params, mesh)
    return tuple(NamedSharding(mesh, specs.get(path, P())) for path in shapes)


def _checked(model: ShardedDecoder, shapes: Mapping[ParamPath, tuple], mesh: Mesh) -> dict:
    """What the model says, without parameters whose shape does not divide."""
    name = f"{type(model).__name__}.shardings()"
    specs, whole = {}, []
    for path, spec in model.shardings().items():
        if path not in shapes:
            raise BadConfig(
                f"{name} names {path}, which is no parameter; one of the {len(shapes)} that it "
                f"has is {next(iter(shapes), ())}"
            )
        n_axes, sizes = len(shapes[path]), [_size(axes, mesh) for axes in spec]
        if len(sizes) > n_axes or None in sizes:
            raise BadConfig(
                f"{name} divides {path} by {tuple(spec)}; it has {n_axes} axes, and a mesh has the "
                f"axes {', '.join(map(str, mesh.axis_names))}"
            )
        if any(n % (size or 1) for n, size in zip(shapes[path], sizes, strict=False)):
            whole.append(path)
        else:
            specs[path] = spec
    if whole:
        warnings.warn(
            f"the mesh does not divide {len(whole)} of the parameters that {name} names, the first "
            f"{whole[0]} of shape {shapes[whole[0]]}: each device keeps them whole",
            stacklevel=6,
        )
    return specs


def _tell_of_whole(model: Any, params: Any, mesh: Mesh) -> None:
    """Warns that devices which could divide the parameters have each a copy of them."""
    if mesh.shape[HEADS] == 1:
        return
    leaves = jax.tree.leaves(params)
    n_bytes = array_bytes(params)
    warnings.warn(
        f"{type(model).__name__} has no shardings(): each of {mesh.size} devices keeps all its "
        f"{len(leaves)} parameters ({n_bytes / 1e6:,.1f} MB), and only the cache is divided; see "
        "kvrt.ShardedDecoder",
        stacklevel=6,
    )


def _size(axes: Any, mesh: Mesh) -> int | None:
    """Devices that divide one axis of a parameter; None where the mesh has no such axis."""
    names: Sequence[Any] = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
    if any(name not in mesh.shape for name in names):
        return None
    return math.prod(mesh.shape[name] for name in names)


def param_path(keys: tuple) -> ParamPath:
    """A parameter's path in its module; behind it come the fields of nnx's own variable."""
    return tuple(k.key for k in keys if isinstance(k, jax.tree_util.DictKey))
