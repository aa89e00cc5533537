"""Keys in codes by channel: 32 cells side by side share a scale and a minimum in each channel.

A few channels of keys are large in every token, so a scale a channel keeps more than a scale a row.
It needs all of its cells at once. The groups of cells that were written last therefore stay as they
are, in a tail that has places for 128 tokens of every sequence, and a group becomes codes when
another one needs its place: the one that was not written for longest goes. A group that is written
again, for its cells were free, comes back decoded.

A group is 32 cells and not 32 tokens of one text: cells of several sequences may share one.

Source: KIVI, arXiv:2402.02750, sec. 3. There the tail is coded as a whole when it has 128 tokens,
so that it holds 0 to 127; here it goes by groups, and holds 97 to 128.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Float16, Int32, state
from kvrt.kv_types import Codec
from kvrt.store.codec import KVArray, Quantized, affine, data_dtype, decode, empty, packed

# Type of keys in the tail, and of those that are taken out.
TAIL_DTYPE = "float16"


@state
class PerChannel:
    """Keys of one layer; `Quantized` is [N, H, D, B] with scales [N, H, D, B / 32].

    Invariant: no group has two places. What `coded` has of a group with a place is not read.
    """

    quantized: Quantized
    # By place: keys, which group of cells they are of (-1: none), and when it was written.
    tail: Float16[AnyArray, "P H D _"]
    group: Int32[AnyArray, " P"]
    written: Int32[AnyArray, " P"]

    @property
    def n_cells(self) -> int:
        """Cells of a group."""
        return self.quantized.codec.cells

    @property
    def n_groups(self) -> int:
        """Groups of cells."""
        n_blocks, _, _, n = self.quantized.scale.shape
        return n_blocks * n


KeyArray = KVArray | PerChannel


def zeros(codec: Codec, shape: tuple[int, int, int, int], n_places: int) -> PerChannel:
    """Zeroed keys [N, H, D, B] with a tail of so many groups; B is a multiple of a group."""
    return PerChannel(
        quantized=empty(codec, shape, 2),
        tail=jnp.zeros((n_places, *shape[1:3], codec.cells), TAIL_DTYPE),
        group=jnp.full(n_places, -1, jnp.int32),
        written=jnp.zeros(n_places, jnp.int32),
    )


def read(
    rows: PerChannel, tile: Quantized, ids: Int32[AnyArray, "*S M"]
) -> Float[Array, "*S H D _"]:
    """Keys of blocks side by side, in float32.

    Args:
      rows: of a layer.
      tile: its codes of these blocks, side by side.
      ids: the blocks.
    """
    quantized, ids = decode(tile, -2), jnp.asarray(ids)
    n = rows.quantized.scale.shape[3]
    inside = lax.expand_dims(jnp.arange(n, dtype=jnp.int32), range(ids.ndim))
    groups = ids[..., None] * n + inside
    groups = groups.reshape(*ids.shape[:-1], -1)
    held, at = _places(rows, groups)

    def with_tail() -> Array:
        whole = jnp.asarray(rows.tail)[at].astype(jnp.float32)
        whole = jnp.moveaxis(whole, groups.ndim - 1, -2).reshape(quantized.shape)
        by_cell = jnp.repeat(held, rows.n_cells, axis=-1)
        return jnp.where(by_cell[..., None, None, :], whole, quantized)

    # Most tiles hold no group of the tail.
    return lax.cond(jnp.any(held), with_tail, lambda: quantized)


def take(rows: PerChannel, slots: Int32[AnyArray, " T"]) -> Float16[Array, "T H D"]:
    """Keys of some cells; those of padding are zero."""
    slots = jnp.asarray(slots)
    c, b = rows.quantized, rows.quantized.data.shape[3]
    block, inside = lax.div(slots, jnp.int32(b)), lax.rem(slots, jnp.int32(b))

    def get(x: AnyArray, at: Array) -> Array:
        return jnp.asarray(x).at[block, :, :, at].get(mode="fill", fill_value=0)

    group = inside // rows.n_cells
    one = Quantized(
        data=get(c.data, inside),
        scale=get(c.scale, group),
        zero_point=get(_zero_point(c), group),
        codec=dataclasses.replace(c.codec, cells=1),
    )
    held, at = _places(rows, slots // rows.n_cells)
    whole = jnp.asarray(rows.tail)[at, :, :, slots % rows.n_cells]
    found = decode(one, -1).astype(TAIL_DTYPE)
    return jnp.where(held[:, None, None], whole, found)


def put(
    rows: PerChannel, slots: Int32[AnyArray, " T"], new: Float[AnyArray, "T H D"]
) -> PerChannel:
    """Writes keys of some cells; slots beyond the last cell are dropped.

    Args:
      rows: donated by the jitted caller.
      slots: which cells, each at most once.
      new: their keys, cast to float16.
    """
    slots, n = jnp.asarray(slots), rows.n_cells
    values = jnp.asarray(new).astype(TAIL_DTYPE)
    # Each group once, so that it leaves the tail once at most.
    touched = jnp.unique(slots // n, size=slots.shape[0], fill_value=rows.n_groups)
    touched = jnp.minimum(touched, rows.n_groups)

    def one(i: Array, rows: PerChannel) -> PerChannel:
        group = touched[i]
        rows, at = _placed(rows, group)
        mine = slots[None] == group * n + jnp.arange(n, dtype=jnp.int32)[:, None]
        written = jnp.moveaxis(values[jnp.argmax(mine, axis=1)], 0, -1)
        keys = jnp.where(jnp.any(mine, axis=1), written, jnp.asarray(rows.tail)[at])
        tail = lax.dynamic_update_index_in_dim(rows.tail, keys, at, 0)
        return dataclasses.replace(rows, tail=tail)

    return lax.fori_loop(0, jnp.sum(touched < rows.n_groups), one, rows)


def replace(
    rows: PerChannel, block: AnyArray, new: Float[Array, "H D B"], moved: Bool[Array, " B"]
) -> PerChannel:
    """Changes keys of a block where they lie: those in codes are coded again with their group.

    Args:
      rows: donated by the jitted caller.
      block: which.
      new: all keys of the block, as they are to be.
      moved: which of them are others; groups without one keep their bytes.
    """
    c, n = rows.quantized, rows.quantized.scale.shape[3]
    groups = jnp.asarray(block) * n + jnp.arange(n, dtype=jnp.int32)
    held, at = _places(rows, groups)
    some = jnp.any(moved.reshape(n, -1), axis=1)
    data, scale, zero_point = _quantized(new, c.codec)
    wanted = some & ~held

    def put(x: AnyArray, new: Array, which: Array) -> Array:
        old = lax.dynamic_index_in_dim(x, block, 0, keepdims=False)
        new = jnp.where(which[None, None], new, old)
        return lax.dynamic_update_index_in_dim(x, new, block, 0)

    quantized = Quantized(
        data=put(c.data, data, jnp.repeat(wanted, rows.n_cells)),
        scale=put(c.scale, scale, wanted),
        zero_point=put(_zero_point(c), zero_point, wanted),
        codec=c.codec,
    )
    by_group = new.reshape(*new.shape[:2], n, -1)
    keys = jnp.moveaxis(by_group, 2, 0).astype(TAIL_DTYPE)
    where = jnp.where(some & held, at, rows.group.shape[0])
    tail = jnp.asarray(rows.tail).at[where].set(keys, mode="drop")
    return dataclasses.replace(rows, quantized=quantized, tail=tail)


def clear(rows: PerChannel, released: Bool[AnyArray, "N B"]) -> PerChannel:
    """Zeroes keys; where a group keeps some cells, others of it are at its minimum."""
    n = rows.n_cells
    by_group = jnp.asarray(released).reshape(rows.n_groups, n)
    gone = jnp.all(by_group, axis=1).reshape(rows.quantized.scale.shape[0], 1, 1, -1)
    c = rows.quantized
    zero = jnp.zeros((), TAIL_DTYPE)
    quantized = dataclasses.replace(
        c,
        data=jnp.where(released[:, None, None, :], jnp.zeros((), c.data.dtype), c.data),
        scale=jnp.where(gone, zero, c.scale),
        zero_point=jnp.where(gone, zero, _zero_point(c)),
    )
    of = jnp.where(jnp.asarray(rows.group) < 0, rows.n_groups, rows.group)
    in_tail = by_group.at[of].get(mode="fill", fill_value=True)
    tail = jnp.where(in_tail[:, None, None, :], zero, rows.tail)
    return dataclasses.replace(rows, quantized=quantized, tail=tail)


def _places(
    rows: PerChannel, groups: Int32[Array, "*S"]
) -> tuple[Bool[Array, "*S"], Int32[Array, "*S"]]:
    """Whether groups have a place in the tail, and which."""
    places = lax.expand_dims(jnp.asarray(rows.group), range(groups.ndim))
    here = groups[..., None] == places
    return jnp.any(here, axis=-1), jnp.argmax(here, axis=-1).astype(jnp.int32)


def _placed(rows: PerChannel, group: Array) -> tuple[PerChannel, Array]:
    """Gives a group a place in the tail, and codes the one that had it."""
    held, at = _places(rows, group)
    at = jnp.where(held, at, jnp.argmin(rows.written)).astype(jnp.int32)
    old, keys = jnp.asarray(rows.group)[at], jnp.asarray(rows.tail)[at]
    rows = _quantize(rows, old, keys, (old >= 0) & ~held)
    keys = jnp.where(held, keys, _dequantized(rows, group))
    newest = jnp.max(rows.written) + 1
    return dataclasses.replace(
        rows,
        tail=lax.dynamic_update_index_in_dim(rows.tail, keys, at, 0),
        group=jnp.asarray(rows.group).at[at].set(group),
        written=jnp.asarray(rows.written).at[at].set(newest),
    ), at


def _quantize(rows: PerChannel, group: Array, keys: Array, wanted: Array) -> PerChannel:
    """Puts keys [H, D, 32] into codes as a group, if that is wanted."""
    codec = rows.quantized.codec
    old, new = _group(rows, group), _quantized(keys, codec)
    new = (jnp.where(wanted, x, y) for x, y in zip(new, old, strict=True))
    at = _starts(rows, group)
    parts = (rows.quantized.data, rows.quantized.scale, _zero_point(rows.quantized))
    data, scale, zero_point = (
        lax.dynamic_update_slice(x, y[None], start)
        for x, y, start in zip(parts, new, at, strict=True)
    )
    quantized = Quantized(data=data, scale=scale, zero_point=zero_point, codec=codec)
    return dataclasses.replace(rows, quantized=quantized)


def _quantized(keys: Float[Array, "H D _"], codec: Codec) -> tuple[Array, Array, Array]:
    """Codes, scales and minima of the groups that lie side by side in some keys."""
    by_group = keys.reshape(*keys.shape[:2], -1, codec.cells).astype(jnp.float32)
    data, scale, zero_point = affine(by_group, codec, -1)
    return packed(data.reshape(keys.shape).astype(data_dtype(codec)), codec, -2), scale, zero_point


def _dequantized(rows: PerChannel, group: Array) -> Float16[Array, "H D _"]:
    """Keys of a group from its codes."""
    data, scale, zero_point = _group(rows, group)
    one = Quantized(data=data, scale=scale, zero_point=zero_point, codec=rows.quantized.codec)
    return decode(one, -2).astype(TAIL_DTYPE)


def _group(rows: PerChannel, group: Array) -> tuple[Array, Array, Array]:
    """Codes, scale and minimum of a group."""
    c, n = rows.quantized, rows.n_cells

    def get(x: AnyArray, start: tuple, size: int) -> Array:
        return lax.dynamic_slice(x, start, (1, *x.shape[1:3], size))[0]

    data, scales, zero_points = _starts(rows, group)
    return get(c.data, data, n), get(c.scale, scales, 1), get(_zero_point(c), zero_points, 1)


def _starts(rows: PerChannel, group: Array) -> tuple[tuple, tuple, tuple]:
    """Where a group begins in codes, scales and minima; one before the first counts as that."""
    n = rows.quantized.scale.shape[3]
    group = jnp.maximum(group, 0)
    block, inside, zero = group // n, group % n, jnp.int32(0)
    scales = (block, zero, zero, inside)
    return (block, zero, zero, inside * rows.n_cells), scales, scales


def _zero_point(quantized: Quantized) -> AnyArray:
    assert quantized.zero_point is not None, "codes by channel count from a minimum"
    return quantized.zero_point
