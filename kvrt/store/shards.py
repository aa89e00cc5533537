"""Which device holds what part of a cache: kv heads over one axis of a mesh, blocks over two.

Ids of blocks and slots are those of the whole cache everywhere outside; on a device they become
numbers of its own blocks, and what another device holds becomes padding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kvrt.arrays import AnyArray, Array, Bool, Int32

HEADS, CELLS = "tensor", "context"


@dataclasses.dataclass(frozen=True)
class Shards:
    """The devices that divide a cache; block n is held by shard n // (blocks of a shard).

    Methods that say so work inside `run` alone, where each device has arrays of its own.
    """

    mesh: Mesh

    @property
    def n_cells(self) -> int:
        """Shards of the cells: a number of blocks must be a multiple of it."""
        return self.mesh.shape[CELLS]

    @property
    def n_heads(self) -> int:
        """Shards of the kv heads."""
        return self.mesh.shape[HEADS]

    def head_axis(self, n_heads: int) -> str | None:
        """The axis over which so many heads are divided; None where each device has them all."""
        return None if n_heads % self.n_heads else HEADS

    def layer(self, x: Any) -> P:
        """How an array of a layer lies: blocks first, or places of a tail, then kv heads."""
        return P(CELLS, self.head_axis(x.shape[1])) if len(x.shape) > 1 else P(CELLS)

    def layers(self, store: Any) -> Any:
        """How all arrays of a store lie, or of some layers."""
        return jax.tree.map(self.layer, store)

    def with_heads(self, tree: Any, at: int) -> Any:
        """How new keys and values lie: kv heads on axis `at` divided, the rest on every device."""
        return jax.tree.map(lambda x: P(*[None] * at, self.head_axis(x.shape[at])), tree)

    def taken(self, tree: Any) -> Any:
        """How cells lie that every device took of its own: [L, cells, H, ...]."""
        return jax.tree.map(lambda x: P(None, CELLS, self.head_axis(x.shape[2])), tree)

    def run(self, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """F on every device, with the part of each argument that it holds."""
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def constrain(self, x: Array, *spec: Any) -> Array:
        """X, to be laid out so."""
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def index(self) -> Int32[Array, ""]:
        """Inside `run`: which of the shards of the cells this device has."""
        return lax.axis_index(CELLS)

    def slots(self, slots: Int32[AnyArray, " T"], n_cells: int) -> Int32[Array, " T"]:
        """Inside `run`: slots as cells of this device's n_cells; n_cells where it lacks them."""
        own = jnp.asarray(slots) - self.index() * n_cells
        return jnp.where((own >= 0) & (own < n_cells), own, n_cells)

    def ids(self, ids: Int32[AnyArray, " M"], n_blocks: int) -> Int32[Array, " M"]:
        """Inside `run`: ids of blocks, likewise."""
        return self.slots(ids, n_blocks)

    def listed(
        self, ids: Int32[AnyArray, "*S M"], n: Int32[AnyArray, "*S"], n_blocks: int
    ) -> tuple[Int32[Array, "*S _"], Int32[Array, "*S"]]:
        """Inside `run`: those of the first n of each list that this device holds, in their order.

        No id comes twice in a list, so that n_blocks places are enough.
        """
        own = self.ids(ids, n_blocks)
        nth = lax.broadcasted_iota(jnp.int32, own.shape, own.ndim - 1)
        mine = (own < n_blocks) & (nth < jnp.asarray(n)[..., None])
        order = jnp.argsort(~mine, axis=-1, stable=True)[..., :n_blocks]
        found = jnp.take_along_axis(jnp.where(mine, own, 0), order, axis=-1)
        return found.astype(jnp.int32), jnp.sum(mine, axis=-1, dtype=jnp.int32)

    def collect(self, tree: Any) -> Any:
        """Inside `run`: arrays that one shard of the cells has and the others have as zeros.

        Bits are added, so that every value stays the one it was.
        """
        return jax.tree.map(_collected, tree)

    def is_first(self) -> Bool[Array, ""]:
        """Inside `run`: whether this is the first of the shards of the cells."""
        return self.index() == 0


def _collected(x: Array) -> Array:
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(lax.psum(bits, CELLS), x.dtype)
