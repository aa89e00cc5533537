"""Labels: what is kept beside the keys of a layer to tell which of them a query should read.

They are derived from the keys as they are stored, and rebuilt wherever those change. H kv heads,
X channels of a label, U units of a store: Quest keeps each channel's greatest and least key in a
unit, [H, 2D, U]; Double Sparsity the heavy channels of every cell, [H, r, C], and of unrotated keys
behind them the channels that RoPE pairs them with, [H, 2r, C].
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32
from kvrt.config import RopeSpec
from kvrt.kv_types import Codec
from kvrt.options.select import UNIT, DoubleSparsity, Select
from kvrt.sizes import StoreSpec
from kvrt.store import rope
from kvrt.store.codec import KVArray, decode, empty_quantized, encode
from kvrt.store.kv import KVStore
from kvrt.store.per_channel import PerChannel

LabelArray = KVArray
# By array of a store; None for those of layers that read all.
StoreLabels = tuple[LabelArray | None, ...]
# A label has one scale, however few its channels are.
_INT4 = Codec(bits=4, group=None, affine=True, scale="f16")


@dataclasses.dataclass(frozen=True)
class LabelPlan:
    """Which arrays of which stores have labels; hashable.

    Attributes:
      select: how cells are chosen.
      layers: by store and array the model's layer that it belongs to, None without labels.
      unrotated: by layer whose keys are stored unrotated, how they are rotated.
    """

    select: Select
    layers: tuple[tuple[int | None, ...], ...]
    unrotated: tuple[tuple[int, RopeSpec], ...] = ()

    def create(self, stores: Sequence[StoreSpec]) -> tuple[StoreLabels, ...]:
        """Zeroed labels of all stores."""
        return tuple(
            tuple(
                None if x is None else self._zeros(x, spec.n_kv_heads, spec.head_dim, n)
                for x in of_store
            )
            for of_store, spec in zip(self.layers, stores, strict=True)
            for n in [spec.extent.n_slots]
        )

    def channels(self, layer: int) -> Int32[np.ndarray, "H X"] | None:
        """The channels of a layer's labels; None where labels are extremes of all."""
        if not isinstance(self.select, DoubleSparsity):
            return None
        heavy = np.asarray(self.select.channels[layer], np.int32)
        how = dict(self.unrotated).get(layer)
        if how is None:
            return heavy
        return np.concatenate([heavy, rope.rope_partners(heavy, how.n_rot, how.layout)[0]], axis=1)

    def _zeros(self, layer: int, n_heads: int, head_dim: int, n_cells: int) -> LabelArray:
        select, channels = self.select, self.channels(layer)
        if channels is None or not isinstance(select, DoubleSparsity):
            return jnp.zeros((n_heads, 2 * head_dim, n_cells // UNIT), jnp.float32)
        shape = n_heads, channels.shape[1], n_cells
        if select.label_type == "int4":
            return empty_quantized(_INT4, shape, 1)
        return jnp.zeros(shape, {"f32": jnp.float32, "f16": jnp.float16}[select.label_type])


def of_keys(
    channels: Int32[np.ndarray, "H X"] | None,
    keys: Float[Array, "*S H D B"],
    held: Bool[Array, "*S B"],
    like: LabelArray,
) -> LabelArray:
    """Labels of the keys of whole units, as they are kept, by unit or by cell on the last axis.

    Args:
      channels: which are kept of each cell; None keeps extremes.
      keys: as they are stored, in float32.
      held: cells that hold a token; others have no part in extremes.
      like: an array of the wanted type.
    """
    if channels is not None:
        at = jnp.asarray(channels)[..., None]
        at = at.reshape((1,) * (keys.ndim - at.ndim) + at.shape)
        return encode(jnp.take_along_axis(keys, at, axis=-2), like, -2)
    keys = keys.reshape(*keys.shape[:-1], -1, UNIT)
    held = held.reshape(*held.shape[:-1], 1, 1, -1, UNIT)
    far = jnp.float32(jnp.finfo(jnp.float32).max)
    extremes = [
        jnp.max(jnp.where(held, keys, -far), axis=-1),
        jnp.min(jnp.where(held, keys, far), axis=-1),
    ]
    some = jnp.any(held, axis=-1)
    return jnp.where(some, jnp.concatenate(extremes, axis=-2), 0.0)


def rebuild(
    plan: LabelPlan,
    store: int,
    labels: StoreLabels,
    kv: KVStore,
    pos: Int32[AnyArray, "N B"],
    blocks: tuple[Int32[AnyArray, " M"], Int32[AnyArray, ""]],
) -> StoreLabels:
    """Labels with those of some blocks made anew from their keys.

    Args:
      plan: which arrays have labels.
      store: index of the store.
      labels: of that store, donated by the jitted caller.
      kv: its keys.
      pos: positions of its cells, -1 empty.
      blocks: block list, and how many of its entries count.
    """
    ids, n_blocks = blocks

    def one(i: Array, labels: StoreLabels) -> StoreLabels:
        block = jnp.asarray(ids)[i]
        held = jnp.asarray(pos)[block] >= 0
        found = []
        for layer, old, keys in zip(plan.layers[store], labels, kv.k, strict=True):
            if layer is None or old is None:
                found.append(old)
                continue
            stored = decode(jax.tree.map(lambda x: x[block], keys), -2)
            new = of_keys(plan.channels(layer), stored, held, old)
            found.append(jax.tree.map(_at_block(block), old, new))
        return tuple(found)

    return lax.fori_loop(0, n_blocks, one, labels)


def _at_block(block: Array):
    def put(old: Array, new: Array) -> Array:
        zero = jnp.zeros((), block.dtype)
        return lax.dynamic_update_slice(old, new, (zero, zero, block * new.shape[-1]))

    return put


def after_write(
    plan: LabelPlan,
    store: int,
    labels: StoreLabels,
    kv: KVStore,
    pos: Int32[AnyArray, " C"],
    slots: Int32[AnyArray, " T"],
) -> StoreLabels:
    """Labels with those of the units made anew in which few tokens were just written.

    Args:
      plan: as in `rebuild`, as for what follows.
      store: index of the store.
      labels: of that store.
      kv: its keys, the tokens' among them.
      pos: positions of its cells, the tokens' among them.
      slots: the tokens' cells; those of padding are dropped. `[T]`
    """
    unit = lax.div(jnp.asarray(slots), jnp.int32(UNIT))
    cells = unit[:, None] * UNIT + jnp.arange(UNIT, dtype=jnp.int32)[None]
    held = jnp.asarray(pos).at[cells].get(mode="fill", fill_value=-1) >= 0
    found = []
    for layer, old, keys in zip(plan.layers[store], labels, kv.k, strict=True):
        if layer is None or old is None:
            found.append(old)
            continue
        stored = decode(gather_units(keys, unit[None], UNIT, 3), -2)  # [H, T, D, 16]
        new = of_keys(plan.channels(layer), jnp.moveaxis(stored, 0, 1), held, old)
        at = cells if isinstance(plan.select, DoubleSparsity) else unit[:, None]
        found.append(jax.tree.map(_at_cells(at), old, new))
    return tuple(found)


def _at_cells(at: Int32[Array, "T _"]):
    def put(old: Array, new: Array) -> Array:
        # [T, H, X, _] to [H, X, T * _]
        columns = jnp.moveaxis(new, 0, 2).reshape(*new.shape[1:3], -1)
        return old.at[:, :, at.reshape(-1)].set(columns, mode="drop")

    return put


def gather_units(
    cached: KVArray | PerChannel, ids: Int32[Array, "#H *S"], unit: int, cell_axis: int
) -> KVArray:
    """Keys or values of some units of each kv head, as they are stored, one after the other.

    Args:
      cached: of a layer, cells on axis 3 (keys) or 2 (values).
      ids: units, by kv head; beyond the last one the last is read. `[H, *S]`
      unit: cells of a unit.
      cell_axis: 3 or 2.

    Returns:
      `[H, *S, D, unit]` of keys, `[H, *S, unit, D]` of values.
    """

    def one(x: Array) -> Array:
        n, n_heads, b = x.shape[0], x.shape[1], x.shape[cell_axis]
        per = b // unit
        at = jnp.clip(ids, 0, n * per - 1)
        head = jnp.arange(n_heads, dtype=jnp.int32).reshape(-1, *(1,) * (ids.ndim - 1))
        row, part = lax.div(at, jnp.int32(per)) * n_heads + head, lax.rem(at, jnp.int32(per))
        # Rows of one head of a block: a slice of a unit is then all that is read.
        if cell_axis == 3:
            cut = x.reshape(n * n_heads, x.shape[2], per, unit)
            found = cut.at[row, :, part]
        else:
            cut = x.reshape(n * n_heads, per, unit, x.shape[3])
            found = cut.at[row, part]
        return found.get(mode="promise_in_bounds")

    assert not isinstance(cached, PerChannel), "refused with select"
    return jax.tree.map(one, cached)
