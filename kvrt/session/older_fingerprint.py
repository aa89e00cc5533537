"""Fingerprints without a schema number, as kvrt wrote them up to version 0.1.0.

Those of sessions left out every field that was at its default. What those defaults were stands here
and never changes, whatever `kvrt.config` says today: an old file goes on meaning what it meant.
Those of tiers were a text.
"""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

from kvrt.config import GroupSpec
from kvrt.errors import BadSession
from kvrt.options.cache import CacheConfig

SCHEMA = 1  # of the fingerprints that are written today: all fields

Fields = Mapping[str, Any]

# Fields without a default were always written; where a reader did without one, it is here as well.
# A tuple stands for a list, which nobody can change.
_ROPE: Fields = types.MappingProxyType(
    {
        "base": 10000.0,
        "layout": "neox",
        "scaling": "none",
        "factor": 1.0,
        "n_ctx_orig": 0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "freq_factors": (),
        "short_factors": (),
        "long_factors": (),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "magnitude": None,
        "n_ctx": None,
    }
)
_MASK: Fields = types.MappingProxyType({"kind": "full", "size": 0, "n_sink": 0})
_GROUP: Fields = types.MappingProxyType(
    {"rope": None, "mask": _MASK, "scale": None, "soft_cap": None, "temperature": None}
)
_SELF_EXTEND: Fields = types.MappingProxyType({"kind": "cache"})
_TOP: Fields = types.MappingProxyType(
    {"recurrent": None, "rope": "write", "hadamard": False, "self_extend": None}
)

_WRITTEN: Mapping[str, Fields] = types.MappingProxyType(
    {"RopeSpec": _ROPE, "MaskSpec": _MASK, "GroupSpec": _GROUP, "SelfExtend": _SELF_EXTEND}
)


def completed(found: Fields) -> dict[str, Any]:
    """A fingerprint from a file with every field of today's schema.

    One that has a schema number is returned as it is. Values of other types than a fingerprint has
    are left alone: `described.check_fingerprint` refuses them.

    Raises:
      BadSession: its schema is not a number that this kvrt knows.
    """
    if "schema" in found:
        schema = found["schema"]
        if type(schema) is not int or schema != SCHEMA:
            raise BadSession(
                f"the fingerprint has schema {ascii(schema)[:40]}, this kvrt reads {SCHEMA} and "
                "those without a number; update kvrt, or save the session again"
            )
        return dict(found)
    out = _filled(found, _TOP)
    if isinstance(out.get("groups"), list):
        out["groups"] = [_group(x) for x in out["groups"]]
    if isinstance(out["self_extend"], Mapping):
        out["self_extend"] = _filled(out["self_extend"], _SELF_EXTEND)
    return {"schema": SCHEMA, **out}


def of_tier(weights: str, config: CacheConfig, groups: Sequence[GroupSpec]) -> str:
    """What a tier's file of before said of its blocks, a text that was Python's own of a config."""
    said = (config.type_k, config.type_v, config.hadamard)
    said += (config.rope, config.block_size, config.n_ctx)
    if config.self_extend is not None:
        said += (config.self_extend,)
    return f"{weights} {_as_text(said)} {_as_text(tuple(groups))}"


def _as_text(value: Any) -> str:
    """Python's text of a value; of a configuration with the fields that were written then.

    A later field stands in it where it is not at its default, so that no file of before has it.
    """
    if isinstance(value, tuple):
        inner = ", ".join(map(_as_text, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    name, fields = type(value).__name__, []
    for f in dataclasses.fields(value):
        x = getattr(value, f.name)
        if f.default is dataclasses.MISSING or f.name in _WRITTEN.get(name, ()) or x != f.default:
            fields.append(f"{f.name}={_as_text(x)}")
    return f"{name}({', '.join(fields)})"


def _group(found: Any) -> Any:
    if not isinstance(found, Mapping):
        return found
    out = _filled(found, _GROUP)
    for name, defaults in (("rope", _ROPE), ("mask", _MASK)):
        if isinstance(out.get(name), Mapping):
            out[name] = _filled(out[name], defaults)
    return out


def _filled(found: Fields, defaults: Fields) -> dict[str, Any]:
    """With defaults for what is absent; whole numbers of real fields become real ones."""
    out = {name: _like(x, defaults.get(name)) for name, x in found.items()}
    absent = {name: x for name, x in defaults.items() if name not in found}
    return out | {name: _plain(x) for name, x in absent.items()}


def _plain(default: Any) -> Any:
    if isinstance(default, Mapping):
        return dict(default)
    return list(default) if isinstance(default, tuple) else default


def _like(value: Any, default: Any) -> Any:
    return float(value) if isinstance(default, float) and type(value) is int else value
