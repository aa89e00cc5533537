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

from kvrt.arrays import AnyArray, Array, Float, Int32
from kvrt.attention import softmax
from kvrt.attention.contract import ChunkedStep, Inputs, State, Step
from kvrt.attention.scored import head_slots
from kvrt.attention.scored.head_slots import HeadSlots, QuerySums, SlotShape
from kvrt.attention.scored.policy import Observed, ScoredPolicy, Seen
from kvrt.config import GroupSpec
from kvrt.kv_types import KeyDtype, KVDtype

# Tokens that one call of the chunked form takes; it runs them an interval at a time.
CHUNK = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSpec:
    """Slots of one layer, and who chooses what is in them; hashable, static in jit.

    Attributes:
      group: of the layer.
      policy: scores tokens.
      budget: tokens of a head that stay in an eviction.
      type_k: KV dtype of keys.
      type_v: KV dtype of values.
      n_ctx: cells of the cache.
      n_q_heads: query heads whose sums are kept; 0 keeps none.
      parts: kv heads and their slots, where heads have other numbers of them; see `split`.
    """

    group: GroupSpec
    policy: ScoredPolicy
    budget: int
    type_k: KeyDtype
    type_v: KVDtype
    n_ctx: int
    n_q_heads: int = 0
    parts: "tuple[tuple[tuple[int, ...], SlotSpec], ...]" = ()

    @property
    def n_slots(self) -> int:
        """Slots of a head."""
        return self.budget + self.policy.interval


def empty_slots(spec: SlotSpec) -> HeadSlots:
    """Slots of which none is taken: all arrays are zero."""
    shape = SlotShape(
        n_kv_heads=spec.group.n_kv_heads,
        n_slots=spec.n_slots,
        dim_k=spec.group.dim_k,
        dim_v=spec.group.dim_v,
        type_k=spec.type_k,
        type_v=spec.type_v,
        n_q_heads=spec.n_q_heads,
    )
    return head_slots.create(shape)


def slots_of(spec: SlotSpec, arrays: tuple[AnyArray, ...]) -> HeadSlots:
    """Slots of the arrays of a state."""
    tree = jax.tree.structure(jax.eval_shape(lambda: empty_slots(spec)))
    return jax.tree.unflatten(tree, arrays)


def recurrence(
    spec: SlotSpec, sinks: Float[Array, " Q"] | None
) -> tuple[Step[Array], ChunkedStep[Array]]:
    """The step of one token and that of many.

    Inputs are queries [T, Q, D] and keys [T, H, D] with RoPE applied, values [T, H, Dv], positions
    [T] and, where the policy's tap wants them, queries without RoPE [T, Q, D].

    Args:
      spec: of the layer.
      sinks: a logit a query head that joins the softmax and carries no value, or None.
    """

    def one(state: State, token: Inputs) -> tuple[State, Array]:
        rows = tuple(x[None] for x in token)
        slots, out = attend_and_keep(spec, slots_of(spec, state), rows, jnp.int32(1), sinks)
        return tuple(jax.tree.leaves(slots)), out[0]

    def many(state: State, rows: Inputs, n: Array) -> tuple[State, Array]:
        slots, out = _in_parts(spec, slots_of(spec, state), rows, n, sinks)
        return tuple(jax.tree.leaves(slots)), out

    return one, ChunkedStep(run=many, size=CHUNK)


def _in_parts(
    spec: SlotSpec, slots: HeadSlots, rows: Inputs, n: Array, sinks: Array | None
) -> tuple[HeadSlots, Array]:
    """As `attend_and_keep`, of more tokens than may come in between two evictions."""
    size = rows[0].shape[0]
    most = min(spec.policy.interval, size)
    padded = tuple(jnp.pad(x, [(0, most)] + [(0, 0)] * (x.ndim - 1)) for x in rows)

    def part(carry: tuple[Array, HeadSlots, Array]) -> tuple[Array, HeadSlots, Array]:
        i, slots, out = carry
        here = tuple(lax.dynamic_slice_in_dim(x, i, most) for x in padded)
        m = jnp.minimum(jnp.minimum(spec.n_slots - slots.filled, n - i), most)
        slots, y = attend_and_keep(spec, slots, here, m, sinks)
        # What is written beyond the part is written again by the next one.
        return i + m, slots, lax.dynamic_update_slice_in_dim(out, y, i, 0)

    q, v = rows[0], rows[2]
    out = jnp.zeros((size + most, q.shape[1], v.shape[2]), q.dtype)
    _, slots, out = lax.while_loop(lambda c: c[0] < n, part, (jnp.int32(0), slots, out))
    return slots, out[:size]


def attend_and_keep(
    spec: SlotSpec,
    slots: HeadSlots,
    rows: Inputs,
    n: Int32[Array, ""],
    sinks: Float[Array, " Q"] | None,
) -> tuple[HeadSlots, Float[Array, "T Q Dv"]]:
    """Attention of the first n tokens, which then are in the slots; evicts where all are taken.

    Args:
      spec: of the layer.
      slots: with n free ones at least.
      rows: as in `recurrence`; from n on anything finite.
      n: how many tokens count.
      sinks: as in `recurrence`.
    """
    q, k, v, pos = rows[:4]
    n_tokens, n_kv, n_slots = q.shape[0], k.shape[1], spec.n_slots
    by_head = _by_kv_head(q, n_kv)
    index = jnp.arange(n_tokens, dtype=jnp.int32)
    own = jnp.transpose(k, (1, 2, 0)).astype(jnp.float32)
    group = spec.group
    s = jnp.concatenate(
        [
            softmax.scores(by_head, x, group.score_scale, group.soft_cap)
            for x in (head_slots.slot_keys(slots), own)
        ],
        axis=2,
    ).reshape(n_kv, -1, n_tokens, n_slots + n_tokens)
    taken = jnp.broadcast_to(jnp.arange(n_slots) < slots.filled, (n_tokens, n_slots))
    causal = (index[None] <= index[:, None]) & (index[None] < n)
    visible = jnp.concatenate([taken, causal], axis=1)[None, None]
    s = jnp.where(visible, s, softmax.MASKED)
    p = _weights(s, visible, sinks)
    seen = jnp.concatenate(
        [head_slots.slot_values(slots), jnp.transpose(v, (1, 0, 2)).astype(jnp.float32)], axis=1
    )
    seen = jnp.where(jnp.any(visible[0, 0], axis=0)[None, :, None], seen, 0.0)
    out = lax.dot_general(p.reshape(n_kv, -1, p.shape[3]), seen, (((2,), (1,)), ((0,), (0,))))
    out = jnp.transpose(out.reshape(n_kv, -1, n_tokens, v.shape[2]), (2, 0, 1, 3))
    all_pos = jnp.concatenate([slots.pos, jnp.broadcast_to(pos, (n_kv, n_tokens))], axis=1)
    see = jnp.broadcast_to(visible, (n_kv, 1, n_tokens, p.shape[3]))
    observed = Observed(logits=s, probabilities=p, visible=see, pos=all_pos)
    after = _with_tokens(spec, slots, rows, observed, n)
    after = lax.cond(
        after.filled == n_slots, functools.partial(evict, spec), lambda slots: slots, after
    )
    return after, out.reshape(q.shape[0], q.shape[1], v.shape[2]).astype(q.dtype)


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


def _with_tokens(
    spec: SlotSpec, slots: HeadSlots, rows: Inputs, observed: Observed, n: Array
) -> HeadSlots:
    """The slots with the first n tokens, and what their queries add to the sums of all."""
    policy, tap, n_slots = spec.policy, spec.policy.observed_by, spec.n_slots
    n_tokens = rows[0].shape[0]
    index = jnp.arange(n_tokens, dtype=jnp.int32)
    counts = index < n
    if tap.horizon is not None:
        counts &= slots.filled + index >= n_slots - tap.horizon
    weight = jnp.where(counts, jnp.float32(tap.decay) ** (n - 1 - index).astype(jnp.float32), 0.0)
    added = policy.observe(observed) * weight[None, None, :, None]
    joined = jnp.max if tap.greatest else jnp.sum
    added = joined(jnp.where(counts[None, None, :, None], added, 0.0), axis=(1, 2))
    kept, old = slots.sums * jnp.float32(tap.decay) ** n.astype(jnp.float32), added[:, :n_slots]
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


def evict(spec: SlotSpec, slots: HeadSlots) -> HeadSlots:
    """The slots with `budget` tokens a head: sinks, the newest, and those that score highest."""
    policy = spec.policy
    n_past = jnp.max(slots.pos) + 1
    seen = Seen(
        keys=jnp.transpose(head_slots.slot_keys(slots), (0, 2, 1)),
        values=head_slots.slot_values(slots),
        pos=slots.pos,
        sums=slots.sums,
        n_past=n_past,
        queries=slots.queries,
        group=spec.group,
        n_ctx=spec.n_ctx,
    )
    stays = (slots.pos < policy.n_sink) | (slots.pos >= n_past - policy.recent)
    found = jnp.clip(policy.score(seen), -_GREATEST, _GREATEST)
    _, index = lax.top_k(jnp.where(stays, jnp.inf, found), spec.budget)
    after = head_slots.keep_only(slots, jnp.sort(index, axis=1))
    if policy.observed_by.horizon is not None:
        after = dataclasses.replace(after, sums=jnp.zeros_like(after.sums))
    return after


# Below what protected tokens have.
_GREATEST = float(jnp.finfo(jnp.float32).max)


def _by_kv_head(q: Float[Array, "T Q D"], n_kv: int) -> Float[Array, "H P D"]:
    """Queries of one kv head side by side, heads before tokens."""
    n_tokens, n_q, d = q.shape
    q = q.astype(jnp.float32).reshape(n_tokens, n_kv, n_q // n_kv, d)
    return jnp.transpose(q, (1, 2, 0, 3)).reshape(n_kv, n_q // n_kv * n_tokens, d)
