"""Attention of a layer over slots that are each head's own, and which tokens stay in them.

It has the form of a recurrence (`kvrt.attention.Attend.recur`): a state, and one token or many.
Tokens see the slots that are taken, and each other; then they come in, and where all slots are
taken those of the least scores go. Many at once give what one by one gives, up to rounding.

Source: arXiv:2306.14048 (H2O), sec. 4; arXiv:2404.14469 (SnapKV).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Bool, Float, Int32
from kvrt.attention import softmax
from kvrt.attention.contract import ChunkedStep, Inputs, State, Step
from kvrt.attention.scored import head_slots
from kvrt.attention.scored.evict import evict, evicts_at
from kvrt.attention.scored.head_slots import HeadSlots, QuerySums
from kvrt.attention.scored.policy import Observed, real_numbers
from kvrt.attention.scored.reads import SlotKV, choose_slots, chosen_slots, n_of_one_kind, refreshes
from kvrt.attention.scored.spec import SlotSpec, compared_keys, slots_of
from kvrt.store import rope

# Tokens that one call of the chunked form takes; it runs them an interval at a time.
CHUNK = 512
# Of each token the attention output, and how many scores were NaN in the eviction behind it.
Scored = tuple[Array, Array]


def recurrence(
    spec: SlotSpec, sinks: Float[Array, " Q"] | None
) -> tuple[Step[Scored], ChunkedStep[Scored]]:
    """The step of one token and that of many.

    Inputs are queries [T, Q, D] and keys [T, H, D] with RoPE applied, values [T, H, Dv], positions
    [T] and, where the policy's tap wants them, queries without RoPE [T, Q, D]. Where keys are
    compared by place (`close_up`) RoPE is applied here, and slots have keys without it.

    Args:
      spec: of the layer.
      sinks: a logit a query head that joins the softmax and carries no value, or None.
    """

    def one(state: State, token: Inputs) -> tuple[State, Scored]:
        rows = tuple(x[None] for x in token)
        slots, out, n_nan = attend_and_keep(spec, slots_of(spec, state), rows, jnp.int32(1), sinks)
        return tuple(jax.tree.leaves(slots)), (out[0], n_nan)

    def many(state: State, rows: Inputs, n: Array) -> tuple[State, Scored]:
        slots, out = _in_parts(spec, slots_of(spec, state), rows, n, sinks)
        return tuple(jax.tree.leaves(slots)), out

    return one, ChunkedStep(run=many, size=CHUNK)


def _in_parts(
    spec: SlotSpec, slots: HeadSlots, rows: Inputs, n: Array, sinks: Array | None
) -> tuple[HeadSlots, Scored]:
    """As `attend_and_keep`, of more tokens than may come in between two evictions."""
    size = rows[0].shape[0]
    most = min(spec.policy.interval, size)
    padded = tuple(jnp.pad(x, [(0, most)] + [(0, 0)] * (x.ndim - 1)) for x in rows)

    def part(carry: tuple[Array, HeadSlots, Scored]) -> tuple[Array, HeadSlots, Scored]:
        i, slots, (out, n_nan) = carry
        here = tuple(lax.dynamic_slice_in_dim(x, i, most) for x in padded)
        m = jnp.minimum(jnp.minimum(evicts_at(spec, slots) - slots.filled, n - i), most)
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
      slots: with n free ones at least.
      rows: as in `recurrence`; from n on anything finite.
      n: how many tokens count; where not all slots are read, `n_of_one_kind` of the first at most.
      sinks: as in `recurrence`.

    Returns:
      The slots, the output, and the number of scores that were NaN in an eviction.
    """
    reads = spec.policy.reads

    def all_read(slots: HeadSlots) -> tuple[HeadSlots, Array]:
        after, out = _read_all(spec, slots, rows, n, sinks)
        return after if reads is None else choose_slots(reads, after, rows[3][0]), out

    def some_read(slots: HeadSlots) -> tuple[HeadSlots, Array]:
        assert reads is not None, "asked for below"
        held = chosen_slots(reads, slots, rows[3])
        s, visible, values = _scores(spec, held, rows, n, slots.filled)
        after = head_slots.with_tokens(slots, rows[1], rows[2], rows[3], n)
        out = _output(_weights(s, visible, sinks), visible, values, rows[0])
        return dataclasses.replace(after, sums=_faded(spec, after.sums, n)), out

    if reads is None:
        after, out = all_read(slots)
    else:
        after, out = lax.cond(refreshes(reads, rows[3][0]), all_read, some_read, slots)
    after, n_nan = lax.cond(
        after.filled == evicts_at(spec, after),
        functools.partial(evict, spec),
        lambda slots: (slots, jnp.int32(0)),
        after,
    )
    return after, out, n_nan


def _read_all(
    spec: SlotSpec, slots: HeadSlots, rows: Inputs, n: Array, sinks: Array | None
) -> tuple[HeadSlots, Float[Array, "T Q Dv"]]:
    """Attention to all that the slots hold, and the slots with the tokens and new sums."""
    n_kv, n_slots = slots.pos.shape
    held = SlotKV(
        keys=compared_keys(spec, slots),
        values=head_slots.slot_values(slots),
        sees=jnp.broadcast_to(slots.taken[:, None], (n_kv, rows[0].shape[0], n_slots)),
    )
    s, visible, values = _scores(spec, held, rows, n, slots.filled)
    p = _weights(s, visible, sinks)
    out = _output(p, visible, values, rows[0])
    own = jnp.broadcast_to(rows[3], (n_kv, rows[0].shape[0]))
    all_pos = jnp.concatenate([slots.pos, own], axis=1)
    observed = Observed(logits=s, probabilities=p, visible=visible, pos=all_pos)
    return _with_tokens(spec, slots, rows, observed, n), out


def _scores(
    spec: SlotSpec, held: SlotKV, rows: Inputs, n: Array, filled: Array
) -> tuple[Float[Array, "H G T S"], Bool[Array, "H 1 T S"], Float[Array, "H S Dv"]]:
    """Masked scores of slots and of the step's own tokens, what is seen, and the values."""
    q, k, v, _ = rows[:4]
    n_tokens, n_kv, group = q.shape[0], k.shape[1], spec.group
    index = jnp.arange(n_tokens, dtype=jnp.int32)
    if spec.by_place is not None:
        tables, layout = spec.tables(filled + index), spec.by_place.layout
        q, k = (rope.rotate(x, *tables, layout) for x in (q, k))
    own = jnp.transpose(k, (1, 2, 0)).astype(jnp.float32)
    by_head = _by_kv_head(q, n_kv)
    s = jnp.concatenate(
        [softmax.scores(by_head, x, group.score_scale, group.soft_cap) for x in (held.keys, own)],
        axis=2,
    ).reshape(n_kv, -1, n_tokens, held.keys.shape[2] + n_tokens)
    causal = (index[None] <= index[:, None]) & (index[None] < n)
    causal = jnp.broadcast_to(causal, (n_kv, n_tokens, n_tokens))
    visible = jnp.concatenate([held.sees, causal], axis=2)[:, None]
    own_v = jnp.transpose(v, (1, 0, 2)).astype(jnp.float32)
    values = jnp.concatenate([held.values, own_v], axis=1)
    return jnp.where(visible, s, softmax.MASKED), visible, values


def _output(
    p: Float[Array, "H G T S"], visible: Array, values: Float[Array, "H S Dv"], q: Array
) -> Float[Array, "T Q Dv"]:
    """Values by their weights; what nobody sees may be no number."""
    seen = jnp.where(jnp.any(visible[:, 0], axis=1)[:, :, None], values, 0.0)
    n_kv, _, n_tokens, n = p.shape
    out = lax.dot_general(p.reshape(n_kv, -1, n), seen, (((2,), (1,)), ((0,), (0,))))
    out = jnp.transpose(out.reshape(n_kv, -1, n_tokens, seen.shape[2]), (2, 0, 1, 3))
    return out.reshape(n_tokens, q.shape[1], seen.shape[2]).astype(q.dtype)


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


def _with_tokens(
    spec: SlotSpec, slots: HeadSlots, rows: Inputs, observed: Observed, n: Array
) -> HeadSlots:
    """The slots with the first n tokens, and what their queries add to the sums of all."""
    policy, tap, n_slots = spec.policy, spec.policy.observed_by, spec.n_slots
    n_tokens = rows[0].shape[0]
    index = jnp.arange(n_tokens, dtype=jnp.int32)
    counts = index < n
    if tap.horizon is not None:
        counts &= slots.filled + index >= evicts_at(spec, slots) - tap.horizon
    weight = jnp.where(counts, jnp.float32(tap.decay) ** (n - 1 - index).astype(jnp.float32), 0.0)
    added = real_numbers(policy.observe, observed, observed.probabilities.shape)
    added *= weight[None, None, :, None]
    joined = jnp.max if tap.greatest else jnp.sum
    added = joined(jnp.where(counts[None, None, :, None], added, 0.0), axis=(1, 2))
    kept, old = _faded(spec, slots.sums, n), added[:, :n_slots]
    sums = jnp.maximum(kept, old) if tap.greatest else kept + old
    after = head_slots.with_tokens(
        dataclasses.replace(slots, sums=sums), rows[1], rows[2], rows[3], n
    )
    at = jnp.where(index < n, slots.filled + index, n_slots)
    after = dataclasses.replace(
        after, sums=after.sums.at[:, at].set(added[:, n_slots:], mode="drop")
    )
    if slots.queries is None:
        return after
    # Queries of sinks say little of those to come.
    is_one = (index < n) & (rows[3] >= policy.n_sink)
    q = jnp.where(is_one[:, None, None], rows[4].astype(jnp.float32), 0.0)
    sums = slots.queries
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
