"""The groups of layers that a fingerprint describes, as the configuration they came from."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from kvrt.config import GroupSpec, MaskSpec, RecurrentSpec
from kvrt.errors import DAMAGED, BadSession
from kvrt.files.typed_json import typed
from kvrt.options.cache import SelfExtend
from kvrt.session import fingerprint, kv_arrays
from kvrt.session.fingerprint import Fingerprint
from kvrt.state_arrays import StateArray
from kvrt.whole_numbers import Count

_FIELDS = ("groups", "model", "recurrent", "rope", "type_k", "type_v", "hadamard", "self_extend")
_Spec = TypeVar("_Spec")
_MAX_DEPTH, _MAX_CHARS, _MAX_INT = 16, 1 << 16, 2**63


def check_fingerprint(found: Fingerprint) -> None:
    """Refuses a fingerprint that no model and no cache can have.

    Raises:
      BadSession: values that are no finite numbers, groups without layers, sizes out of range.
    """
    check_values("the fingerprint", found)
    n = len(groups(found))
    missing = [name for name in _FIELDS if name not in found]
    if missing:
        raise _bad(missing[0])
    for i in range(n):
        kv_arrays.kinds(found, i)
    for name in ("type_k", "type_v"):
        types = found.get(name)
        if isinstance(types, list) and len(types) != n:
            raise _bad(f"{name} of {n} groups")
    if found["recurrent"] is not None:
        state_arrays(found)
    try:
        if found["self_extend"] is not None:
            _made(SelfExtend, found["self_extend"])
    except ValueError as error:
        raise _bad("how positions are shared") from error
    if found["rope"] not in ("write", "read") or not isinstance(found["hadamard"], bool):
        raise _bad("how keys are kept")


def check_values(name: str, value: Any) -> None:
    """Refuses JSON values that are too deep, too long, or no finite numbers.

    Raises:
      BadSession: one is.
    """
    left = [(value, 0)]
    while left:
        x, depth = left.pop()
        if isinstance(x, Mapping | list | tuple) and depth < _MAX_DEPTH:
            inner = [*x, *x.values()] if isinstance(x, Mapping) else x
            left += [(y, depth + 1) for y in inner]
        elif not _is_plain(x):
            raise BadSession(
                f"{name} holds {ascii(x)[:40]}, short texts and finite numbers are wanted; "
                f"{DAMAGED}"
            )


def sizes(found: Fingerprint, group: int) -> tuple[int, int, tuple[int, int]]:
    """Layers and kv heads of a group, and channels of its keys and of its values.

    Raises:
      BadSession: the fingerprint does not say.
    """
    try:
        spec = _group(found["groups"][group])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise _bad(f"the keys and values of group {group}") from error
    return len(spec.layers), spec.n_kv_heads, (spec.dim_k, spec.dim_v)


def state_arrays(found: Fingerprint) -> tuple[tuple[StateArray, ...], ...]:
    """The arrays of a state, of each layer that keeps one.

    Raises:
      BadSession: the fingerprint does not say.
    """
    try:
        layers = _made(RecurrentSpec, found["recurrent"], fingerprint.LATER_OF_STATES).arrays
        for x in (x for layer in layers for x in layer):
            np.dtype(x.dtype)
        return layers
    except (KeyError, TypeError, ValueError) as error:
        raise _bad("the states' shapes") from error


def n_vocab(found: Fingerprint) -> int:
    """How many tokens there are.

    Raises:
      BadSession: the fingerprint does not say.
    """
    try:
        n = typed(Count, found["model"]["n_vocab"])
    except (KeyError, TypeError, ValueError) as error:
        raise _bad("the vocabulary's size") from error
    return n


def mask(found: Fingerprint, group: int) -> MaskSpec:
    """What a group of layers sees.

    Raises:
      BadSession: the fingerprint does not say so.
    """
    try:
        return _made(MaskSpec, found["groups"][group]["mask"])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise _bad(f"what group {group} sees") from error


def groups(found: Fingerprint) -> tuple[GroupSpec, ...]:
    """All groups.

    Raises:
      BadSession: the fingerprint does not describe them.
    """
    try:
        return tuple(_group(said) for said in found["groups"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _bad("the groups of layers") from error


def arch(found: Fingerprint) -> str:
    """The model's architecture.

    Raises:
      BadSession: the fingerprint does not name it.
    """
    try:
        return str(found["model"]["arch"])
    except (KeyError, TypeError) as error:
        raise _bad("the model's architecture") from error


def _group(said: Mapping[str, Any]) -> GroupSpec:
    # The size of the context stands among the others where it decides frequencies.
    rope = said["rope"] and {k: v for k, v in said["rope"].items() if k != "n_ctx"}
    return _made(GroupSpec, {**said, "rope": rope}, fingerprint.LATER_OF_GROUPS)


def _made(kind: type[_Spec], said: Mapping[str, Any], later: Sequence[str] = ()) -> _Spec:
    """A configuration of fields that are all there: none gets the default of today.

    Raises:
      ValueError: a field is absent or unknown, or has no such value.
    """
    spec = typed(kind, said)
    if fingerprint.said_of(spec, later) != said:
        raise ValueError(f"not all fields of {kind.__name__}, or others")
    return spec


def _is_plain(x: Any) -> bool:
    if isinstance(x, str):
        return len(x) <= _MAX_CHARS
    if isinstance(x, float):
        return math.isfinite(x)
    return x is None or isinstance(x, bool) or (isinstance(x, int) and abs(x) < _MAX_INT)


def _bad(what: str) -> BadSession:
    return BadSession(f"the fingerprint does not tell {what}; {DAMAGED}")
