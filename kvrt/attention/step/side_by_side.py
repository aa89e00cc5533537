"""One token over eight blocks a pass, as sums that CPU cores share.

XLA runs a product of so few rows on one thread. A sum of several operands, here the queries of a
kv head, it leaves alone; of at most 16 terms LLVM unrolls it and vectorizes over neighbouring cells
or channels, and cores divide it by blocks. What a sum multiplies with has to be in memory: if its
loop computes that, LLVM does not vectorize. XLA fuses nothing across a conditional.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import Array, Float, Int
from kvrt.attention import softmax
from kvrt.attention.types import LayerAttention, LayerKV
from kvrt.attention.view import BlockView
from kvrt.store.codec import KVArray, Quantized, decode
from kvrt.store.per_channel import KeyArray, PerChannel

# Blocks of a pass, those left over that are worth one more, and cells of each: measured on Zen 4
# with three kv heads and nine query heads of 64.
_N_SIDE, _LEAST, _N_CELLS = 8, 4, 256
# Terms of a sum, and operands whose accumulators stay in registers.
_TERMS, _OPERANDS = 16, range(2, 9)
# Bytes of a number up to which keys are copied first: read by rows that lie apart, memory is slow.
_MOST_COPIED = 2


def takes(q: Float[Array, "H G D"], kv: LayerKV, view: BlockView, how: LayerAttention) -> bool:
    """Whether the sums are written for these queries, keys and values."""
    plain = how.rope is None and how.grouped is None and not how.group.latent_rank
    return (
        plain
        and view.block_size == _N_CELLS
        and view.blocks.shape[0] >= _LEAST
        and q.shape[1] in _OPERANDS
        and q.shape[2] % _TERMS == 0
        and all(map(_is_plain, (kv.k, kv.v)))
    )


def _is_plain(cached: KeyArray) -> bool:
    """Whether these are floats, or integers of a byte with one scale a head."""
    if isinstance(cached, Quantized):
        return cached.codec.bits == 8 and cached.codec.group is None
    return not isinstance(cached, PerChannel)


def _stored(cached: KeyArray) -> Array:
    """Integers or floats as they are kept."""
    assert not isinstance(cached, PerChannel), "keys that `takes` refuses"
    return jnp.asarray(cached.data) if isinstance(cached, Quantized) else cached


def attend(
    begin: softmax.Partial,
    q: Float[Array, "H G D"],
    kv: LayerKV,
    view: BlockView,
    how: LayerAttention,
) -> tuple[softmax.Partial, Int[Array, ""]]:
    """`begin` with the first blocks of the list, and how many these are: 0 on GPUs and TPUs."""
    n_passes = lax.platform_dependent(
        jnp.asarray(view.n_blocks),
        cpu=lambda n: (n + (_N_SIDE - _LEAST)) // _N_SIDE,
        default=jnp.zeros_like,
    )
    blocks = jnp.pad(view.blocks, (0, -view.blocks.shape[0] % _N_SIDE)).reshape(-1, _N_SIDE)
    queries = q * jnp.float32(how.group.score_scale)

    def step(i: Array, part: softmax.Partial) -> softmax.Partial:
        ids = blocks[i]
        listed = i * _N_SIDE + jnp.arange(_N_SIDE) < view.n_blocks
        visible, keys, scales = _apart(ids, lambda: _read(kv, view, how, ids, listed))
        keys = _stored(kv.k)[ids] if keys is None else keys
        s = softmax.capped(_scores(queries, keys, scales[0]), how.group.soft_cap)
        s = jnp.where(visible != 0, s, -jnp.inf)
        m = jnp.maximum(part.m, jnp.max(s, axis=(1, 3)).T)
        p, of_values = jnp.exp(s - m.T[:, None, :, None]), scales[1]
        weights = p[..., None]
        if of_values is not None:
            weights = _apart(ids, lambda: p[..., None] * of_values[None])
        old = jnp.exp(part.m - m)
        acc = part.acc * old[:, :, None] + _values(weights, kv.v, ids, visible)
        return softmax.Partial(m=m, l=part.l * old + jnp.sum(p, axis=(1, 3)).T, acc=acc)

    return lax.fori_loop(0, n_passes, step, begin), n_passes * _N_SIDE


def _apart(ids: Array, made: Callable[[], Any]) -> Any:
    """What a function makes, in memory: no id is below zero, which XLA does not know."""
    shapes = jax.eval_shape(made)
    nothing = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.cond(ids[0] >= 0, made, nothing)


def _read(
    kv: LayerKV, view: BlockView, how: LayerAttention, ids: Array, listed: Array
) -> tuple[Int[Array, "S 1 B"], Any, list[Any]]:
    """What is seen as bits, the integers or floats of keys, and scales of keys and values."""
    pos, seqs = view.cell_pos[ids].reshape(-1), view.cell_seqs[ids]
    seen = view.sees(pos, seqs.reshape(pos.shape[0], -1), how.group.mask)[0]
    visible = -(seen.reshape(len(ids), 1, -1) & listed[:, None, None]).astype(jnp.int32)
    k, v = kv.k, kv.v
    data = _stored(k)
    keys = data[ids] if data.dtype.itemsize <= _MOST_COPIED else None
    of_keys = k.scale[ids].astype(jnp.float32) if isinstance(k, Quantized) else None
    if not isinstance(v, Quantized):
        return visible, keys, [of_keys, None]
    of_values = jnp.where(visible[..., None] != 0, v.scale[ids].astype(jnp.float32), 0.0)
    return visible, keys, [of_keys, of_values]


def _scores(
    q: Float[Array, "H G D"], keys: Array, scales: Float[Array, "S H _ B"] | None
) -> Float[Array, "G S H B"]:
    """Products of queries, which are scaled, with the keys of all blocks."""
    n, (n_kv, n_group, d) = keys.shape[0], q.shape
    wide = _as_floats(keys).reshape(n, n_kv, d // _TERMS, _TERMS, -1)
    factors = q.reshape(1, n_kv, n_group, d // _TERMS, _TERMS, 1)
    found = []
    for sums in _summed([wide * factors[:, :, j] for j in range(n_group)], 3):
        parts = [sums[:, :, i] for i in range(sums.shape[2])]
        if scales is not None:
            n_each = len(parts) // scales.shape[2]
            parts = [x * scales[:, :, i // n_each] for i, x in enumerate(parts)]
        found.append(functools.reduce(operator.add, parts))
    return jnp.stack(found)


def _values(
    weights: Float[Array, "G S H B _"], v: KVArray, ids: Array, visible: Array
) -> Float[Array, "H G D"]:
    """Weighted sums of values; floats that are not seen are replaced by zero, whatever they are."""
    (n_group, n, n_kv, n_cells, n_scales) = weights.shape
    cut = (n, n_kv, n_cells // _TERMS, _TERMS, n_scales)
    if isinstance(v, Quantized):
        wide = v.data[ids].astype(jnp.float32)
    else:
        bits = lax.bitcast_convert_type(v[ids], f"uint{8 * v.dtype.itemsize}")
        bits &= visible.astype(bits.dtype)[..., None]
        wide = _as_floats(lax.bitcast_convert_type(bits, v.dtype))
    wide = wide.reshape(*cut, -1)
    sums = _summed([wide * weights[j].reshape(*cut, 1) for j in range(n_group)], 3)
    each = [x.reshape(n, n_kv, -1) for x in _summed(sums, 2)]
    return jnp.stack([functools.reduce(operator.add, list(x)) for x in each], axis=1)


def _as_floats(x: Array) -> Float[Array, "..."]:
    return x.astype(jnp.float32) if x.dtype == jnp.int8 else decode(x, -1)


def _summed(terms: Sequence[Array], axis: int) -> list[Array]:
    """Sums of several arrays over an axis, by one reduction."""
    zeros = (jnp.float32(0),) * len(terms)
    add = lambda a, b: tuple(map(operator.add, a, b))  # noqa: E731
    return list(lax.reduce(tuple(terms), zeros, add, (axis,)))
