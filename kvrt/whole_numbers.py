"""Whole numbers of a configuration, which callers may give as Python's or NumPy's."""

import dataclasses
import numbers
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from msgspec import Meta

from kvrt.errors import BadConfig

# Annotations of numbers within limits, in configurations and in JSON.
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Whole = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Long = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Real = Annotated[float, Meta(ge=-(2.0**1023), le=2.0**1023)]


def python_int(x: Any) -> Any:
    """Python's integer for one of NumPy's; anything else as it is."""
    is_whole = isinstance(x, numbers.Integral) and not isinstance(x, bool)
    return int(x) if is_whole else x


def plain_tuple(ids: Any) -> Any:
    """A tuple of Python's integers for a list, an array or a tuple of whole numbers."""
    if type(ids) is tuple and set(map(type, ids)) <= {int}:
        return ids
    return tuple(map(python_int, getattr(ids, "tolist", lambda: ids)()))


def take_whole_numbers(spec: Any, *, refuse: bool = True) -> None:
    """Makes fields of type `int`, `int | None` and `tuple[int, ...]` hold Python's integers.

    Args:
      spec: a frozen dataclass, while it is made.
      refuse: anything else in a field for one number is an error here.

    Raises:
      BadConfig: a field holds a float, a text or another object.
    """
    for f in dataclasses.fields(spec):
        value = getattr(spec, f.name)
        inner = get_args(f.type) if get_origin(f.type) in (tuple, Union, UnionType) else (f.type,)
        if not _is_whole(inner[0]):
            continue
        if inner[1:] in ((), (NoneType,)):
            number = python_int(value)
            if refuse and not isinstance(number, int) and not (number is None and inner[1:]):
                raise BadConfig(f"{f.name} is {value!r}; a whole number is wanted")
        elif inner[1:] == (...,) and not isinstance(value, str):
            number = plain_tuple(value)
        else:
            continue
        object.__setattr__(spec, f.name, number)


def _is_whole(kind: Any) -> bool:
    """Whether an annotation is `int`, with limits or without."""
    return kind is int or (getattr(kind, "__metadata__", ()) != () and kind.__origin__ is int)
