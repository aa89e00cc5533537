"""Attention of a layer over slots that are each head's own, and which tokens stay in them.

It has the form of a recurrence (`kvrt.store.recurrent.InPlace`): a state, and one token or many.
Tokens see the slots that are taken, and each other; then they come in, and where all slots are
taken those of the least scores go. Many at once give what one by one gives, up to rounding.

Source: arXiv:2306.14048 (H2O), sec. 4; arXiv:2404.14469 (SnapKV).
"""

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32
from kvrt.attention import softmax
from kvrt.attention.contract import Inputs, State
from kvrt.attention.scored import head_slots
from kvrt.attention.scored.evict import TILE, evict, evicts_at
from kvrt.attention.scored.head_slots import HeadSlots, QuerySums, SlotMarks
from kvrt.attention.scored.policy import Observed, real_numbers
from kvrt.attention.scored.reads import choose_slots, chosen_slots, n_of_one_kind, refreshes
from kvrt.attention.scored.spec import SlotSpec, compared_keys, slots_of, tables_of
from kvrt.store import recurrent, rope
from kvrt.store.kv import order_after

# Tokens that one call of the chunked form takes; it runs them an interval at a time.
CHUNK = 512
# Of each token the attention output, and how many scores were NaN in the eviction behind it.
Scored = tuple[Array, Array]


def recurrence(
    spec: SlotSpec, sinks: Float[Array, " Q"] | None
) -> tuple[recurrent.InPlace, recurrent.InPlace]:
    """The step of one token and that of up to `CHUNK`, which write into the tables of all states.

    Inputs are queries [T, Q, D] and keys [T, H, D] with RoPE applied, values [T, H, Dv], positions
    [T] and, where the policy's tap wants them, queries without RoPE [T, Q, D]. Where keys are
    compared by place (`close_up`) RoPE is applied here, and slots have keys without it.

    Args:
      spec: of the layer.
      sinks: a logit a query head that joins the softmax and carries no value, or None.
    """

    def one(tables: State, index: Array, token: Inputs) -> tuple[State, Scored]:
        rows = tuple(x[None] for x in token)
        slots = slots_of(spec, tables, index)
        # Where nothing is written nothing is evicted either.
        filled = jnp.where(index < tables[0].shape[0], slots.marks.filled, 0)
        slots = dataclasses.replace(slots, marks=dataclasses.replace(slots.marks, filled=filled))
        slots, out, n_nan = attend_and_keep(spec, slots, rows, jnp.int32(1), sinks)
        return tables_of(slots, tables), (out[0], n_nan)

    def many(tables: State, index: Array, rows: Inputs, n: Array) -> tuple[State, Scored]:
        slots, out = _in_parts(spec, slots_of(spec, tables, index), rows, n, sinks)
        return tables_of(slots, tables), out

    return one, many


def _in_parts(
    spec: SlotSpec, slots: HeadSlots, rows: Inputs, n: Array, sinks: Array | None
) -> tuple[HeadSlots, Scored]:
    """As `attend_and_keep`, of more tokens than may come in between two evictions."""
    size = rows[0].shape[0]
    most = min(spec.policy.interval, size)
    padded = tuple(jnp.pad(x, [(0, most)] + [(0, 0)] * (x.ndim - 1)) for x in rows)

    def part(carry: tuple[Array, HeadSlots, Scored]) -> tuple[Array, HeadSlots, Scored]:
        i, slots, (out, n_nan) = carry
        here, marks = tuple(lax.dynamic_slice_in_dim(x, i, most) for x in padded), slots.marks
        m = jnp.minimum(jnp.minimum(evicts_at(spec, marks) - marks.filled, n - i), most)
        if spec.policy.reads is not None:
            m = jnp.minimum(m, n_of_one_kind(spec.policy.reads, here[3][0]))
        slots, y, n_nan_here = attend_and_keep(spec, slots, here, m, sinks)
        # What is written beyond the part is written again by the next one.
        out = lax.dynamic_update_slice_in_dim(out, y, i, 0)
        return i + m, slots, (out, n_nan.at[i + m - 1].set(n_nan_here))

    q, v = rows[0], rows[2]
    none = jnp.zeros((size + most, q.shape[1], v.shape[2]), q.dtype), jnp.zeros(size, jnp.int32)
    first = jnp.int32(0), slots, none
    _, slots, (out, n_nan) = lax.while_loop(lambda c: c[0] < n, part, first)
    return slots, (out[:size], n_nan)


def attend_and_keep(
    spec: SlotSpec,
    slots: HeadSlots,
    rows: Inputs,
    n: Int32[Array, ""],
    sinks: Float[Array, " Q"] | None,
) -> tuple[HeadSlots, Float[Array, "T Q Dv"], Int32[Array, ""]]:
    """Attention of the first n tokens, which then are in the slots; evicts where it is time to.

    Args:
      spec: of the layer.
      slots: with n free ones at least; written in place.
      rows: as in `recurrence`; from n on anything finite.
      n: how many tokens count; where not all slots are read, `n_of_one_kind` of the first at most.
      sinks: as in `recurrence`.

    Returns:
      The slots, the output, and the number of scores that were NaN in an eviction.
    """
    reads = spec.policy.reads

    def all_read() -> tuple[SlotMarks, Array]:
        marks, out = _read_all(spec, slots, rows, n, sinks)
        return marks if reads is None else choose_slots(reads, marks, rows[3][0]), out

    def some_read() -> tuple[SlotMarks, Array]:
        assert reads is not None, "asked for below"
        held = chosen_slots(reads, slots, rows[3])
        q, own = _placed(spec, slots.marks.filled, rows)
        s = softmax.scores(q, held.keys, spec.group.score_scale, spec.group.soft_cap)
        s, visible = _masked(s, own, held.sees, n)
        p = _weights(s, visible, sinks)
        n_held = held.values.shape[1]
        seen = jnp.where(jnp.any(held.sees, axis=1)[:, :, None], held.values, 0.0)
        out = _weighted(p[..., :n_held], seen) + _of_own(p[..., n_held:], rows[2], n)
        marks = _with_marks(slots.marks, rows[3], n)
        return dataclasses.replace(marks, sums=_faded(spec, marks.sums, n)), _by_token(out, rows[0])

    if reads is None:
        marks, out = all_read()
    else:
        marks, out = lax.cond(refreshes(reads, rows[3][0]), all_read, some_read)
    places = slots.marks.places(rows[0].shape[0], n)
    after = head_slots.with_tokens(
        slots, rows[1], rows[2], order_after(out.astype(jnp.float32), places)
    )
    after, n_nan = lax.cond(
        marks.filled == evicts_at(spec, marks),
        functools.partial(evict, spec),
        lambda slots: (slots, jnp.int32(0)),
        dataclasses.replace(after, marks=marks),
    )
    return after, out, n_nan


def _read_all(
    spec: SlotSpec, slots: HeadSlots, rows: Inputs, n: Array, sinks: Array | None
) -> tuple[SlotMarks, Float[Array, "T Q Dv"]]:
    """Attention to all that the slots hold, and marks with the tokens and new sums."""
    marks, n_tokens, group = slots.marks, rows[0].shape[0], spec.group
    n_kv, n_slots = marks.pos.shape
    q, own = _placed(spec, marks.filled, rows)
    size = min(TILE, n_slots)
    n_tiles = -(-marks.filled // size) if size < n_slots else 1

    def score(i: AnyArray, s: Array) -> Array:
        start = jnp.minimum(i * size, n_slots - size)
        keys = compared_keys(spec, slots, start, size)
        found = softmax.scores(q, keys, group.score_scale, group.soft_cap)
        return lax.dynamic_update_slice_in_dim(s, found, start, 2)

    s = lax.fori_loop(0, n_tiles, score, jnp.zeros((*q.shape[:2], n_slots), jnp.float32))
    sees = jnp.broadcast_to(marks.taken[:, None], (n_kv, n_tokens, n_slots))
    s, visible = _masked(s, own, sees, n)
    p = _weights(s, visible, sinks)

    def weigh(i: AnyArray, out: Array) -> Array:
        start = jnp.minimum(i * size, n_slots - size)
        # The last tile begins with some of the one before.
        again = start + jnp.arange(size, dtype=jnp.int32) < i * size
        taken = lax.dynamic_slice_in_dim(marks.taken, start, size, 1) & ~again[None]
        values = head_slots.some_values(slots, start, size)
        weights = lax.dynamic_slice_in_dim(p, start, size, 3)
        return out + _weighted(
            jnp.where(taken[:, None, None], weights, 0.0),
            jnp.where(taken[:, :, None], values, 0.0),
        )

    out = lax.fori_loop(0, n_tiles, weigh, _of_own(p[..., n_slots:], rows[2], n))
    own_pos = jnp.broadcast_to(rows[3], (n_kv, n_tokens))
    all_pos = jnp.concatenate([marks.pos, own_pos], axis=1)
    observed = Observed(logits=s, probabilities=p, visible=visible, pos=all_pos)
    return _with_sums(spec, marks, rows, observed, n), _by_token(out, rows[0])


def _placed(
    spec: SlotSpec, filled: Array, rows: Inputs
) -> tuple[Float[Array, "H P D"], Float[Array, "H P T"]]:
    """Queries by kv head as they are compared, and their scores of the step's own keys."""
    q, k = rows[:2]
    if spec.by_place is not None:
        index = jnp.arange(q.shape[0], dtype=jnp.int32)
        tables, layout = spec.tables(filled + index), spec.by_place.layout
        q, k = (rope.rotate(x, *tables, layout) for x in (q, k))
    own, by_head = jnp.transpose(k, (1, 2, 0)).astype(jnp.float32), _by_kv_head(q, k.shape[1])
    return by_head, softmax.scores(by_head, own, spec.group.score_scale, spec.group.soft_cap)


def _masked(
    s: Float[Array, "H P S"], own: Float[Array, "H P T"], sees: Bool[Array, "H T S"], n: Array
) -> tuple[Float[Array, "H G T A"], Bool[Array, "H 1 T A"]]:
    """Masked scores of slots and of the step's own tokens, and which of them a token sees."""
    n_kv, n_tokens = sees.shape[:2]
    index = jnp.arange(n_tokens, dtype=jnp.int32)
    causal = (index[None] <= index[:, None]) & (index[None] < n)
    causal = jnp.broadcast_to(causal, (n_kv, n_tokens, n_tokens))
    visible = jnp.concatenate([sees, causal], axis=2)[:, None]
    s = jnp.concatenate([s, own], axis=2).reshape(n_kv, -1, n_tokens, visible.shape[3])
    return jnp.where(visible, s, softmax.MASKED), visible


def _of_own(
    p: Float[Array, "H G T T"], v: Float[Array, "T H Dv"], n: Array
) -> Float[Array, "H P Dv"]:
    """The step's own values by their weights; those from n on may be no number."""
    counts = jnp.arange(v.shape[0], dtype=jnp.int32) < n
    own = jnp.where(counts[:, None, None], v.astype(jnp.float32), 0.0)
    return _weighted(p, jnp.transpose(own, (1, 0, 2)))


def _weighted(p: Float[Array, "H G T S"], values: Float[Array, "H S Dv"]) -> Float[Array, "H P Dv"]:
    """Sums of values by weights."""
    by_head = p.reshape(p.shape[0], -1, p.shape[3])
    return lax.dot_general(by_head, values, (((2,), (1,)), ((0,), (0,))))


def _by_token(out: Float[Array, "H P Dv"], q: Float[Array, "T Q D"]) -> Float[Array, "T Q Dv"]:
    """Outputs in the order of the queries."""
    n_kv, _, dim = out.shape
    by_token = jnp.transpose(out.reshape(n_kv, -1, q.shape[0], dim), (2, 0, 1, 3))
    return by_token.reshape(q.shape[0], q.shape[1], dim).astype(q.dtype)


def _weights(
    s: Float[Array, "H G T S"], visible: Array, sinks: Float[Array, " Q"] | None
) -> Float[Array, "H G T S"]:
    """The softmax of masked scores."""
    top = jnp.max(s, axis=3, keepdims=True)
    if sinks is None:
        p = jnp.where(visible, jnp.exp(s - top), 0.0)
        total = jnp.sum(p, axis=3, keepdims=True)
    else:
        of_head = sinks.astype(jnp.float32).reshape(s.shape[0], s.shape[1], 1, 1)
        top = jnp.maximum(top, of_head)
        p = jnp.where(visible, jnp.exp(s - top), 0.0)
        total = jnp.sum(p, axis=3, keepdims=True) + jnp.exp(of_head - top)
    return p / jnp.where(total == 0, 1.0, total)


def _faded(spec: SlotSpec, sums: Float[Array, "H S"], n: Array) -> Float[Array, "H S"]:
    """Sums after n further queries."""
    return sums * jnp.float32(spec.policy.observed_by.decay) ** n.astype(jnp.float32)


def _with_marks(marks: SlotMarks, pos: Int32[Array, " T"], n: Array) -> SlotMarks:
    """Marks with the first n tokens, whose sums are 0."""
    at = marks.places(pos.shape[0], n)
    return dataclasses.replace(
        marks,
        pos=marks.pos.at[:, at].set(pos[None], mode="drop"),
        sums=marks.sums.at[:, at].set(0.0, mode="drop"),
        filled=marks.filled + n,
    )


def _with_sums(
    spec: SlotSpec, marks: SlotMarks, rows: Inputs, observed: Observed, n: Array
) -> SlotMarks:
    """Marks with the first n tokens, and what their queries add to the sums of all."""
    policy, tap, n_slots = spec.policy, spec.policy.observed_by, marks.pos.shape[1]
    n_tokens = rows[0].shape[0]
    index = jnp.arange(n_tokens, dtype=jnp.int32)
    counts = index < n
    if tap.horizon is not None:
        counts &= marks.filled + index >= evicts_at(spec, marks) - tap.horizon
    weight = jnp.where(counts, jnp.float32(tap.decay) ** (n - 1 - index).astype(jnp.float32), 0.0)
    added = real_numbers(policy.observe, observed, observed.probabilities.shape)
    added *= weight[None, None, :, None]
    joined = jnp.max if tap.greatest else jnp.sum
    added = joined(jnp.where(counts[None, None, :, None], added, 0.0), axis=(1, 2))
    kept, old = _faded(spec, marks.sums, n), added[:, :n_slots]
    after = _with_marks(marks, rows[3], n)
    at = marks.places(n_tokens, n)
    sums = jnp.maximum(kept, old) if tap.greatest else kept + old
    after = dataclasses.replace(after, sums=sums.at[:, at].set(added[:, n_slots:], mode="drop"))
    if marks.queries is None:
        return after
    # Queries of sinks say little of those to come.
    is_one = (index < n) & (rows[3] >= policy.n_sink)
    q = jnp.where(is_one[:, None, None], rows[4].astype(jnp.float32), 0.0)
    sums = marks.queries
    new = QuerySums(
        n=sums.n + jnp.sum(is_one.astype(jnp.float32)),
        q=sums.q + jnp.sum(q, axis=0),
        qq=sums.qq + jnp.einsum("tqd,tqe->qde", q, q),
    )
    return dataclasses.replace(after, queries=new)


def _by_kv_head(q: Float[Array, "T Q D"], n_kv: int) -> Float[Array, "H P D"]:
    """Queries of one kv head side by side, heads before tokens."""
    n_tokens, n_q, d = q.shape
    q = q.astype(jnp.float32).reshape(n_tokens, n_kv, n_q // n_kv, d)
    return jnp.transpose(q, (1, 2, 0, 3)).reshape(n_kv, n_q // n_kv * n_tokens, d)
