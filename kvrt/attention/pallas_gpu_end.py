"""The end of a decode step's attention on GPUs, in one program a query: all splits, own row, sink.

What a kernel leaves to do is small where each token is a row of its own, but XLA makes five
programs of it, each of which takes as long to start as it runs. At 32 thousand tokens of one
sequence that would be a quarter of what reading the rows takes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvrt.arrays import Array, Bool, Float
from kvrt.attention import pallas_common as common
from kvrt.attention import softmax
from kvrt.attention.pallas_gpu_kernel import power
from kvrt.config import GroupSpec

# Values of the splits' sums that a program holds at once, in the registers of four warps.
_HELD = 8192


class _Shape(NamedTuple):
    """What is fixed when the kernel is traced."""

    head_dim: int
    n_splits: int
    group: GroupSpec


def end(
    work: common.Work,
    sums: common.Sums,
    k: Float[Array, "S H D"],
    v: Float[Array, "S H D"],
    sees: Bool[Array, " S"],
    group: GroupSpec,
    sinks: Float[Array, " Q"] | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "S Q D"], Float[Array, "S Q"]]:
    """Attention of tokens that are rows of their own: what a kernel summed, and themselves.

    Args:
      work: rows of one token each.
      sums: of the stored rows.
      k: the tokens' own keys, rotated.
      v: the tokens' own values.
      sees: which tokens see themselves.
      group: scale and soft cap.
      sinks: a logit a query head, or None.
      interpret: runs the program as XLA operations, on any device: for tests.

    Returns:
      Output in the queries' dtype and log-sum-exp in float32.
    """
    n_rows, n_kv, p, d = work.q.shape
    shape = _Shape(
        head_dim=d,
        n_splits=sums.m.shape[2],
        group=group,
    )
    given = [work.q, sums.m, sums.l, sums.acc, k, v, sees.astype(jnp.int32)]
    if sinks is not None:
        given.append(sinks.astype(jnp.float32).reshape(n_kv, p))
    out, lse = pl.pallas_call(
        functools.partial(_run, shape),
        grid=(p, n_kv, n_rows),
        out_shape=(
            jax.ShapeDtypeStruct((n_rows, n_kv, p, d), work.q.dtype),
            jax.ShapeDtypeStruct((n_rows, n_kv, p), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="end_of_attention",
    )(*given)
    return out.reshape(n_rows, n_kv * p, d), lse.reshape(n_rows, n_kv * p)


def _run(shape: _Shape, *refs: Any) -> None:
    """One query of a row."""
    q_ref, m_ref, l_ref, acc_ref, k_ref, v_ref, sees_ref, *rest = refs
    *sinks, out_ref, lse_ref = rest
    query, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    channels = jnp.arange(power(shape.head_dim), dtype=jnp.int32)
    real = channels < shape.head_dim

    def own(ref: Any, *at: Any) -> Array:
        return plgpu.load(ref.at[row, head, *at, channels], mask=real, other=0).astype(jnp.float32)

    sees = sees_ref[row] > 0
    s = jnp.sum(own(q_ref, query) * own(k_ref)) * jnp.float32(shape.group.score_scale)
    s = jnp.where(sees, softmax.capped(s, shape.group.soft_cap), softmax.MASKED)
    splits = jnp.arange(shape.n_splits, dtype=jnp.int32)
    m = jnp.max(plgpu.load(m_ref.at[row, head, splits, query]))
    top = jnp.maximum(m, s)
    sink = sinks[0][head, query] if sinks else None
    if sink is not None:
        top = jnp.maximum(top, sink)
    n = min(shape.n_splits, max(_HELD // power(shape.head_dim), 1))

    def add(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total, acc = carry
        some = i * n + jnp.arange(n, dtype=jnp.int32)
        # Not exp(0) where nothing has been seen at all: what is added is zero then.
        weight = jnp.exp(plgpu.load(m_ref.at[row, head, some, query]) - top)
        total += jnp.sum(plgpu.load(l_ref.at[row, head, some, query]) * weight)
        at = acc_ref.at[row, head, some[:, None], query, channels[None]]
        held = plgpu.load(at, mask=real[None], other=0)
        return total, acc + jnp.sum(held * weight[:, None], axis=0)

    # A token that does not see itself may hold anything.
    weight = jnp.where(sees, jnp.exp(s - top), 0.0)
    start = weight, jnp.where(sees, own(v_ref), 0.0) * weight
    total, acc = lax.fori_loop(0, shape.n_splits // n, add, start)
    if sink is not None:
        total += jnp.exp(sink - top)
    some = total != 0  # true of NaN, which is passed on
    safe = jnp.where(some, total, 1.0)
    out = jnp.where(some, acc / safe, 0.0).astype(out_ref.dtype)
    plgpu.store(out_ref.at[row, head, query, channels], out, mask=real)
    lse_ref[row, head, query] = jnp.where(some, top + jnp.log(safe), softmax.MASKED)
