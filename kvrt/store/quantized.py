"""Quantized keys and values, on a device, on the host or in a file.

`codec.py` quantizes and dequantizes them and makes them known to JAX; a reader of files needs no
JAX.
"""

import dataclasses
import typing
from typing import Any

from kvrt.arrays import AnyArray, Float, Shaped
from kvrt.kv_types import Codec


@typing.no_type_check  # JAX rebuilds it with tracers
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """Quantized keys or values of one layer; x is about integer * scale + zero point.

    D channels of a head lie in D * bits / 8 bytes, in G groups. Keys have channels and groups on
    the axis before the cells', values on the last axis. Byte j of packed integers holds channels j,
    j + D / n_packed and so on, lowest bits first.
    """

    data: Shaped[AnyArray, "N H _ _"]
    scale: Float[AnyArray, "N H _ _"]
    zero_point: Float[AnyArray, "N H _ _"] | None
    codec: Codec = dataclasses.field(metadata=dict(static=True))


# Keys or values of a layer in the KV dtype of their store, on the device or anywhere.
AnyKVArray = AnyArray | Quantized


def data_dtype(codec: Codec) -> str:
    """The NumPy dtype of packed integers, and of the bits of floats."""
    return "uint8" if codec.affine or codec.floating else "int8"


def each(change: Any, *arrays: AnyKVArray) -> AnyKVArray:
    """Maps `change` over the arrays of keys or values, as `jax.tree.map` would, without JAX."""
    first = arrays[0]
    if not isinstance(first, Quantized):
        return change(*arrays)
    names = [name for name in ("data", "scale", "zero_point") if getattr(first, name) is not None]
    new = {name: change(*(getattr(x, name) for x in arrays)) for name in names}
    return dataclasses.replace(first, **new)
