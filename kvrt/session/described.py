"""The groups of layers that a fingerprint describes, as the configuration they came from."""

from collections.abc import Mapping
from typing import Any

from kvrt.config import GroupSpec, MaskSpec, QueryTemperature, RopeSpec
from kvrt.errors import BadSession, UsageError
from kvrt.session.fingerprint import Fingerprint


def mask(found: Fingerprint, group: int) -> MaskSpec:
    """What a group of layers sees.

    Raises:
      BadSession: the fingerprint does not say so.
    """
    try:
        return MaskSpec(**found["groups"][group].get("mask", {}))
    except (KeyError, IndexError, TypeError, AttributeError, UsageError) as error:
        raise _bad(f"what group {group} sees") from error


def groups(found: Fingerprint) -> tuple[GroupSpec, ...]:
    """All groups.

    Raises:
      BadSession: the fingerprint does not describe them.
    """
    try:
        return tuple(_group(said) for said in found["groups"])
    except (KeyError, TypeError, AttributeError, UsageError) as error:
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
    fields: dict[str, Any] = {**said, "layers": tuple(said["layers"])}
    rope = said.get("rope")
    if rope is not None:
        # The size of the context stands among the others where it decides frequencies.
        known: dict[str, Any] = {k: v for k, v in rope.items() if k != "n_ctx"}
        known = {k: tuple(v) if isinstance(v, list) else v for k, v in known.items()}
        rope = RopeSpec(**known)
    fields["rope"] = rope
    if "mask" in said:
        fields["mask"] = MaskSpec(**said["mask"])
    if said.get("temperature") is not None:
        fields["temperature"] = QueryTemperature(**said["temperature"])
    return GroupSpec(**fields)


def _bad(what: str) -> BadSession:
    return BadSession(f"the fingerprint does not tell {what}; the session is damaged")
