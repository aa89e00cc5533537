"""Rows of a session: their type by group, their tensors, and rows of another type from them.

Rows in codes are the three tensors of their group, `k`, `k.scale` and `k.low`: codes, scales and,
where the type has them, minima. Values are never decoded on the way into a file or out of it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import numpy as np

from kvrt.arrays import AnyArray
from kvrt.config import CacheConfig
from kvrt.errors import BadSession
from kvrt.kv_types import CODECS, FLOAT_DTYPES, KVDtype, portable_dtypes
from kvrt.store import hadamard_size
from kvrt.store.quantized import AnyKVArray, Quantized, each

Fingerprint = Mapping[str, Any]
Tensors = Mapping[str, AnyArray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowKind:
    """How keys or values of a group are kept; `n_turn` channels turn together, 0 for none."""

    type: KVDtype
    n_turn: int


def said(config: CacheConfig) -> dict[str, Any]:
    """What a fingerprint says of the rows of a cache; equal types of all groups are one."""
    out: dict[str, Any] = {}
    for name, types in (("type_k", portable_dtypes(config.type_k)), ("type_v", config.type_v)):
        each = {types} if isinstance(types, str) else set(types)
        out[name] = each.pop() if len(each) == 1 else list(types)
    coded = any(t in CODECS for x in out.values() for t in ([x] if isinstance(x, str) else x))
    return out | {"hadamard": config.hadamard and coded}


def kinds(found: Fingerprint, group: int) -> tuple[RowKind, RowKind]:
    """Keys and values of a group, as a fingerprint describes them.

    Raises:
      BadSession: it does not.
    """
    try:
        dim, types = found["groups"][group]["head_dim"], []
        for name in ("type_k", "type_v"):
            given = found[name]
            types.append(given if isinstance(given, str) else given[group])
            if types[-1] not in get_args(KVDtype):
                raise TypeError
        turns = [bool(found.get("hadamard")) and t in CODECS for t in types]
        sizes = hadamard_size.size_k(dim, turns[0]), hadamard_size.size_v(dim, turns[1])
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadSession(
            f"the fingerprint does not tell the rows of group {group}; the session is damaged"
        ) from error
    k, v = (RowKind(type=cast(KVDtype, t), n_turn=n) for t, n in zip(types, sizes, strict=True))
    return k, v


def some(rows: AnyKVArray, at: slice | np.ndarray) -> AnyKVArray:
    """Some of the rows."""
    return each(lambda x: x[:, at], rows)


def joined(parts: Sequence[AnyKVArray]) -> AnyKVArray:
    """Rows of several blocks one behind the other, on the host."""
    return each(lambda *x: np.concatenate(list(map(np.asarray, x)), axis=1), *parts)


def on_host(rows: AnyKVArray) -> AnyKVArray:
    """The rows in NumPy."""
    return each(np.asarray, rows)


def tensors(name: str, rows: AnyKVArray) -> Tensors:
    """Rows as tensors."""
    if not isinstance(rows, Quantized):
        return {name: rows}
    found = {name: rows.data, f"{name}.scale": rows.scale}
    return found if rows.zero_point is None else {**found, f"{name}.low": rows.zero_point}


def from_tensors(found: Tensors, name: str, row_type: KVDtype) -> AnyKVArray:
    """Keys or values, `name` is "k" or "v", from the arrays that `specs` names."""
    kind = CODECS.get(row_type)
    if kind is None:
        return np.asarray(found[name])
    return Quantized(
        data=np.asarray(found[name]),
        scale=np.asarray(found[f"{name}.scale"]),
        zero_point=np.asarray(found[f"{name}.low"]) if kind.affine else None,
        codec=kind,
    )


def stored(row_type: str) -> str:
    """The dtype in which rows of a float type are kept: bf16 as its bits."""
    return "uint16" if row_type == "bf16" else FLOAT_DTYPES[row_type]


def from_q8_0(found: np.ndarray) -> Quantized:
    """Rows from llama.cpp's groups of a scale and 32 codes each, [..., groups]."""
    data = np.ascontiguousarray(found["codes"])
    return Quantized(
        data=data.reshape(*found.shape[:-1], -1),
        scale=np.ascontiguousarray(found["scale"]),
        zero_point=None,
        codec=CODECS["q8_0"],
    )


def to_q8_0(rows: Quantized, dtype: np.dtype) -> np.ndarray:
    """The inverse of `from_q8_0`."""
    scale = np.asarray(rows.scale)
    out = np.empty(scale.shape, dtype)
    out["scale"], out["codes"] = scale, np.asarray(rows.data).reshape(*scale.shape, -1)
    return out
