"""Keys quantized by channel: 32 cells side by side share a scale and zero point in each channel.

A few channels of keys are large in every token, so a scale a channel keeps more than a scale a
token. It needs all of its cells at once. The groups of cells that were written last therefore stay
float16, in a tail with room for 128 tokens of every sequence, and a group is quantized when another
one needs its place: the least recently written goes. A group that is written again, because its
cells were free, comes back dequantized.

A group is 32 cells and not 32 tokens of one text: cells of several sequences may share one.

In an engine's blocks (`run`) all cells of a run are one sequence's, written in order, and its
groups are quantized with its last cell: what is float16 follows from the sequence alone. See
`kvrt.store.runs.channel_runs` for how runs end and how blocks are copied.

Source: KIVI, arXiv:2402.02750, sec. 3. There the whole tail is quantized when it has 128 tokens, so
that it holds 0 to 127; here it goes by groups, and holds 97 to 128.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Float16, Int32, state
from kvrt.kv_types import Codec
from kvrt.store.codec import (
    KVArray,
    Quantized,
    data_dtype,
    decode,
    empty_quantized,
    pack,
    quantize_affine,
)

# Dtype of keys in the tail, and of those that are taken out.
TAIL_DTYPE = "float16"
_MAX_WRITTEN = 2**31 - 1


@state
class PerChannel:
    """Keys of one layer; `Quantized` is [N, H, D, B] with scales [N, H, D, B / 32].

    Invariant: no group has two places in the tail. What `quantized` has of a group with one is not
    read.

    Attributes:
      quantized: of all groups.
      tail: keys, by place.
      group: by place, the group of cells; -1 is none.
      written: by place, the order of last writes; 0 in an empty place.
      run: cells that are quantized when the last of them is written; 0 quantizes a group when
        another one needs its place.
    """

    quantized: Quantized
    tail: Float16[AnyArray, "P H D _"]
    group: Int32[AnyArray, " P"]
    written: Int32[AnyArray, " P"]
    run: int = dataclasses.field(default=0, metadata=dict(static=True))

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


def empty_keys(
    codec: Codec, shape: tuple[int, int, int, int], n_places: int, run: int = 0
) -> PerChannel:
    """Zeroed keys [N, H, D, B] with a tail of so many groups; B is a multiple of a group."""
    return PerChannel(
        quantized=empty_quantized(codec, shape, 2),
        tail=jnp.zeros((n_places, *shape[1:3], codec.cells), TAIL_DTYPE),
        group=jnp.full(n_places, -1, jnp.int32),
        written=jnp.zeros(n_places, jnp.int32),
        run=run,
    )


def read_keys(
    cached: PerChannel, tile: Quantized, ids: Int32[AnyArray, "*S M"]
) -> Float[Array, "*S H D _"]:
    """Keys of blocks side by side, in float32.

    Args:
      cached: keys of a layer.
      tile: quantized keys of these blocks, side by side.
      ids: the blocks.
    """
    dequantized, ids = decode(tile, -2), jnp.asarray(ids)
    n = cached.quantized.scale.shape[3]
    inside = lax.expand_dims(jnp.arange(n, dtype=jnp.int32), range(ids.ndim))
    groups = ids[..., None] * n + inside
    groups = groups.reshape(*ids.shape[:-1], -1)
    held, at = tail_places(cached, groups)

    def with_tail() -> Array:
        whole = jnp.asarray(cached.tail)[at].astype(jnp.float32)
        whole = jnp.moveaxis(whole, groups.ndim - 1, -2).reshape(dequantized.shape)
        by_cell = jnp.repeat(held, cached.n_cells, axis=-1)
        return jnp.where(by_cell[..., None, None, :], whole, dequantized)

    # Most tiles hold no group of the tail.
    return lax.cond(jnp.any(held), with_tail, lambda: dequantized)


def take_keys(cached: PerChannel, slots: Int32[AnyArray, " T"]) -> Float16[Array, "T H D"]:
    """Keys of some cells; those of padding are zero."""
    slots = jnp.asarray(slots)
    c, b = cached.quantized, cached.quantized.data.shape[3]
    block, inside = lax.div(slots, jnp.int32(b)), lax.rem(slots, jnp.int32(b))

    def get(x: AnyArray, at: Array) -> Array:
        return jnp.asarray(x).at[block, :, :, at].get(mode="fill", fill_value=0)

    group = inside // cached.n_cells
    one = Quantized(
        data=get(c.data, inside),
        scale=get(c.scale, group),
        zero_point=get(_zero_point(c), group),
        codec=dataclasses.replace(c.codec, cells=1),
    )
    held, at = tail_places(cached, slots // cached.n_cells)
    whole = jnp.asarray(cached.tail)[at, :, :, slots % cached.n_cells]
    found = decode(one, -1).astype(TAIL_DTYPE)
    return jnp.where(held[:, None, None], whole, found)


def put_keys(
    cached: PerChannel, slots: Int32[AnyArray, " T"], new: Float[AnyArray, "T H D"]
) -> PerChannel:
    """Writes keys of some cells; slots beyond the last cell are dropped.

    Args:
      cached: donated by the jitted caller.
      slots: which cells, each at most once.
      new: their keys, cast to float16.
    """
    slots, n = jnp.asarray(slots), cached.n_cells
    values = jnp.asarray(new).astype(TAIL_DTYPE)
    if cached.run:
        cached, slots = _end_runs(cached, slots, values)
    # Each group once, so that it leaves the tail once at most.
    touched = jnp.unique(slots // n, size=slots.shape[0], fill_value=cached.n_groups)
    touched = jnp.minimum(touched, cached.n_groups)

    def one(i: Array, cached: PerChannel) -> PerChannel:
        group = touched[i]
        cached, at = placed(cached, group)
        keys, _ = _merged(jnp.asarray(cached.tail)[at], group, slots, values)
        tail = lax.dynamic_update_index_in_dim(cached.tail, keys, at, 0)
        return dataclasses.replace(cached, tail=tail)

    return lax.fori_loop(0, jnp.sum(touched < cached.n_groups), one, cached)


def _end_runs(
    cached: PerChannel, slots: Int32[Array, " T"], values: Float16[Array, "T H D"]
) -> tuple[PerChannel, Int32[Array, " T"]]:
    """Writes keys of runs whose last cell is among them, and quantizes those runs.

    Returns:
      The keys, and the slots with those that are written as padding.
    """
    size, each = cached.run, cached.run // cached.n_cells
    n_runs = cached.n_groups // each
    run = jnp.minimum(slots // size, n_runs)
    ended = jnp.where(slots % size == size - 1, run, n_runs)
    is_over = jnp.zeros(n_runs + 1, bool).at[ended].set(True).at[n_runs].set(False)
    over = jnp.unique(ended, size=slots.shape[0], fill_value=n_runs)

    def one(i: Array, cached: PerChannel) -> PerChannel:
        group = over[i // each] * each + i % each
        held, at = tail_places(cached, group)
        keys = jnp.where(held, jnp.asarray(cached.tail)[at], _dequantized(cached, group))
        keys, some = _merged(keys, group, slots, values)
        cached = _quantize(cached, group, keys, held | some)
        return without_places(cached, jnp.asarray(cached.group) == group)

    cached = lax.fori_loop(0, jnp.sum(over < n_runs) * each, one, cached)
    return cached, jnp.where(is_over[run], cached.n_groups * cached.n_cells, slots)


def _merged(
    keys: Float16[Array, "H D _"], group: Array, slots: Array, values: Array
) -> tuple[Array, Array]:
    """Keys of a group with those that are new, and whether some are."""
    n = keys.shape[-1]
    mine = slots[None] == group * n + jnp.arange(n, dtype=jnp.int32)[:, None]
    written = jnp.moveaxis(values[jnp.argmax(mine, axis=1)], 0, -1)
    return jnp.where(jnp.any(mine, axis=1), written, keys), jnp.any(mine)


def replace_keys(
    cached: PerChannel, block: AnyArray, new: Float[Array, "H D B"], moved: Bool[Array, " B"]
) -> PerChannel:
    """Changes keys of a block in place: quantized ones are quantized again with their group.

    Args:
      cached: donated by the jitted caller.
      block: which.
      new: all keys of the block, as they are to be.
      moved: which of them are others; groups without one keep their bytes.
    """
    c, n = cached.quantized, cached.quantized.scale.shape[3]
    groups = jnp.asarray(block) * n + jnp.arange(n, dtype=jnp.int32)
    held, at = tail_places(cached, groups)
    some = jnp.any(moved.reshape(n, -1), axis=1)
    data, scale, zero_point = _quantized(new, c.codec)
    wanted = some & ~held

    def put(x: AnyArray, new: Array, which: Array) -> Array:
        old = lax.dynamic_index_in_dim(x, block, 0, keepdims=False)
        new = jnp.where(which[None, None], new, old)
        return lax.dynamic_update_index_in_dim(x, new, block, 0)

    quantized = Quantized(
        data=put(c.data, data, jnp.repeat(wanted, cached.n_cells)),
        scale=put(c.scale, scale, wanted),
        zero_point=put(_zero_point(c), zero_point, wanted),
        codec=c.codec,
    )
    by_group = new.reshape(*new.shape[:2], n, -1)
    keys = jnp.moveaxis(by_group, 2, 0).astype(TAIL_DTYPE)
    where = jnp.where(some & held, at, cached.group.shape[0])
    tail = jnp.asarray(cached.tail).at[where].set(keys, mode="drop")
    return dataclasses.replace(cached, quantized=quantized, tail=tail)


def clear_keys(cached: PerChannel, released: Bool[AnyArray, "N B"]) -> PerChannel:
    """Zeroes keys; where a group keeps some cells, others of it are at its zero point."""
    n = cached.n_cells
    by_group = jnp.asarray(released).reshape(cached.n_groups, n)
    gone = jnp.all(by_group, axis=1).reshape(cached.quantized.scale.shape[0], 1, 1, -1)
    c = cached.quantized
    zero = jnp.zeros((), TAIL_DTYPE)
    quantized = dataclasses.replace(
        c,
        data=jnp.where(released[:, None, None, :], jnp.zeros((), c.data.dtype), c.data),
        scale=jnp.where(gone, zero, c.scale),
        zero_point=jnp.where(gone, zero, _zero_point(c)),
    )
    of = jnp.where(jnp.asarray(cached.group) < 0, cached.n_groups, cached.group)
    in_tail = by_group.at[of].get(mode="fill", fill_value=True)
    tail = jnp.where(in_tail[:, None, None, :], zero, cached.tail)
    return dataclasses.replace(cached, quantized=quantized, tail=tail)


def tail_places(
    cached: PerChannel, groups: Int32[Array, "*S"]
) -> tuple[Bool[Array, "*S"], Int32[Array, "*S"]]:
    """Whether groups have a place in the tail, and which."""
    places = lax.expand_dims(jnp.asarray(cached.group), range(groups.ndim))
    here = groups[..., None] == places
    return jnp.any(here, axis=-1), jnp.argmax(here, axis=-1).astype(jnp.int32)


def placed(cached: PerChannel, group: Array) -> tuple[PerChannel, Array]:
    """Gives a group a place in the tail, and quantizes the group that had it, if one did."""
    held, at = tail_places(cached, group)
    at = jnp.where(held, at, jnp.argmin(cached.written)).astype(jnp.int32)
    old, keys = jnp.asarray(cached.group)[at], jnp.asarray(cached.tail)[at]
    cached = _quantize(cached, old, keys, (old >= 0) & ~held)
    keys = jnp.where(held, keys, _dequantized(cached, group))
    return dataclasses.replace(
        cached,
        tail=lax.dynamic_update_index_in_dim(cached.tail, keys, at, 0),
        group=jnp.asarray(cached.group).at[at].set(group),
        written=written_last(cached, at),
    ), at


def written_last(cached: PerChannel, at: Array) -> Int32[Array, " P"]:
    """The order of writes once place `at` was written; a place beyond the last changes nothing.

    Before int32 runs out, after 2^31 writes, places are numbered anew in their order.
    """
    old = jnp.asarray(cached.written)

    def ranks() -> Array:
        no_later = (old[None] > 0) & (old[None] <= old[:, None])
        return jnp.sum(no_later, axis=1, dtype=jnp.int32)

    old = lax.cond(jnp.max(old) == _MAX_WRITTEN, ranks, lambda: old)
    return old.at[at].set(jnp.max(old) + 1, mode="drop")


def without_places(cached: PerChannel, gone: Bool[AnyArray, " P"]) -> PerChannel:
    """The keys with some places of the tail empty; they are the next to be given."""
    return dataclasses.replace(
        cached,
        group=jnp.where(gone, -1, cached.group),
        written=jnp.where(gone, 0, cached.written),
    )


def _quantize(cached: PerChannel, group: Array, keys: Array, wanted: Array) -> PerChannel:
    """Quantizes keys [H, D, 32] as a group, if that is wanted."""
    codec = cached.quantized.codec
    old, new = _group(cached, group), _quantized(keys, codec)
    new = (jnp.where(wanted, x, y) for x, y in zip(new, old, strict=True))
    at = _starts(cached, group)
    parts = (cached.quantized.data, cached.quantized.scale, _zero_point(cached.quantized))
    data, scale, zero_point = (
        lax.dynamic_update_slice(x, y[None], start)
        for x, y, start in zip(parts, new, at, strict=True)
    )
    quantized = Quantized(data=data, scale=scale, zero_point=zero_point, codec=codec)
    return dataclasses.replace(cached, quantized=quantized)


def _quantized(keys: Float[Array, "H D _"], codec: Codec) -> tuple[Array, Array, Array]:
    """Integers, scales and zero points of groups that lie side by side in some keys."""
    by_group = keys.reshape(*keys.shape[:2], -1, codec.cells).astype(jnp.float32)
    data, scale, zero_point = quantize_affine(by_group, codec, -1)
    return pack(data.reshape(keys.shape).astype(data_dtype(codec)), codec, -2), scale, zero_point


def _dequantized(cached: PerChannel, group: Array) -> Float16[Array, "H D _"]:
    """Keys of a group, dequantized."""
    data, scale, zero_point = _group(cached, group)
    one = Quantized(data=data, scale=scale, zero_point=zero_point, codec=cached.quantized.codec)
    return decode(one, -2).astype(TAIL_DTYPE)


def _group(cached: PerChannel, group: Array) -> tuple[Array, Array, Array]:
    """Integers, scale and zero point of a group."""
    c, n = cached.quantized, cached.n_cells

    def get(x: AnyArray, start: tuple, size: int) -> Array:
        return lax.dynamic_slice(x, start, (1, *x.shape[1:3], size))[0]

    data, scales, zero_points = _starts(cached, group)
    return get(c.data, data, n), get(c.scale, scales, 1), get(_zero_point(c), zero_points, 1)


def _starts(cached: PerChannel, group: Array) -> tuple[tuple, tuple, tuple]:
    """Where a group begins in integers, scales and zero points; -1 counts as the first."""
    n = cached.quantized.scale.shape[3]
    group = jnp.maximum(group, 0)
    block, inside, zero = group // n, group % n, jnp.int32(0)
    scales = (block, zero, zero, inside)
    return (block, zero, zero, inside * cached.n_cells), scales, scales


def _zero_point(quantized: Quantized) -> AnyArray:
    assert quantized.zero_point is not None, "keys quantized by channel have zero points"
    return quantized.zero_point
