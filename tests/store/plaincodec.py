"""Codes of rows, worked out number by number in NumPy."""

import ml_dtypes
import numpy as np

# Bits of a code, channels that share a scale (None is all), with a minimum, type of scales.
KINDS = {
    "fp8": (8, None, False, np.float32),
    "int8": (8, None, False, np.float32),
    "q8_0": (8, 32, False, np.float16),
    "int4": (4, 32, True, np.float16),
    "int2": (2, 32, True, np.float16),
}


# Bytes of a number, and bits of keys by channel with a scale and zero point for 32 cells.
FLOATS = {"f32": 4, "bf16": 2, "f16": 2}
BY_CHANNEL = {"kivi4": 4 + 1, "kivi2": 2 + 1}


def head_bytes(name, dim):
    """Bytes of a key or value of one head, with its part of scales."""
    if name in FLOATS:
        return dim * FLOATS[name]
    if name in BY_CHANNEL:
        return dim * BY_CHANNEL[name] // 8
    bits, size, affine, dtype = KINDS[name]
    return dim * bits // 8 + dim // (size or dim) * (1 + affine) * np.dtype(dtype).itemsize


def encoded(x, name):
    """Bytes of codes, scales and minima of rows [..., D]."""
    bits, size, affine, dtype = KINDS[name]
    x = np.asarray(x, np.float32)
    groups = x.reshape(*x.shape[:-1], -1, size or x.shape[-1])
    most = np.float32(np.finfo(dtype).max)
    if affine:
        top = 2**bits - 1
        low = np.clip(groups.min(-1), -most, most).astype(dtype)
        over = groups - low[..., None].astype(np.float32)
        scale = np.clip(np.maximum(over.max(-1), 0) / np.float32(top), 0, most).astype(dtype)
        inverse = np.float32(1) / np.where(scale > 0, scale, dtype(1)).astype(np.float32)
        codes = np.clip(np.rint(over * inverse[..., None]), 0, top).astype(np.uint8)
    else:
        top = 448 if name == "fp8" else 127
        scale, low = np.abs(groups).max(-1) / np.float32(top), None
        if dtype == np.float32:
            scale = sixteen_bits(scale)
        with np.errstate(divide="ignore"):
            inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
        codes = groups * inverse[..., None]
        if name == "fp8":
            codes = np.clip(codes, -top, top).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        else:
            codes = away_from_zero(codes).astype(np.int8)
        scale = np.clip(scale, 0, most).astype(dtype)
    return packed(codes.reshape(x.shape), bits), scale, low


def decoded(codes, scale, low, name):
    """Rows from what `encoded` gives."""
    bits, _, affine, _ = KINDS[name]
    values = unpacked(codes, bits) if affine else codes
    values = codes.view(ml_dtypes.float8_e4m3fn) if name == "fp8" else values
    groups = values.astype(np.float32).reshape(*scale.shape, -1)
    out = groups * scale.astype(np.float32)[..., None]
    out = out if low is None else out + low.astype(np.float32)[..., None]
    return out.reshape(values.shape)


def coded(x, name):
    """Rows as they are after a store has kept them."""
    return decoded(*encoded(x, name), name)


def packed(codes, bits):
    n = 8 // bits
    if n == 1:
        return codes
    out = np.zeros((*codes.shape[:-1], codes.shape[-1] // n), np.uint8)
    for channel in range(codes.shape[-1]):
        part, byte = divmod(channel, out.shape[-1])
        out[..., byte] += codes[..., channel] * np.uint8(2 ** (bits * part))
    return out


def unpacked(found, bits):
    n = 8 // bits
    out = np.zeros((*found.shape[:-1], found.shape[-1] * n), np.uint8)
    for channel in range(out.shape[-1]):
        part, byte = divmod(channel, found.shape[-1])
        out[..., channel] = found[..., byte] // np.uint8(2 ** (bits * part)) % np.uint8(2**bits)
    return out


def sixteen_bits(x):
    """Rounded to sixteen bits of precision, ties to even."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.rint(mantissa.astype(np.float64) * 2**16) / 2**16, exponent).astype("f4")


def away_from_zero(x):
    """Rounded, ties away from zero as C's roundf."""
    whole = np.trunc(x)
    return whole + np.trunc(2 * (x - whole))
