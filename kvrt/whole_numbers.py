"""Whole numbers of a configuration, which callers may give as Python's or NumPy's."""

import dataclasses
import numbers
from typing import Any

from kvrt.errors import BadConfig


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
        if f.type in (int, int | None):
            number = python_int(value)
            if refuse and not isinstance(number, int) and (f.type is int or number is not None):
                raise BadConfig(f"{f.name} is {value!r}; a whole number is wanted")
        elif f.type == tuple[int, ...] and not isinstance(value, str):
            number = plain_tuple(value)
        else:
            continue
        object.__setattr__(spec, f.name, number)
