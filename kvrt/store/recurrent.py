"""States of recurrent layers: a table of them a layer, advanced token by token or in chunks.

Which token reads and writes which state is decided on the host, see `kvrt.cellcache.recurrent`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Int32, Shaped, bytes_of, state
from kvrt.config import RecurrentSpec
from kvrt.options.cache import CacheConfig
from kvrt.state_arrays import StateArray

StateTables = tuple[Shaped[Array, "R ..."], ...]
StatesByToken = tuple[Shaped[Array, "T ..."], ...]
OneState = tuple[tuple[AnyArray, ...], ...]  # arrays of one state, by layer
# A recurrence of many tokens, from (state, inputs, n) to (state, outputs), and how many at most.
ChunkForm = tuple[Callable, int]
# A recurrence that writes into the tables: from (tables, index, inputs) of one token, or
# (tables, index, inputs, n), to (tables, outputs). Padding, at index R, writes nothing.
InPlace = Callable[..., tuple[StateTables, Any]]
# Fewer tokens go one by one: a chunk of theirs takes as long.
_FEWEST = 8


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
    """Zeroed tables for every recurrent layer."""
    return StateStore(tables=tuple(empty_tables(x, n_states) for x in spec.arrays))


def bytes_of_one(spec: RecurrentSpec | None) -> int:
    """Bytes of one state of all layers; 0 without any."""
    return bytes_of(lambda: create(spec, 1)) if spec else 0


def empty_tables(arrays: Sequence[StateArray], n_states: int) -> StateTables:
    """Zeroed tables of one layer."""
    return tuple(jnp.zeros((n_states, *x.shape), x.dtype) for x in arrays)


def copy_states(
    store: StateStore, src: Int32[AnyArray, " M"], dst: Int32[AnyArray, " M"]
) -> StateStore:
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


def states_at(tables: StateTables, src: Int32[AnyArray, "..."]) -> tuple[Shaped[Array, "..."], ...]:
    """The states of one layer at some indices; zeros where there is none."""
    return tuple(t.at[src].get(mode="fill", fill_value=0) for t in tables)


def of_one_state(step: InPlace) -> Callable:
    """A step as `advance_apart` wants it, from one state to the next."""

    def run(state: tuple[Array, ...], token: tuple) -> tuple[tuple[Array, ...], Any]:
        tables, out = step(tuple(x[None] for x in state), jnp.int32(0), token)
        return tuple(x[0] for x in tables), out

    return run


def _moved(
    tables: StateTables, src: Array, dst: Array, by: Callable, in_place: bool
) -> tuple[StateTables, Any]:
    """Goes from state src to state dst; `in_place` as in `advance`."""
    if in_place:
        return by(_copied(tables, src, dst), dst)
    new, out = by(states_at(tables, src))
    return tuple(t.at[dst].set(s, mode="drop") for t, s in zip(tables, new, strict=True)), out


def _copied(tables: StateTables, src: Array, dst: Array) -> StateTables:
    """The tables with state src at dst, copied in parts, and not where they are one."""
    n_parts = max((t.shape[1] for t in tables if t.ndim > 1), default=1)

    def part(i: Array, tables: StateTables) -> StateTables:
        at = ([x] if t.ndim == 1 else [x, i] for t in tables for x in (src, dst))
        pairs = zip(tables, *[map(tuple, at)] * 2, strict=True)
        return tuple(
            t.at[to].set(t.at[of].get(mode="fill", fill_value=0), mode="drop")
            for t, of, to in pairs
        )

    return lax.fori_loop(0, jnp.where(src == dst, 0, n_parts), part, tables)


def advance(
    tables: StateTables,
    at: StateIndex,
    step: Callable,
    inputs: tuple[Array, ...],
    *,
    in_place: bool = False,
) -> tuple[StateTables, Any]:
    """Runs a recurrence over tokens in their order, each from its state to its state.

    Args:
      tables: of one layer; donated by the jitted caller.
      at: states that each token reads and writes.
      step: from (state, its part of each input) to (state, output).
      inputs: arrays with tokens on the first axis.
      in_place: whether `step` is an `InPlace`, so that a state is copied only where a token reads
        one and writes another.

    Returns:
      The tables, and the outputs by token.
    """

    def one(tables: StateTables, x: tuple) -> tuple[StateTables, Any]:
        src, dst, token = x
        return _moved(tables, src, dst, lambda *held: step(*held, token), in_place)

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
        held = states_at(tables, src)
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


def advance_chunks(
    tables: StateTables,
    at: StateIndex,
    step: Callable,
    form: ChunkForm,
    inputs: tuple[Array, ...],
    *,
    in_place: bool = False,
) -> tuple[StateTables, Any]:
    """As `advance`, but runs of tokens whose states nobody keeps go through `form` at once.

    Returns:
      The tables, and the outputs by token: as `advance` gives them up to rounding, but of padding.
    """
    run, size = form[0], min(form[1], inputs[0].shape[0])
    if size < _FEWEST:
        return advance(tables, at, step, inputs, in_place=in_place)
    length, after = plan_chunks(at, tables[0].shape[0], size)
    n, src, dst = length.shape[0], jnp.asarray(at.src), jnp.asarray(at.dst)
    # A chunk is read and written as a whole, so the last one may reach beyond the tokens.
    inputs = tuple(jnp.pad(x, [(0, size)] + [(0, 0)] * (x.ndim - 1)) for x in inputs)

    def one(carry: tuple) -> tuple:
        i, tables, out = carry
        token = tuple(x[i] for x in inputs)
        by = functools.partial(_moved, by=lambda *held: step(*held, token), in_place=in_place)
        tables, y = by(tables, src[i], dst[i])
        return after[i + 1], tables, jax.tree.map(lambda to, x: to.at[i].set(x), out, y)

    def many(carry: tuple) -> tuple:
        i, tables, out = carry
        end, rows = i + length[i], tuple(lax.dynamic_slice_in_dim(x, i, size) for x in inputs)
        by = functools.partial(_moved, by=lambda *x: run(*x, rows, length[i]), in_place=in_place)
        tables, y = by(tables, src[i], dst[end - 1])
        # What is written beyond the chunk's tokens is written again by those whose place it is.
        put = jax.tree.map(lambda to, x: lax.dynamic_update_slice_in_dim(to, x, i, 0), out, y)
        return after[end], tables, put

    def both(carry: tuple) -> tuple:
        carry = lax.while_loop(lambda c: (c[0] < n) & (length[c[0]] > 1), many, carry)
        return lax.while_loop(lambda c: (c[0] < n) & (length[c[0]] == 1), one, carry)

    _, given = jax.eval_shape(
        lambda t, x: _moved(t, x[0], x[0], lambda *held: step(*held, x[1]), in_place),
        tables,
        (jnp.int32(0), tuple(x[0] for x in inputs)),
    )
    out = jax.tree.map(lambda x: jnp.zeros((n + size, *x.shape), x.dtype), given)
    _, tables, out = lax.while_loop(lambda c: c[0] < n, both, (after[0], tables, out))
    return tables, jax.tree.map(lambda x: x[:n], out)


def plan_chunks(at: StateIndex, n_states: int, size: int) -> tuple[Array, Array]:
    """Which tokens can be advanced at once.

    A token can be left out between two others if the next one goes on from its state, and a later
    one writes where that would be: so nobody is there to read it.

    Args:
      at: states that each token reads and writes.
      n_states: of a table; a token that writes none of them is padding.
      size: tokens of a chunk at most.

    Returns:
      By token, how many from it on can be advanced at once (1 where fewer than `_FEWEST` can), and
      by token and for the end, the first token from it on that is not padding. `[T]`, `[T + 1]`
    """
    src, dst = jnp.asarray(at.src), jnp.asarray(at.dst)
    index = jnp.arange(dst.shape[0], dtype=jnp.int32)
    last = jnp.zeros(n_states, jnp.int32).at[dst].max(index, mode="drop")
    is_real = dst < n_states
    unread = is_real & (last[jnp.minimum(dst, n_states - 1)] != index)
    chained = jnp.concatenate([jnp.zeros(1, bool), unread[:-1] & (src[1:] == dst[:-1])])
    n = jnp.int32(dst.shape[0])
    begins = jnp.concatenate([jnp.where(chained, n, index)[1:], n[None]])
    length = jnp.minimum(lax.cummin(begins, reverse=True) - index, size)
    after = lax.cummin(jnp.append(jnp.where(is_real, index, n), n), reverse=True)
    return jnp.where(length < _FEWEST, 1, length), after


def clear_states(store: StateStore, released: Bool[AnyArray, " R"]) -> StateStore:
    """Zeroes states in every table."""

    def zero(table: Array) -> Array:
        which = released.reshape(-1, *(1,) * (table.ndim - 1))
        return jnp.where(which, jnp.zeros((), table.dtype), table)

    return jax.tree.map(zero, store)
