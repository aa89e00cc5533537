"""States of recurrent layers: a table of them a layer, advanced token by token.

Which token reads and writes which state is decided on the host, see `kvrt.cellcache.recurrent`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.config import CacheConfig, RecurrentSpec

StateTables = tuple[Float[Array, "R ..."], ...]
StatesByToken = tuple[Float[Array, "T ..."], ...]
OneState = tuple[tuple[AnyArray, ...], ...]  # arrays of one state, by layer


@state
class StateStore:
    """One table for each array of a state, by layer; its first axis is the state index."""

    tables: tuple[StateTables, ...]


@state
class StateIndex:
    """State indices that each token reads and writes; R reads zeros and drops what is written."""

    src: Int32[AnyArray, " T"]
    dst: Int32[AnyArray, " T"]


def n_states(config: CacheConfig) -> int:
    """States that can be kept at once, of all sequences."""
    return config.n_seq_max * (1 + config.n_rs_seq)


def create(spec: RecurrentSpec, n_states: int) -> StateStore:
    """Zeroed tables for every recurrent layer, float32."""

    def layer() -> StateTables:
        return tuple(jnp.zeros((n_states, *shape), jnp.float32) for shape in spec.shapes)

    return StateStore(tables=tuple(layer() for _ in spec.layers))


def copy(store: StateStore, src: Int32[AnyArray, " M"], dst: Int32[AnyArray, " M"]) -> StateStore:
    """Copies states src to states dst in every table; a dst of R is padding and is dropped."""

    def moved(table: Array) -> Array:
        return table.at[dst].set(table.at[src].get(mode="fill", fill_value=0), mode="drop")

    return jax.tree.map(moved, store)


def take_one(store: StateStore, index: Int32[AnyArray, ""]) -> OneState:
    """A copy of one state, by layer."""

    def one(table: Array) -> Array:
        return lax.dynamic_index_in_dim(table, index, keepdims=False)

    return jax.tree.map(one, store.tables)


def put_one(store: StateStore, index: Int32[AnyArray, ""], one: OneState) -> StateStore:
    """Replaces one state by what `take_one` gave; the store is donated by the jitted caller."""

    def replaced(table: Array, new: Array) -> Array:
        return lax.dynamic_update_index_in_dim(table, new, index, 0)

    return StateStore(tables=jax.tree.map(replaced, store.tables, one))


def state_bytes(store: StateStore) -> int:
    """Bytes of all tables."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(store))


def advance(
    tables: StateTables, at: StateIndex, step: Callable, inputs: tuple[Array, ...]
) -> tuple[StateTables, Any]:
    """Runs a recurrence over tokens in their order, each from its state to its state.

    Args:
      tables: of one layer; donated by the jitted caller.
      at: states that each token reads and writes.
      step: from (state, its part of each input) to (state, output).
      inputs: arrays with tokens on the first axis.

    Returns:
      The tables, and the outputs by token.
    """

    def one(tables: StateTables, x: tuple) -> tuple[StateTables, Any]:
        src, dst, token = x
        old = tuple(t.at[src].get(mode="fill", fill_value=0) for t in tables)
        new, out = step(old, token)
        put = (t.at[dst].set(s, mode="drop") for t, s in zip(tables, new, strict=True))
        return tuple(put), out

    each = jnp.asarray(at.src), jnp.asarray(at.dst), inputs
    return lax.scan(one, tables, each)


def advance_apart(
    tables: StateTables, at: StateIndex, step: Callable, inputs: tuple[Array, ...]
) -> tuple[StatesByToken, Any]:
    """As `advance`, with the state after each token beside the tables, which stay as they are.

    Returns:
      The states by token, [T, ...] of each array of a state, and the outputs by token.
    """
    src, dst = jnp.asarray(at.src), jnp.asarray(at.dst)
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), dst[:-1]])

    def one(last: tuple[Array, ...], x: tuple) -> tuple[tuple[Array, ...], Any]:
        src, follows, token = x
        held = (t.at[src].get(mode="fill", fill_value=0) for t in tables)
        old = tuple(jnp.where(follows, a, b) for a, b in zip(last, held, strict=True))
        new, out = step(old, token)
        return new, (new, out)

    none = tuple(jnp.zeros(t.shape[1:], t.dtype) for t in tables)
    return lax.scan(one, none, (src, src == before, inputs))[1]


def put_kept(
    tables: StateTables, at: StateIndex, states: StatesByToken, kept: Bool[Array, " T"]
) -> StateTables:
    """The tables with what `advance_apart` gave for the tokens that are kept, in their order.

    Args:
      tables: of one layer; donated by the jitted caller.
      at: as in `advance`; of kept tokens that write to one index the last one does.
      states: by token.
      kept: which tokens.
    """
    dst = jnp.asarray(at.dst)
    again = kept[None] & (dst[None] == dst[:, None])
    wanted = kept & ~jnp.any(jnp.triu(again, 1), axis=1)

    def put(table: Array, new: Array) -> Array:
        return table.at[jnp.where(wanted, dst, table.shape[0])].set(new, mode="drop")

    return tuple(map(put, tables, states))


def clear_states(store: StateStore, released: Bool[AnyArray, " R"]) -> StateStore:
    """Zeroes states in every table."""

    def zero(table: Array) -> Array:
        which = released.reshape(-1, *(1,) * (table.ndim - 1))
        return jnp.where(which, jnp.zeros((), table.dtype), table)

    return jax.tree.map(zero, store)
