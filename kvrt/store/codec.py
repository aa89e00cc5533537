"""Quantizes keys and values to integers or floats of a few bits, with scales, and back.

A head's channels are cut into groups, and each group has a scale; integers below eight bits also
have a zero point, for keys lie far from zero in some channels. Integers and scales have the block
and the cell on the same axes as float keys and values, so whatever copies, moves or frees a cell
does the same to all of them.

Source: llama.cpp `quantize_row_q8_0_ref`; arXiv:2402.02750 for the affine form.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kvrt.arrays import AnyArray, Array, Float
from kvrt.kv_types import CODECS, FLOAT_DTYPES, Codec, KVDtype
from kvrt.store.quantized import AnyKVArray, Quantized, data_dtype

__all__ = [
    "AnyKVArray",
    "KVArray",
    "Quantized",
    "data_dtype",
    "decode",
    "empty_quantized",
    "encode",
    "pack",
    "quantize_affine",
    "zeros",
]


jax.tree_util.register_dataclass(Quantized)

# Keys or values of a layer in the KV dtype of their store, on the device.
KVArray = Array | Quantized


def zeros(kv_dtype: KVDtype, shape: tuple[int, ...], channel_axis: int) -> KVArray:
    """Zeroed keys or values; bf16 as bits, see `kvrt.store.kv`.

    Raises:
      BadConfig: the codec's groups do not fill a head.
    """
    codec = CODECS.get(kv_dtype)
    if codec is None:
        return jnp.zeros(shape, "uint16" if kv_dtype == "bf16" else FLOAT_DTYPES[kv_dtype])
    return empty_quantized(codec, shape, channel_axis)


def empty_quantized(codec: Codec, shape: tuple[int, ...], channel_axis: int) -> Quantized:
    """Zeroed integers and scales; cells that share a scale lie on the last axis.

    Raises:
      BadConfig: the codec's groups do not fill a head.
    """
    n_bytes, n_groups = codec.sizes(shape[channel_axis])
    data, groups = list(shape), list(shape)
    data[channel_axis], groups[channel_axis] = n_bytes, n_groups
    groups[-1] //= codec.cells
    return Quantized(
        data=jnp.zeros(data, data_dtype(codec)),
        scale=jnp.zeros(groups, FLOAT_DTYPES[codec.scale]),
        zero_point=jnp.zeros(groups, FLOAT_DTYPES[codec.scale]) if codec.affine else None,
        codec=codec,
    )


def decode(x: AnyKVArray, channel_axis: int) -> Float[Array, "..."]:
    """Keys or values in their KV dtype, or blocks or tiles of them, as float32.

    Args:
      x: plain or quantized.
      channel_axis: -2 for keys as they are stored; -1 for values, and for keys taken out.
    """
    if isinstance(x, Quantized):
        return _dequantized(x, channel_axis)
    if x.dtype == jnp.uint16:
        x = lax.bitcast_convert_type(x, jnp.bfloat16)
    return jnp.asarray(x).astype(jnp.float32)


def _dequantized(x: Quantized, channel_axis: int) -> Float[Array, "..."]:
    data = jnp.asarray(x.data)
    data = _e4m3(data) if x.codec.floating else _unpacked(data, x.codec, channel_axis)
    data = data.astype(jnp.float32)
    found = _grouped(data, x.scale.shape[channel_axis], channel_axis)
    found *= jnp.expand_dims(_by_cell(x.scale, x.codec), channel_axis)
    if x.zero_point is not None:
        found += jnp.expand_dims(_by_cell(x.zero_point, x.codec), channel_axis)
    return found.reshape(data.shape)


def _by_cell(x: AnyArray, codec: Codec) -> Array:
    """Scales or zero points, one a cell, as float32."""
    x = jnp.asarray(x).astype(jnp.float32)
    return x if codec.cells == 1 else jnp.repeat(x, codec.cells, axis=-1)


def encode(x: Float[Array, "..."], like: KVArray, channel_axis: int) -> KVArray:
    """Keys or values in the KV dtype of others.

    What was dequantized becomes the same integers again: the greatest value of a group has the
    greatest integer. Values beyond what the type of scales can hold become the greatest that it
    can.

    Args:
      x: in any float dtype.
      like: an array of the wanted KV dtype, of any size.
      channel_axis: as in `decode`.
    """
    if isinstance(like, Quantized):
        return _quantized(x, like.codec, channel_axis)
    if like.dtype == jnp.uint16:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(like.dtype)


def _quantized(x: Float[Array, "..."], codec: Codec, channel_axis: int) -> Quantized:
    n_groups = codec.sizes(x.shape[channel_axis])[1]
    grouped = _grouped(x.astype(jnp.float32), n_groups, channel_axis)
    quantize = quantize_affine if codec.affine else _quantize_symmetric
    data, scale, zero_point = quantize(grouped, codec, channel_axis)
    data = data.reshape(x.shape).astype(data_dtype(codec))
    return Quantized(
        data=pack(data, codec, channel_axis), scale=scale, zero_point=zero_point, codec=codec
    )


def _quantize_symmetric(x: Array, codec: Codec, axis: int) -> tuple[Array, Array, None]:
    """Integers and scale: x is about integer * scale."""
    scale = _divided(jnp.max(jnp.abs(x), axis=axis), codec.top)
    if codec.scale == "f32":
        # So few bits that the greatest integer times the scale is exact, and gives it again.
        scale = lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=15)
    # Integers come from the scale before it is rounded to f16, as in llama.cpp.
    inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    data = x * jnp.expand_dims(inverse, axis)
    if codec.floating:
        # A float that the type lacks would become NaN.
        held = jnp.clip(data, -codec.top, codec.top).astype(jnp.float8_e4m3fn)
        return lax.bitcast_convert_type(held, jnp.uint8), _kept(scale, codec), None
    data = lax.round(data, lax.RoundingMethod.AWAY_FROM_ZERO)
    return data, _kept(scale, codec), None


def quantize_affine(x: Array, codec: Codec, axis: int) -> tuple[Array, Array, Array]:
    """Integers, scale, zero point, as they are kept: x is about integer * scale + zero point."""
    zero_point = _kept(jnp.min(x, axis=axis), codec)
    over = x - jnp.expand_dims(zero_point.astype(jnp.float32), axis)
    scale = _kept(_divided(jnp.maximum(jnp.max(over, axis=axis), 0.0), codec.top), codec)
    kept = scale.astype(jnp.float32)
    # An inverse, because XLA makes one of some divisions, and integers must not depend on which.
    inverse = jnp.expand_dims(1.0 / jnp.where(kept > 0, kept, 1.0), axis)
    return jnp.clip(jnp.rint(over * inverse), 0, codec.top), scale, zero_point


def _kept(x: Array, codec: Codec) -> Array:
    """A scale or zero point as it is stored; one beyond its type is the greatest there is.

    An infinite one would make NaN of the zeros of its group.
    """
    dtype = jnp.dtype(FLOAT_DTYPES[codec.scale])
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)


def _divided(x: Array, n: int) -> Array:
    """Exact quotients; by a number that XLA knows it would multiply with the rounded inverse."""
    return x / lax.clamp(jnp.float32(n), x, jnp.float32(n))


def _grouped(x: Array, n_groups: int, axis: int) -> Array:
    """The channel axis as groups and the channels of each, the latter on `axis`."""
    at = axis % x.ndim
    return x.reshape(*x.shape[:at], n_groups, x.shape[at] // n_groups, *x.shape[at + 1 :])


def pack(data: Array, codec: Codec, axis: int) -> Array:
    """Integers packed into bytes."""
    parts = jnp.split(data, codec.n_packed, axis)
    out = parts[0]
    for i, part in enumerate(parts[1:], start=1):
        out |= part << jnp.uint8(i * codec.bits)
    return out


def _e4m3(bits: Array) -> Array:
    """Floats from their bits, exactly; by way of float16, which CPUs widen faster.

    Its exponent is 8 greater, so the same bits are 2^8 times less.
    """
    sign, rest = ((bits & jnp.uint8(mask)).astype(jnp.uint16) for mask in (0x80, 0x7F))
    half = lax.bitcast_convert_type(sign << jnp.uint16(8) | rest << jnp.uint16(7), jnp.float16)
    return half.astype(jnp.float32) * jnp.float32(256)


def _unpacked(found: Array, codec: Codec, axis: int) -> Array:
    """Integers from bytes."""
    if codec.n_packed == 1:
        return found
    shifts = range(0, 8, codec.bits)
    return jnp.concatenate([(found >> jnp.uint8(s)) & jnp.uint8(codec.top) for s in shifts], axis)
