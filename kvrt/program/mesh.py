"""Many devices as one mesh: which has what of a cache and of a model, and how arrays get there.

Two axes: "tensor" divides kv heads and what the model says of its weights, "context" the blocks of
every layer. Cells, states, tables and whatever the host reads are whole on each device. The host
plans as if there were one device.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvrt.errors import BadConfig
from kvrt.options.cache import CacheConfig
from kvrt.program.layout import Layout
from kvrt.sizes import DividedConfig, Extent
from kvrt.store.kv import KVStore
from kvrt.store.sharded import DividedKV
from kvrt.store.shards import Shards
from kvrt.whole_numbers import take_whole_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Sizes of a mesh.

    Attributes:
      tensor: devices that divide kv heads and weights.
      context: devices that divide the cells of each head.
    """

    tensor: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        """Refuses sizes below one."""
        take_whole_numbers(self)
        for f in dataclasses.fields(self):
            size = getattr(self, f.name)
            if size < 1:
                raise BadConfig(f"mesh axis {f.name} is {size}; at least 1, or leave it out")

    @classmethod
    def parse(cls, text: str) -> "MeshSpec":
        """From words like tensor=4,context=2.

        Raises:
          BadConfig: an axis that does not exist or comes twice, or a size that is no number.
        """
        names, sizes = [f.name for f in dataclasses.fields(cls)], {}
        for word in text.split(","):
            name, _, size = (part.strip() for part in word.partition("="))
            if name == "data":
                raise BadConfig(
                    f"mesh {text!r}: there is no axis 'data', which divided cells and no "
                    "sequences; give its devices to context"
                )
            if name not in names or name in sizes:
                what = "twice" if name in sizes else "unknown"
                raise BadConfig(
                    f"mesh {text!r}: axis {name!r} is {what}; axes are {', '.join(names)}, "
                    "e.g. tensor=4,context=2"
                )
            if not (size.isascii() and size.isdigit()):
                raise BadConfig(f"mesh {text!r}: {name}={size} is no size; e.g. {name}=2")
            sizes[name] = int(size)
        return cls(**sizes)

    @classmethod
    def of(cls, mesh: Mesh) -> "MeshSpec":
        """The sizes of a mesh of JAX.

        Raises:
          BadConfig: an axis of several devices has another name, or it is no mesh.
        """
        if not isinstance(mesh, Mesh):
            raise BadConfig(
                f"mesh is {mesh!r}; give a kvrt.MeshSpec, or a jax.sharding.Mesh with the axes "
                "tensor and context"
            )
        names = [f.name for f in dataclasses.fields(cls)]
        others = [name for name, n in mesh.shape.items() if n > 1 and name not in names]
        if others:
            raise BadConfig(
                f"the mesh has axis {others[0]!r}; axes are tensor, which divides kv heads and "
                "weights, and context, which divides cells: name it so"
            )
        return cls(**{name: mesh.shape.get(name, 1) for name in names})

    @property
    def n_devices(self) -> int:
        """Devices that it takes."""
        return self.tensor * self.context


class Placement:
    """Where arrays lie on the devices of a mesh."""

    def __init__(self, mesh: MeshSpec | Mesh):
        """Takes the devices of a mesh of JAX, else the first that there are, of all processes.

        Raises:
          BadConfig: there are fewer, or some processes would have none of them.
        """
        found = jax.devices()
        spec = mesh if isinstance(mesh, MeshSpec) else MeshSpec.of(mesh)
        if spec.n_devices > len(found):
            raise BadConfig(
                f"a mesh of {_said(spec)} needs {spec.n_devices} devices, there are {len(found)}; "
                "make an axis smaller"
            )
        if jax.process_count() > 1 and spec.n_devices < len(found):
            raise BadConfig(
                f"a mesh of {_said(spec)} takes {spec.n_devices} of the {len(found)} devices of "
                f"{jax.process_count()} processes; it has to take all of them"
            )
        devices = np.array(found[: spec.n_devices])
        if isinstance(mesh, Mesh):
            # Axes of one device may have any name, and stand anywhere.
            order = sorted(range(mesh.devices.ndim), key=lambda i: mesh.axis_names[i] == "tensor")
            devices = mesh.devices.transpose(order)
        grid = devices.reshape(spec.context, spec.tensor)
        names = ("context", "tensor")
        self.spec = spec
        self.shards = Shards(Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names)))
        self._whole = NamedSharding(self.shards.mesh, P())

    def layout(self, layout: Layout) -> Layout:
        """Stores whose blocks divide among the devices; tells of heads that do not."""
        for group in layout.groups:
            if self.shards.head_axis(group.n_kv_heads) is None:
                warnings.warn(
                    f"tensor={self.spec.tensor} does not divide the {group.n_kv_heads} kv heads of "
                    f"{len(group.layers)} layers: each device of that axis keeps them all; "
                    "context= divides their cells",
                    stacklevel=4,
                )
        stores = (
            dataclasses.replace(s, extent=_divided(s.extent, self.shards.n_cells))
            for s in layout.stores
        )
        return dataclasses.replace(layout, stores=tuple(stores))

    def weights(self, params: Any, shardings: Sequence[NamedSharding]) -> tuple[Any, ...]:
        """A model's parameters on their devices, flat; shapes get to know where they will be."""
        return tuple(map(self._weight, jax.tree.leaves(params), shardings))

    def create(self, f: Callable[[], Any]) -> Any:
        """What f makes of nothing, each part made where it lies."""
        return jax.jit(f, out_shardings=self._shardings(jax.eval_shape(f)))()

    def put(self, tree: Any) -> Any:
        """Copies of host arrays, whole on each device."""
        return jax.tree.map(lambda x: self._placed(np.asarray(x), self._whole), tree)

    def fetch(self, x: Any) -> np.ndarray:
        """An array on the host, wherever its parts are; collective."""
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            x = jax.device_put(x, self._whole)
        return np.asarray(x)

    def jit(self, run: Callable, donate: Sequence[int], args: Any) -> Any:
        """`jax.jit` of a program whose caches stay divided, and whose other results are whole."""
        return jax.jit(
            run,
            donate_argnums=tuple(donate),
            in_shardings=self._shardings(args),
            out_shardings=self._shardings(jax.eval_shape(run, *args)),
        )

    def inputs(self, args: Any) -> Any:
        """Arguments of a program: what lies on one device alone goes by way of the host."""
        return jax.tree.map(lambda x: x if self._is_placed(x) else np.asarray(x), args)

    def _is_placed(self, x: Any) -> bool:
        return isinstance(getattr(x, "sharding", None), NamedSharding)

    def _shardings(self, tree: Any) -> Any:
        def of(x: Any) -> Any:
            if isinstance(x, KVStore | DividedKV):
                own = isinstance(x, DividedKV)
                specs = self.shards.taken(x) if own else self.shards.layers(x)
                return jax.tree.map(lambda s: NamedSharding(self.shards.mesh, s), specs)
            return x.sharding if self._is_placed(x) else self._whole

        return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, KVStore | DividedKV))

    def _weight(self, x: Any, sharding: NamedSharding) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        if jax.process_count() == 1 and isinstance(x, jax.Array):
            return jax.device_put(x, sharding)
        return self._placed(np.asarray(x), sharding)

    def _placed(self, x: np.ndarray, sharding: NamedSharding) -> jax.Array:
        # A copy, for a device of the host's kind would take the array itself.
        return jax.make_array_from_callback(x.shape, sharding, lambda at: np.array(x[at]))


def placement(
    mesh: MeshSpec | Mesh | None, config: CacheConfig
) -> tuple[Placement | None, CacheConfig]:
    """Where arrays lie, and the cache as it is there; None is one device, and nothing changes.

    Raises:
      BadConfig: there are too few devices, or the axes are others.
    """
    if mesh is None:
        return None, config
    place = Placement(mesh)
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(CacheConfig)}
    return place, DividedConfig(**fields, n_shards=place.shards.n_cells)


def _divided(extent: Extent, n_shards: int) -> Extent:
    """An extent of a pool; that of a group is divided already."""
    return dataclasses.replace(extent, n_shards=n_shards)


def _said(spec: MeshSpec) -> str:
    sizes = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    return ",".join(f"{name}={n}" for name, n in sizes.items() if n > 1) or "one device"
