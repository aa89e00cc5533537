"""Cached keys and values of one layer and sequence, where each kv head keeps tokens of its own.

Such a cache is a state: what it holds follows from all tokens before, so no token can be taken
out of it again. It lies in the tables of `kvrt.store.recurrent`, and whatever copies, saves or
shares states does the same to it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

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
class HeadSlots:
    """Tokens lie in the first `filled` slots of each head, ascending by position.

    Attributes:
      k: keys, with RoPE applied at their positions, or unrotated with `close_up`. `[H, D, S]`
      v: values. `[H, S, Dv]`
      pos: positions; -1 in the first slots of a head that has fewer tokens than others with which
        it shares a budget. `[H, S]`
      sums: what a policy's tap has summed up of each token. `[H, S]`
      filled: slots behind which all are free, the same of every head.
      queries: sums over the queries so far; None where no policy asks for them.
      chosen: slots that are read beside the newest, counted from 1, 0 for none; None where all are
        read. `[H, X]`
    """

    k: KVArray
    v: KVArray
    pos: Int32[Array, "H S"]
    sums: Float[Array, "H S"]
    filled: Int32[Array, ""]
    queries: QuerySums | None = None
    chosen: Int32[Array, "H X"] | None = None

    @property
    def taken(self) -> Bool[Array, "H S"]:
        """Slots that hold a token."""
        return (jnp.arange(self.pos.shape[1])[None] < self.filled) & (self.pos >= 0)


def create(shape: SlotShape) -> HeadSlots:
    """Slots of which none is taken.

    Raises:
      BadConfig: a codec's groups do not fill a head.
    """
    h, s, q, d = shape.n_kv_heads, shape.n_slots, shape.n_q_heads, shape.dim_k
    sums = QuerySums(n=jnp.zeros(()), q=jnp.zeros((q, d)), qq=jnp.zeros((q, d, d)))
    return HeadSlots(
        k=zeros(shape.type_k, (h, shape.dim_k, s), 1),  # pyright: ignore[reportArgumentType]
        v=zeros(shape.type_v, (h, s, shape.dim_v), 2),
        pos=jnp.zeros((h, s), jnp.int32),
        sums=jnp.zeros((h, s), jnp.float32),
        filled=jnp.zeros((), jnp.int32),
        queries=sums if q else None,
        chosen=jnp.zeros((h, shape.n_chosen), jnp.int32) if shape.n_chosen else None,
    )


def slot_keys(slots: HeadSlots) -> Float[Array, "H D S"]:
    """Keys of all slots, in float32; those of free ones are anything finite."""
    return decode(slots.k, -2)


def slot_values(slots: HeadSlots) -> Float[Array, "H S Dv"]:
    """Values likewise."""
    return decode(slots.v, -1)


def with_tokens(
    slots: HeadSlots,
    k: Float[Array, "T H D"],
    v: Float[Array, "T H Dv"],
    pos: Int32[Array, " T"],
    n: Int32[Array, ""],
) -> HeadSlots:
    """The slots with the first n tokens behind those that are taken; their sums are 0.

    Args:
      slots: with n free ones at least.
      k: keys as they are kept; tokens from n on are anything.
      v: values.
      pos: positions.
      n: how many tokens come in.
    """
    n_slots, index = slots.pos.shape[1], jnp.arange(k.shape[0], dtype=jnp.int32)
    # Beyond the last slot nothing is written.
    at = jnp.where(index < n, slots.filled + index, n_slots)

    def put_keys(x: Array, new: Array) -> Array:
        return x.at[:, :, at].set(jnp.transpose(new, (1, 2, 0)), mode="drop")

    def put_values(x: Array, new: Array) -> Array:
        return x.at[:, at].set(jnp.transpose(new, (1, 0, 2)), mode="drop")

    return dataclasses.replace(
        slots,
        k=jax.tree.map(put_keys, slots.k, encode(k, slots.k, -1)),
        v=jax.tree.map(put_values, slots.v, encode(v, slots.v, -1)),
        pos=slots.pos.at[:, at].set(pos[None], mode="drop"),
        sums=slots.sums.at[:, at].set(0.0, mode="drop"),
        filled=slots.filled + n,
    )


def keep_only(slots: HeadSlots, index: Int32[Array, "H K"]) -> HeadSlots:
    """The slots with K of them alone, each head its own, in the order of `index`."""
    n, n_slots = index.shape[1], slots.pos.shape[1]
    whole = jnp.pad(index, ((0, 0), (0, n_slots - n)))

    def of_keys(x: Array) -> Array:
        return jnp.take_along_axis(x, whole[:, None], axis=2)

    def of_values(x: Array) -> Array:
        return jnp.take_along_axis(x, whole[:, :, None], axis=1)

    return dataclasses.replace(
        slots,
        k=jax.tree.map(of_keys, slots.k),
        v=jax.tree.map(of_values, slots.v),
        pos=jnp.take_along_axis(slots.pos, whole, axis=1),
        sums=jnp.take_along_axis(slots.sums, whole, axis=1),
        filled=jnp.full((), n, jnp.int32),
        chosen=None if slots.chosen is None else _moved(slots.chosen, index, n_slots),
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

    def to(x: AnyArray, axis: int) -> AnyArray:
        more = [(0, 0)] * x.ndim
        more[axis] = (0, max(n - x.shape[axis], 0))
        return jnp.pad(jnp.asarray(x), more)[(slice(None),) * axis + (slice(n),)]

    return dataclasses.replace(
        slots,
        k=jax.tree.map(lambda x: to(x, 2), slots.k),
        v=jax.tree.map(lambda x: to(x, 1), slots.v),
        pos=to(slots.pos, 1),
        sums=to(slots.sums, 1),
    )
