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
from kvrt.store.codec import Coded, Rows, affine, code_dtype, decode, empty, packed

# Type of keys in the tail, and of those that are taken out.
TAIL_DTYPE = "float16"


@state
class PerChannel:
    """Keys of one layer; `Coded` is [N, H, D, B] with scales [N, H, D, B / 32].

    Invariant: no group has two places. What `coded` has of a group with a place is not read.
    """

    coded: Coded
    # By place: keys, which group of cells they are of (-1: none), and when it was written.
    tail: Float16[AnyArray, "P H D _"]
    group: Int32[AnyArray, " P"]
    turn: Int32[AnyArray, " P"]

    @property
    def n_cells(self) -> int:
        """Cells of a group."""
        return self.coded.codec.cells

    @property
    def n_groups(self) -> int:
        """Groups of cells."""
        n_blocks, _, _, n = self.coded.scale.shape
        return n_blocks * n


KeyRows = Rows | PerChannel


def zeros(codec: Codec, shape: tuple[int, int, int, int], n_places: int) -> PerChannel:
    """Zeroed keys [N, H, D, B] with a tail of so many groups; B is a multiple of a group."""
    return PerChannel(
        coded=empty(codec, shape, 2),
        tail=jnp.zeros((n_places, *shape[1:3], codec.cells), TAIL_DTYPE),
        group=jnp.full(n_places, -1, jnp.int32),
        turn=jnp.zeros(n_places, jnp.int32),
    )


def read(rows: PerChannel, tile: Coded, ids: Int32[AnyArray, "*S M"]) -> Float[Array, "*S H D _"]:
    """Keys of blocks side by side, in float32.

    Args:
      rows: of a layer.
      tile: its codes of these blocks, side by side.
      ids: the blocks.
    """
    coded, ids = decode(tile, -2), jnp.asarray(ids)
    n = rows.coded.scale.shape[3]
    inside = lax.expand_dims(jnp.arange(n, dtype=jnp.int32), range(ids.ndim))
    groups = ids[..., None] * n + inside
    groups = groups.reshape(*ids.shape[:-1], -1)
    held, at = _places(rows, groups)

    def with_tail() -> Array:
        whole = jnp.asarray(rows.tail)[at].astype(jnp.float32)
        whole = jnp.moveaxis(whole, groups.ndim - 1, -2).reshape(coded.shape)
        by_cell = jnp.repeat(held, rows.n_cells, axis=-1)
        return jnp.where(by_cell[..., None, None, :], whole, coded)

    # Most tiles hold no group of the tail.
    return lax.cond(jnp.any(held), with_tail, lambda: coded)


def take(rows: PerChannel, slots: Int32[AnyArray, " T"]) -> Float16[Array, "T H D"]:
    """Keys of some cells; those of padding are zero."""
    slots = jnp.asarray(slots)
    c, b = rows.coded, rows.coded.codes.shape[3]
    block, inside = lax.div(slots, jnp.int32(b)), lax.rem(slots, jnp.int32(b))

    def get(x: AnyArray, at: Array) -> Array:
        return jnp.asarray(x).at[block, :, :, at].get(mode="fill", fill_value=0)

    group = inside // rows.n_cells
    one = Coded(
        codes=get(c.codes, inside),
        scale=get(c.scale, group),
        low=get(_low(c), group),
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
    c, n = rows.coded, rows.coded.scale.shape[3]
    groups = jnp.asarray(block) * n + jnp.arange(n, dtype=jnp.int32)
    held, at = _places(rows, groups)
    some = jnp.any(moved.reshape(n, -1), axis=1)
    codes, scale, low = _encoded(new, c.codec)
    wanted = some & ~held

    def put(x: AnyArray, new: Array, which: Array) -> Array:
        old = lax.dynamic_index_in_dim(x, block, 0, keepdims=False)
        new = jnp.where(which[None, None], new, old)
        return lax.dynamic_update_index_in_dim(x, new, block, 0)

    coded = Coded(
        codes=put(c.codes, codes, jnp.repeat(wanted, rows.n_cells)),
        scale=put(c.scale, scale, wanted),
        low=put(_low(c), low, wanted),
        codec=c.codec,
    )
    by_group = new.reshape(*new.shape[:2], n, -1)
    keys = jnp.moveaxis(by_group, 2, 0).astype(TAIL_DTYPE)
    where = jnp.where(some & held, at, rows.group.shape[0])
    tail = jnp.asarray(rows.tail).at[where].set(keys, mode="drop")
    return dataclasses.replace(rows, coded=coded, tail=tail)


def clear(rows: PerChannel, released: Bool[AnyArray, "N B"]) -> PerChannel:
    """Zeroes keys; where a group keeps some cells, others of it are at its minimum."""
    n = rows.n_cells
    by_group = jnp.asarray(released).reshape(rows.n_groups, n)
    gone = jnp.all(by_group, axis=1).reshape(rows.coded.scale.shape[0], 1, 1, -1)
    c = rows.coded
    zero = jnp.zeros((), TAIL_DTYPE)
    coded = dataclasses.replace(
        c,
        codes=jnp.where(released[:, None, None, :], jnp.zeros((), c.codes.dtype), c.codes),
        scale=jnp.where(gone, zero, c.scale),
        low=jnp.where(gone, zero, _low(c)),
    )
    of = jnp.where(jnp.asarray(rows.group) < 0, rows.n_groups, rows.group)
    in_tail = by_group.at[of].get(mode="fill", fill_value=True)
    tail = jnp.where(in_tail[:, None, None, :], zero, rows.tail)
    return dataclasses.replace(rows, coded=coded, tail=tail)


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
    at = jnp.where(held, at, jnp.argmin(rows.turn)).astype(jnp.int32)
    old, keys = jnp.asarray(rows.group)[at], jnp.asarray(rows.tail)[at]
    rows = _code(rows, old, keys, (old >= 0) & ~held)
    keys = jnp.where(held, keys, _decoded(rows, group))
    newest = jnp.max(rows.turn) + 1
    return dataclasses.replace(
        rows,
        tail=lax.dynamic_update_index_in_dim(rows.tail, keys, at, 0),
        group=jnp.asarray(rows.group).at[at].set(group),
        turn=jnp.asarray(rows.turn).at[at].set(newest),
    ), at


def _code(rows: PerChannel, group: Array, keys: Array, wanted: Array) -> PerChannel:
    """Puts keys [H, D, 32] into codes as a group, if that is wanted."""
    codec = rows.coded.codec
    old, new = _group(rows, group), _encoded(keys, codec)
    new = (jnp.where(wanted, x, y) for x, y in zip(new, old, strict=True))
    at = _starts(rows, group)
    parts = (rows.coded.codes, rows.coded.scale, _low(rows.coded))
    codes, scale, low = (
        lax.dynamic_update_slice(x, y[None], start)
        for x, y, start in zip(parts, new, at, strict=True)
    )
    coded = Coded(codes=codes, scale=scale, low=low, codec=codec)
    return dataclasses.replace(rows, coded=coded)


def _encoded(keys: Float[Array, "H D _"], codec: Codec) -> tuple[Array, Array, Array]:
    """Codes, scales and minima of the groups that lie side by side in some keys."""
    by_group = keys.reshape(*keys.shape[:2], -1, codec.cells).astype(jnp.float32)
    codes, scale, low = affine(by_group, codec, -1)
    return packed(codes.reshape(keys.shape).astype(code_dtype(codec)), codec, -2), scale, low


def _decoded(rows: PerChannel, group: Array) -> Float16[Array, "H D _"]:
    """Keys of a group from its codes."""
    codes, scale, low = _group(rows, group)
    one = Coded(codes=codes, scale=scale, low=low, codec=rows.coded.codec)
    return decode(one, -2).astype(TAIL_DTYPE)


def _group(rows: PerChannel, group: Array) -> tuple[Array, Array, Array]:
    """Codes, scale and minimum of a group."""
    c, n = rows.coded, rows.n_cells

    def get(x: AnyArray, start: tuple, size: int) -> Array:
        return lax.dynamic_slice(x, start, (1, *x.shape[1:3], size))[0]

    codes, scales, lows = _starts(rows, group)
    return get(c.codes, codes, n), get(c.scale, scales, 1), get(_low(c), lows, 1)


def _starts(rows: PerChannel, group: Array) -> tuple[tuple, tuple, tuple]:
    """Where a group begins in codes, scales and minima; one before the first counts as that."""
    n = rows.coded.scale.shape[3]
    group = jnp.maximum(group, 0)
    block, inside, zero = group // n, group % n, jnp.int32(0)
    scales = (block, zero, zero, inside)
    return (block, zero, zero, inside * rows.n_cells), scales, scales


def _low(coded: Coded) -> AnyArray:
    assert coded.low is not None, "codes by channel count from a minimum"
    return coded.low
