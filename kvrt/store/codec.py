"""Codecs: rows as small whole numbers with scales that stay beside them.

A row of a head is cut into groups of channels, and each group has a scale; codes below eight bits
also have a minimum, for keys lie far from zero in some channels. Codes and scales have the block
and the cell on the same axes as plain rows, so whatever copies, moves or frees a row does the same
to all of them.

Source: llama.cpp `quantize_row_q8_0_ref`; arXiv:2402.02750 for the affine form.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Float
from kvrt.kv_types import CODECS, ROW_DTYPES, Codec, RowType
from kvrt.store.coded import AnyRows, Coded, code_dtype

__all__ = [
    "AnyRows",
    "Coded",
    "Rows",
    "affine",
    "code_dtype",
    "decode",
    "empty",
    "encode",
    "packed",
    "zeros",
]


jax.tree_util.register_dataclass(Coded)

Rows = Array | Coded  # of a layer, as they are stored on the device


def zeros(row_type: RowType, shape: tuple[int, ...], channel_axis: int) -> Rows:
    """Zeroed rows; bf16 as bits, see `kvrt.store.store`.

    Raises:
      BadConfig: the codec's groups do not fill a head.
    """
    codec = CODECS.get(row_type)
    if codec is None:
        return jnp.zeros(shape, "uint16" if row_type == "bf16" else ROW_DTYPES[row_type])
    return empty(codec, shape, channel_axis)


def empty(codec: Codec, shape: tuple[int, ...], channel_axis: int) -> Coded:
    """Zeroed codes and scales; cells that share a scale lie on the last axis.

    Raises:
      BadConfig: the codec's groups do not fill a head.
    """
    n_bytes, n_groups = codec.sizes(shape[channel_axis])
    codes, groups = list(shape), list(shape)
    codes[channel_axis], groups[channel_axis] = n_bytes, n_groups
    groups[-1] //= codec.cells
    return Coded(
        codes=jnp.zeros(codes, code_dtype(codec)),
        scale=jnp.zeros(groups, ROW_DTYPES[codec.scale]),
        low=jnp.zeros(groups, ROW_DTYPES[codec.scale]) if codec.affine else None,
        codec=codec,
    )


def decode(rows: AnyRows, channel_axis: int) -> Float[Array, "..."]:
    """Rows, or blocks or tiles of them, as float32.

    Args:
      rows: in the form in which they are stored.
      channel_axis: -2 for keys, -1 for values and for rows that were taken out.
    """
    if not isinstance(rows, Coded):
        if rows.dtype == jnp.uint16:
            rows = lax.bitcast_convert_type(rows, jnp.bfloat16)
        return jnp.asarray(rows).astype(jnp.float32)
    codes = _unpacked(jnp.asarray(rows.codes), rows.codec, channel_axis).astype(jnp.float32)
    found = _grouped(codes, rows.scale.shape[channel_axis], channel_axis)
    found *= jnp.expand_dims(_by_cell(rows.scale, rows.codec), channel_axis)
    if rows.low is not None:
        found += jnp.expand_dims(_by_cell(rows.low, rows.codec), channel_axis)
    return found.reshape(codes.shape)


def _by_cell(x: AnyArray, codec: Codec) -> Array:
    """Scales or minima, one a cell, as float32."""
    x = jnp.asarray(x).astype(jnp.float32)
    return x if codec.cells == 1 else jnp.repeat(x, codec.cells, axis=-1)


def encode(rows: Float[Array, "..."], like: Rows, channel_axis: int) -> Rows:
    """Rows in the form in which a store keeps them.

    What was decoded becomes the same codes again: the greatest of a group has the greatest code.
    Values beyond what the type of scales can hold become the greatest that it can.

    Args:
      rows: in any float dtype.
      like: rows of that form, of any number.
      channel_axis: as in `decode`.
    """
    if not isinstance(like, Coded):
        if like.dtype == jnp.uint16:
            return lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
        return rows.astype(like.dtype)
    codec = like.codec
    n_groups = codec.sizes(rows.shape[channel_axis])[1]
    grouped = _grouped(rows.astype(jnp.float32), n_groups, channel_axis)
    coded = affine if codec.affine else _symmetric
    codes, scale, low = coded(grouped, codec, channel_axis)
    codes = codes.reshape(rows.shape).astype(code_dtype(codec))
    return Coded(codes=packed(codes, codec, channel_axis), scale=scale, low=low, codec=codec)


def _symmetric(x: Array, codec: Codec, axis: int) -> tuple[Array, Array, None]:
    """Codes, scale: x is about codes * scale."""
    scale = _divided(jnp.max(jnp.abs(x), axis=axis), codec.top)
    if codec.scale == "f32":
        # So many bits that the scale times the greatest code is exact, and gives the scale again.
        scale = lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=15)
    # Codes come from the scale before it is rounded to f16, as in llama.cpp.
    inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    codes = lax.round(x * jnp.expand_dims(inverse, axis), lax.RoundingMethod.AWAY_FROM_ZERO)
    return codes, _kept(scale, codec), None


def affine(x: Array, codec: Codec, axis: int) -> tuple[Array, Array, Array]:
    """Codes, scale and minimum, both as they are kept: x is about codes * scale + low."""
    low = _kept(jnp.min(x, axis=axis), codec)
    over = x - jnp.expand_dims(low.astype(jnp.float32), axis)
    scale = _kept(_divided(jnp.maximum(jnp.max(over, axis=axis), 0.0), codec.top), codec)
    kept = scale.astype(jnp.float32)
    # An inverse, because XLA makes one of some divisions, and codes must not depend on which.
    inverse = jnp.expand_dims(1.0 / jnp.where(kept > 0, kept, 1.0), axis)
    return jnp.clip(jnp.rint(over * inverse), 0, codec.top), scale, low


def _kept(x: Array, codec: Codec) -> Array:
    """A scale or minimum as it is stored; one beyond its type is the greatest there is.

    An infinite one would make NaN of the codes 0 of its group.
    """
    dtype = jnp.dtype(ROW_DTYPES[codec.scale])
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)


def _divided(x: Array, n: int) -> Array:
    """Exact quotients; by a number that XLA knows it would multiply with the rounded inverse."""
    return x / lax.clamp(jnp.float32(n), x, jnp.float32(n))


def _grouped(x: Array, n_groups: int, axis: int) -> Array:
    """The channel axis as groups and the channels of each, the latter on `axis`."""
    at = axis % x.ndim
    return x.reshape(*x.shape[:at], n_groups, x.shape[at] // n_groups, *x.shape[at + 1 :])


def packed(codes: Array, codec: Codec, axis: int) -> Array:
    """Codes as bytes."""
    parts = jnp.split(codes, codec.n_packed, axis)
    out = parts[0]
    for i, part in enumerate(parts[1:], start=1):
        out |= part << jnp.uint8(i * codec.bits)
    return out


def _unpacked(found: Array, codec: Codec, axis: int) -> Array:
    """Codes from bytes."""
    if codec.n_packed == 1:
        return found
    shifts = range(0, 8, codec.bits)
    return jnp.concatenate([(found >> jnp.uint8(s)) & jnp.uint8(codec.top) for s in shifts], axis)
