"""Keys and values of a session as arrays: their dtypes by group, and their tensors in a file.

Quantized ones are the three tensors of their group, `k`, `k.scale` and `k.low`: data, scales and,
where the dtype has them, zero points. Nothing is dequantized on the way into a file or out of it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast, get_args

import numpy as np

from kvrt.arrays import AnyArray
from kvrt.errors import DAMAGED, BadSession
from kvrt.kv_types import CODECS, FLOAT_DTYPES, KVDtype, portable_dtypes
from kvrt.options.cache import CacheConfig
from kvrt.store import hadamard_size
from kvrt.store.quantized import AnyKVArray, Quantized, each

Fingerprint = Mapping[str, Any]
Tensors = Mapping[str, AnyArray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVKind:
    """How keys or values of a group are kept: dtype, size of the Hadamard transform or 0."""

    type: KVDtype
    n_hadamard: int


def fingerprint_types(config: CacheConfig) -> dict[str, Any]:
    """What a fingerprint says of keys and values of a cache; equal dtypes of all groups are one."""
    out: dict[str, Any] = {}
    for name, types in (("type_k", portable_dtypes(config.type_k)), ("type_v", config.type_v)):
        each = {types} if isinstance(types, str) else set(types)
        out[name] = each.pop() if len(each) == 1 else list(types)
    quantized = any(t in CODECS for x in out.values() for t in ([x] if isinstance(x, str) else x))
    return out | {"hadamard": config.hadamard and quantized}


def kinds(found: Fingerprint, group: int) -> tuple[KVKind, KVKind]:
    """Keys and values of a group, as a fingerprint describes them.

    Raises:
      BadSession: it does not.
    """
    try:
        said, types = found["groups"][group], []
        rank = said.get("latent_rank", 0)
        dims = said["head_dim"] - rank, rank or said["head_dim"]
        for name in ("type_k", "type_v"):
            given = found[name]
            types.append(given if isinstance(given, str) else given[group])
            if types[-1] not in get_args(KVDtype):
                raise TypeError
        rotated = [bool(found.get("hadamard")) and t in CODECS for t in types]
        sizes = (
            hadamard_size.size_k(dims[0], rotated[0]),
            hadamard_size.size_v(dims[1], rotated[1]),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadSession(
            f"the fingerprint does not tell the keys and values of group {group}; {DAMAGED}"
        ) from error
    k, v = (KVKind(type=cast(KVDtype, t), n_hadamard=n) for t, n in zip(types, sizes, strict=True))
    return k, v


def on_host(kv: AnyKVArray) -> AnyKVArray:
    """The arrays in NumPy."""
    return each(np.asarray, kv)


def tensors(name: str, kv: AnyKVArray) -> Tensors:
    """Keys or values as tensors."""
    if not isinstance(kv, Quantized):
        return {name: kv}
    found = {name: kv.data, f"{name}.scale": kv.scale}
    return found if kv.zero_point is None else {**found, f"{name}.low": kv.zero_point}


def kv_from_tensors(found: Tensors, name: str, kv_dtype: KVDtype) -> AnyKVArray:
    """Keys or values, `name` is "k" or "v", from the arrays that `specs` names."""
    kind = CODECS.get(kv_dtype)
    if kind is None:
        return np.asarray(found[name])
    return Quantized(
        data=np.asarray(found[name]),
        scale=np.asarray(found[f"{name}.scale"]),
        zero_point=np.asarray(found[f"{name}.low"]) if kind.affine else None,
        codec=kind,
    )


def stored(kv_dtype: str) -> str:
    """The NumPy dtype of a float KV dtype in a file: bf16 as its bits."""
    return "uint16" if kv_dtype == "bf16" else FLOAT_DTYPES[kv_dtype]


def from_q8_0(found: np.ndarray) -> Quantized:
    """Keys or values from llama.cpp's groups of a scale and 32 numbers each, [..., groups]."""
    data = np.ascontiguousarray(found["codes"])
    return Quantized(
        data=data.reshape(*found.shape[:-1], -1),
        scale=np.ascontiguousarray(found["scale"]),
        zero_point=None,
        codec=CODECS["q8_0"],
    )


def to_q8_0(kv: Quantized, dtype: np.dtype) -> np.ndarray:
    """The inverse of `from_q8_0`."""
    scale = np.asarray(kv.scale)
    out = np.empty(scale.shape, dtype)
    out["scale"], out["codes"] = scale, np.asarray(kv.data).reshape(*scale.shape, -1)
    return out


def array(tensors: Tensors, name: str, shape: tuple[int | None, ...], dtype: str) -> np.ndarray:
    """A tensor, if it has this dtype and shape; None is any size.

    Raises:
      BadSession: it has not, or is missing.
    """
    x = tensors.get(name)
    x = None if x is None else np.asarray(x)
    sizes = x.shape if x is not None and x.ndim == len(shape) else (-1,) * len(shape)
    fits = all(w in (None, n) for n, w in zip(sizes, shape, strict=True))
    if x is None or x.dtype != dtype or not fits:
        what = "missing" if x is None else f"{x.dtype.name}{list(x.shape)}"
        raise BadSession(f"tensor {name!r} is {what}, {dtype}{list(shape)} is wanted; {DAMAGED}")
    return x
