"""JSON as typed values: what a type and its limits do not allow is one line, with its place.

Limits stand in annotations, `Annotated[int, Meta(ge=0)]`; `wanted` says them in words.
"""

import json
import re
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from kvrt.errors import BadConfig
from kvrt.files import regular

_MOST_BYTES = 1 << 26
_SHOWN = 40
_UNSAID = 2**63 - 1  # bounds beyond it go without saying

T = TypeVar("T")


def typed(kind: type[T] | Any, value: Any, name: str = "") -> T:
    """A JSON value as `kind`: a dataclass, a `msgspec.Struct`, or any annotation of JSON's types.

    Args:
      kind: whose annotations have the limits.
      value: as `json.loads` has it.
      name: of the value, for the message.

    Raises:
      ValueError: it is none; the message names the place, what is there and what is wanted.
    """
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(_line(str(error), kind, value, name)) from error


def read_typed(kind: type[T] | Any, path: str, what: str) -> T:
    """The value of `kind` in a small file of `what` that a user names.

    Raises:
      BadConfig: it is no regular file, cannot be read, is larger than 64 MiB, or has another value.
    """
    try:
        with open(regular.open_fd(path), "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError("it is larger than 64 MiB")
        return typed(kind, json_value(data))
    except (OSError, ValueError) as error:
        said = error.strerror or error if isinstance(error, OSError) else error
        raise BadConfig(f"{path}: {said}; name a file of {what}") from error


def json_value(text: str | bytes) -> Any:
    """The value of JSON, which has no NaN and no half of a character.

    Raises:
      ValueError: it is none, or nested too deeply.
    """
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise ValueError("no JSON: nested too deeply") from error
    except msgspec.DecodeError as error:
        said = str(error).removeprefix("JSON is malformed: ").partition(" - at")[0]
        raise ValueError(f"no JSON: {said[0].lower()}{said[1:]}") from error


def shown_json(value: Any) -> str:
    """A value as JSON has it, in a few characters of one line."""
    text = json.dumps(value, default=ascii)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def wanted(info: inspect.Type) -> str:
    """What a type allows, in words."""
    match info:
        case inspect.Metadata():
            return (info.extra or {}).get("wanted") or wanted(info.type)
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType():
            return " or ".join(map(str, info.values))
        case inspect.UnionType():
            kinds = [x for x in info.types if not isinstance(x, inspect.NoneType)]
            return " or ".join(map(wanted, kinds))
        case inspect.IntType():
            return "a whole number" + _range(info.ge, info.le)
        case inspect.FloatType():
            return "a number" + _range(info.ge, info.le)
        case inspect.StrType():
            return "a text" + _sized(info.min_length, info.max_length, "character")
        case inspect.TupleType():
            return f"a list of {len(info.item_types)}"
        case inspect.CollectionType():
            return "a list" + _sized(info.min_length, info.max_length, "entr", "y", "ies")
        case _:
            return "an object"


def _range(low: float | None, high: float | None) -> str:
    low, high = (None if x is None or abs(x) >= _UNSAID else x for x in (low, high))
    if low is None:
        return "" if high is None else f" of at most {high}"
    return f" of at least {low}" if high is None else f" from {low} to {high}"


def _sized(low: int | None, high: int | None, unit: str, one: str = "", many: str = "s") -> str:
    if low is None and high is None:
        return ""
    if high is None:
        return f" of at least {low} {unit}{one if low == 1 else many}"
    return f" of {low} to {high} {unit}{many}" if low else f" of at most {high} {unit}{many}"


def _line(error: str, kind: Any, value: Any, name: str) -> str:
    """What msgspec refuses, with the value that is there and the words for what is wanted."""
    said, _, place = error.rpartition(" - at `")
    info, known = inspect.type_info(kind), True
    for key, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", place):
        name += f".{key}" if key and name else key or f"[{index}]"
        info, inner = _within(info, key), None
        known = known and index != "..."
        if known:
            inner = value.get(key) if key else value[int(index)]
        value = inner
    if absent := re.match("Object missing required field `(.+)`", said or error):
        place = f"{name}.{absent[1]}".lstrip(".")
        return f"{place} is missing; {wanted(_within(info, absent[1]))} is wanted"
    if place.startswith("key"):
        kinds = info.types if isinstance(info, inspect.UnionType) else (info,)
        of = next(x for x in kinds if isinstance(x, inspect.DictType))
        bad = [k for k in value if not k.isdigit()] or [max(value, key=int)] if known else [""]
        key = shown_json(bad[0][:_SHOWN])
        return f"{name or 'it'} has the key {key}; {wanted(of.key_type)} is wanted"
    if not (said or error).startswith(("Expected", "Invalid", "Number", "Integer")):
        return f"{name}: {said or error}".removeprefix(": ")  # what the class itself refuses
    found = shown_json(value) if known else "something else"
    return f"{name or 'it'} is {found}; {wanted(info)} is wanted"


def _within(info: inspect.Type, key: str) -> inspect.Type:
    """The type of a field, or of an item without a key."""
    while isinstance(info, inspect.Metadata | inspect.UnionType):
        if isinstance(info, inspect.Metadata):
            info = info.type
        else:
            info = next(x for x in info.types if not isinstance(x, inspect.NoneType))
    match info:
        case inspect.DataclassType() | inspect.StructType():
            return next(f.type for f in info.fields if f.encode_name == key)
        case inspect.DictType():
            return info.value_type
        case inspect.TupleType():
            return info.item_types[0]
        case inspect.CollectionType():
            return info.item_type
        case _:
            return info
