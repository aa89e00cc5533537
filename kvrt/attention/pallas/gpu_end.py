"""The end of a decode step's attention on GPUs, a program a query: all splits, own token, sink.

What a kernel leaves to do is small where each token has a list of its own, but XLA makes five
programs of it, each of which takes as long to start as it runs. At 32 thousand tokens of one
sequence that would be a quarter of what reading its keys and values takes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kvrt.arrays import Array, Bool, Float
from kvrt.attention import softmax
from kvrt.attention.pallas import common
from kvrt.attention.pallas.gpu_kernel import power
from kvrt.attention.types import LayerAttention, TokenQKV
from kvrt.config import GroupSpec

# Values of the splits' sums that a program holds at once, in the registers of four warps.
_HELD = 8192


class _Shape(NamedTuple):
    """What is fixed when the kernel is traced."""

    head_dim: int
    n_splits: int
    group: GroupSpec


def end(
    work: common.KernelWork,
    sums: common.Sums,
    qkv: TokenQKV,
    sees: Bool[Array, " S"],
    how: LayerAttention,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "S Q D"], Float[Array, "S Q"]]:
    """See `common.EndOf`; `interpret` as in `gpu.sums`."""
    n_lists, n_kv, p, d = work.q.shape
    shape = _Shape(head_dim=d, n_splits=sums.m.shape[2], group=how.group)
    given = [work.q, sums.m, sums.l, sums.acc, qkv.k, qkv.v, sees.astype(jnp.int32)]
    if how.sinks is not None:
        given.append(how.sinks.astype(jnp.float32).reshape(n_kv, p))
    out, lse = pl.pallas_call(
        functools.partial(_run, shape),
        grid=(p, n_kv, n_lists),
        out_shape=(
            jax.ShapeDtypeStruct((n_lists, n_kv, p, d), work.q.dtype),
            jax.ShapeDtypeStruct((n_lists, n_kv, p), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="end_of_attention",
    )(*given)
    return out.reshape(n_lists, n_kv * p, d), lse.reshape(n_lists, n_kv * p)


def _run(shape: _Shape, *refs: Any) -> None:
    """One query of a token."""
    q_ref, m_ref, l_ref, acc_ref, k_ref, v_ref, sees_ref, *rest = refs
    *sinks, out_ref, lse_ref = rest
    query, head, token = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    channels = jnp.arange(power(shape.head_dim), dtype=jnp.int32)
    real = channels < shape.head_dim

    def own(ref: Any, *at: Any) -> Array:
        return plgpu.load(ref.at[token, head, *at, channels], mask=real, other=0).astype(
            jnp.float32
        )

    sees = sees_ref[token] > 0
    s = jnp.sum(own(q_ref, query) * own(k_ref)) * jnp.float32(shape.group.score_scale)
    s = jnp.where(sees, softmax.capped(s, shape.group.soft_cap), softmax.MASKED)
    splits = jnp.arange(shape.n_splits, dtype=jnp.int32)
    m = jnp.max(plgpu.load(m_ref.at[token, head, splits, query]))
    top = jnp.maximum(m, s)
    sink = sinks[0][head, query] if sinks else None
    if sink is not None:
        top = jnp.maximum(top, sink)
    # A token that does not see itself may hold anything.
    weight = jnp.where(sees, jnp.exp(s - top), 0.0)
    start = weight, jnp.where(sees, own(v_ref), 0.0) * weight
    at = token, head, query, channels, real
    total, acc = _add_splits(shape, (m_ref, l_ref, acc_ref), at, top, start)
    if sink is not None:
        total += jnp.exp(sink - top)
    some = total != 0  # true of NaN, which is passed on
    safe = jnp.where(some, total, 1.0)
    out = jnp.where(some, acc / safe, 0.0).astype(out_ref.dtype)
    plgpu.store(out_ref.at[token, head, query, channels], out, mask=real)
    lse_ref[token, head, query] = jnp.where(some, top + jnp.log(safe), softmax.MASKED)


def _add_splits(
    shape: _Shape, refs: tuple, at: tuple, top: Array, start: tuple
) -> tuple[Array, Array]:
    """Sum of weights and of weighted values with those of all splits, some splits at a time.

    Args:
      shape: what is fixed.
      refs: softmax sums of the splits.
      at: token, kv head, query, channels filled up to a power of two, and which are real.
      top: the greatest score.
      start: sums over the token itself.
    """
    (m_ref, l_ref, acc_ref), (token, head, query, channels, real) = refs, at
    n = min(shape.n_splits, max(_HELD // power(shape.head_dim), 1))

    def add(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        total, acc = carry
        some = i * n + jnp.arange(n, dtype=jnp.int32)
        # Not exp(0) where nothing has been seen at all: what is added is zero then.
        weight = jnp.exp(plgpu.load(m_ref.at[token, head, some, query]) - top)
        total += jnp.sum(plgpu.load(l_ref.at[token, head, some, query]) * weight)
        at = acc_ref.at[token, head, some[:, None], query, channels[None]]
        held = plgpu.load(at, mask=real[None], other=0)
        return total, acc + jnp.sum(held * weight[:, None], axis=0)

    return lax.fori_loop(0, shape.n_splits // n, add, start)
