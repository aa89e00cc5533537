"""Rows in codes as they are held, on a device, on the host or in a file.

`codec.py` makes and reads them, and makes them known to JAX; a reader of files needs no JAX.
"""

import dataclasses
import typing
from typing import Any

from kvrt.arrays import AnyArray, Float, Shaped
from kvrt.kv_types import Codec


@typing.no_type_check  # JAX rebuilds it with tracers
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Coded:
    """Rows of one layer in codes; d channels lie in d * bits / 8 bytes, in g groups.

    Keys have channels and groups on the axis before the cells', values on the last axis.
    Byte j of packed codes holds channels j, j + d / n_packed and so on, lowest bits first.
    """

    codes: Shaped[AnyArray, "N H _ _"]
    scale: Float[AnyArray, "N H _ _"]
    low: Float[AnyArray, "N H _ _"] | None
    codec: Codec = dataclasses.field(metadata=dict(static=True))


# Rows of a layer in the form in which they are stored, on the device or anywhere.
AnyRows = AnyArray | Coded


def code_dtype(codec: Codec) -> str:
    """The dtype of bytes of codes."""
    return "uint8" if codec.affine else "int8"


def each(change: Any, *rows: AnyRows) -> AnyRows:
    """Rows of which every array is what `change` makes of those in its place, as in a tree."""
    first = rows[0]
    if not isinstance(first, Coded):
        return change(*rows)
    names = [name for name in ("codes", "scale", "low") if getattr(first, name) is not None]
    new = {name: change(*(getattr(x, name) for x in rows)) for name in names}
    return dataclasses.replace(first, **new)
