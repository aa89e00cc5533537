"""Cached keys and values of one layer and sequence, where each kv head keeps tokens of its own.

Such a cache is a state: what it holds follows from all tokens before, so no token can be taken
out of it again. It lies in the tables of `kvrt.store.recurrent`, and whatever copies, saves or
shares states does the same to it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.kv_types import KeyDtype, KVDtype
from kvrt.store.codec import KVArray, decode, encode, zeros


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotShape:
    """Sizes of the slots of one layer: H kv heads, S slots each.

    Attributes:
      n_kv_heads: H.
      n_slots: S.
      dim_k: channels of a key.
      dim_v: channels of a value.
      type_k: KV dtype of keys.
      type_v: KV dtype of values.
      n_q_heads: query heads whose sums are kept; 0 keeps none.
      n_chosen: slots that are read beside the newest, where not all are; 0 reads all.
    """

    n_kv_heads: int
    n_slots: int
    dim_k: int
    dim_v: int
    type_k: KeyDtype
    type_v: KVDtype
    n_q_heads: int = 0
    n_chosen: int = 0


@state
class QuerySums:
    """Sums over queries, without RoPE: how many, themselves, and their products by pairs."""

    n: Float[Array, ""]
    q: Float[Array, "Q D"]
    qq: Float[Array, "Q D D"]


@state
class SlotMarks:
    """Positions and scores of the tokens in the slots of one state.

    Tokens lie in the first `filled` slots of each head, ascending by position.

    Attributes:
      pos: positions; -1 in the first slots of a head that has fewer tokens than others with which
        it shares a budget. `[H, S]`
      sums: what a policy's tap has summed up of each token. `[H, S]`
      filled: slots behind which all are free, the same of every head.
      queries: sums over the queries so far; None where no policy asks for them.
      chosen: slots that are read beside the newest, counted from 1, 0 for none; None where all are
        read. `[H, X]`
    """

    pos: Int32[Array, "H S"]
    sums: Float[Array, "H S"]
    filled: Int32[Array, ""]
    queries: QuerySums | None = None
    chosen: Int32[Array, "H X"] | None = None

    @property
    def taken(self) -> Bool[Array, "H S"]:
        """Slots that hold a token."""
        return (jnp.arange(self.pos.shape[1])[None] < self.filled) & (self.pos >= 0)

    def places(self, n_tokens: int, n: Int32[Array, ""]) -> Int32[Array, " T"]:
        """Slots of the first n of T tokens that come in; beyond the last one of the others."""
        index = jnp.arange(n_tokens, dtype=jnp.int32)
        return jnp.where(index < n, self.filled + index, self.pos.shape[1])


@state
class HeadSlots:
    """The slots of one of R states: its keys and values lie among those of all, and stay there.

    Attributes:
      k: keys, with RoPE applied at their positions, or unrotated with `close_up`. `[R, H, D, S]`
      v: values. `[R, H, S, Dv]`
      marks: of this state alone.
      index: of the state; with R nothing is written.
    """

    k: KVArray
    v: KVArray
    marks: SlotMarks
    index: Int32[Array, ""]


def create(shape: SlotShape) -> HeadSlots:
    """Slots of which none is taken, of the only state.

    Raises:
      BadConfig: a codec's groups do not fill a head.
    """
    h, s, q, d = shape.n_kv_heads, shape.n_slots, shape.n_q_heads, shape.dim_k
    sums = QuerySums(n=jnp.zeros(()), q=jnp.zeros((q, d)), qq=jnp.zeros((q, d, d)))
    marks = SlotMarks(
        pos=jnp.zeros((h, s), jnp.int32),
        sums=jnp.zeros((h, s), jnp.float32),
        filled=jnp.zeros((), jnp.int32),
        queries=sums if q else None,
        chosen=jnp.zeros((h, shape.n_chosen), jnp.int32) if shape.n_chosen else None,
    )
    return HeadSlots(
        k=zeros(shape.type_k, (1, h, shape.dim_k, s), 2),  # pyright: ignore[reportArgumentType]
        v=zeros(shape.type_v, (1, h, s, shape.dim_v), 3),
        marks=marks,
        index=jnp.int32(0),
    )


def some_keys(slots: HeadSlots, start: Int32[AnyArray, ""], size: int) -> Float[Array, "H D B"]:
    """Keys of slots [start, start + size) in float32; those of free ones are anything finite."""
    return decode(jax.tree.map(functools.partial(_some, slots, start, size, 3), slots.k), -2)


def some_values(slots: HeadSlots, start: Int32[AnyArray, ""], size: int) -> Float[Array, "H B Dv"]:
    """Values likewise."""
    return decode(jax.tree.map(functools.partial(_some, slots, start, size, 2), slots.v), -1)


def _some(slots: HeadSlots, start: AnyArray, size: int, axis: int, x: Array) -> Array:
    sizes = [1, *x.shape[1:]]
    sizes[axis] = size
    return lax.dynamic_slice(x, _starts(slots, start, axis), sizes)[0]


def _starts(slots: HeadSlots, start: AnyArray, axis: int) -> list[Array]:
    """Where slots begin in an array whose `axis` has them."""
    starts = [jnp.asarray(slots.index), *[jnp.int32(0)] * 3]
    starts[axis] = jnp.asarray(start)
    return starts


def at_slots(slots: HeadSlots, index: Int32[Array, "H X"]) -> tuple[KVArray, KVArray]:
    """Keys `[H, D, X]` and values `[H, X, Dv]` of some slots of each head, in their KV dtypes."""
    heads = jnp.arange(index.shape[0], dtype=jnp.int32)[:, None]

    def of_keys(x: Array) -> Array:
        return jnp.transpose(x[slots.index, heads, :, index], (0, 2, 1))

    return jax.tree.map(of_keys, slots.k), jax.tree.map(
        lambda x: x[slots.index, heads, index], slots.v
    )


def with_tokens(
    slots: HeadSlots,
    k: Float[Array, "T H D"],
    v: Float[Array, "T H Dv"],
    places: Int32[Array, " T"],
) -> HeadSlots:
    """The slots with keys and values of tokens; marks stay as they are.

    Args:
      slots: written in place, where nothing reads them afterwards; see `kvrt.store.kv.order_after`.
      k: keys as they are kept.
      v: values.
      places: slots of the tokens; beyond the last one nothing is written.
    """

    def put_keys(x: Array, new: Array) -> Array:
        return x.at[slots.index, :, :, places].set(new, mode="drop")

    def put_values(x: Array, new: Array) -> Array:
        return x.at[slots.index, :, places].set(new, mode="drop")

    return dataclasses.replace(
        slots,
        k=jax.tree.map(put_keys, slots.k, encode(k, slots.k, -1)),
        v=jax.tree.map(put_values, slots.v, encode(v, slots.v, -1)),
    )


def keep_only(slots: HeadSlots, index: Int32[Array, "H K"], n_at_once: int) -> HeadSlots:
    """The slots with K of them alone, each head its own, in the order of `index`.

    Args:
      slots: written in place.
      index: ascending, unless all are moved at once.
      n_at_once: slots that are moved at once.
    """
    n, n_slots = index.shape[1], slots.marks.pos.shape[1]
    whole = jnp.pad(index, ((0, 0), (0, n_slots - n)))
    n_at_once = min(n_at_once, n_slots)

    def moved(i: AnyArray, slots: HeadSlots) -> HeadSlots:
        # Slots only come from behind, and those before the first of the tile have been moved.
        start = jnp.minimum(i * n_at_once, n_slots - n_at_once)
        places = start + jnp.arange(n_at_once, dtype=jnp.int32)
        of = lax.dynamic_slice_in_dim(whole, start, n_at_once, 1)
        k, v = at_slots(slots, jnp.where(places < i * n_at_once, places, of))

        def put(axis: int, x: Array, new: Array) -> Array:
            return lax.dynamic_update_slice(x, new[None], _starts(slots, start, axis))

        return dataclasses.replace(
            slots,
            k=jax.tree.map(functools.partial(put, 3), slots.k, k),
            v=jax.tree.map(functools.partial(put, 2), slots.v, v),
        )

    slots = lax.fori_loop(0, -(-n // n_at_once), moved, slots)
    marks = slots.marks
    return dataclasses.replace(
        slots,
        marks=SlotMarks(
            pos=jnp.take_along_axis(marks.pos, whole, axis=1),
            sums=jnp.take_along_axis(marks.sums, whole, axis=1),
            filled=jnp.full((), n, jnp.int32),
            queries=marks.queries,
            chosen=None if marks.chosen is None else _moved(marks.chosen, index, n_slots),
        ),
    )


def _moved(
    chosen: Int32[Array, "H X"], index: Int32[Array, "H K"], n_slots: int
) -> Int32[Array, "H X"]:
    """Chosen slots where `keep_only` has put them; 0 for those that are gone."""
    heads = jnp.arange(index.shape[0], dtype=jnp.int32)[:, None]
    to = jnp.broadcast_to(jnp.arange(1, index.shape[1] + 1, dtype=jnp.int32), index.shape)
    now = jnp.zeros((index.shape[0], n_slots + 1), jnp.int32).at[heads, index + 1].set(to)
    return jnp.take_along_axis(now, chosen, axis=1)


@functools.partial(jax.jit, static_argnames="n")
def resized(slots: HeadSlots, n: int) -> HeadSlots:
    """The slots with n of them a head: free ones more or fewer."""

    def to(axis: int, x: AnyArray) -> AnyArray:
        more = [(0, 0)] * x.ndim
        more[axis] = (0, max(n - x.shape[axis], 0))
        return jnp.pad(jnp.asarray(x), more)[(slice(None),) * axis + (slice(n),)]

    pos, sums = to(1, slots.marks.pos), to(1, slots.marks.sums)
    return dataclasses.replace(
        slots,
        k=jax.tree.map(functools.partial(to, 3), slots.k),
        v=jax.tree.map(functools.partial(to, 2), slots.v),
        marks=dataclasses.replace(slots.marks, pos=pos, sums=sums),
    )
