"""What two caches must share so that cached keys and values of one mean the same in the other.

Everything that decides their values is in it: weights, architecture, tokenizer, RoPE, masks, their
dtypes, a policy by score. What does not is left out: n_ctx, block size, number of sequences.
Sessions, libraries, chunks and tiers are told apart by it; tiers add how blocks lie in them. Every
field is written, at its default or not, with the number of the schema: a default that changes
later changes no file. Files without
that number left out every field that was at its default: what those were stands here, and stays.
`tests/test_every_field.py` goes through all fields of all configurations.
"""

import dataclasses
import hashlib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvrt.config import GroupSpec, RecurrentSpec
from kvrt.errors import BadConfig, BadSession, SessionMismatch
from kvrt.files.class_source import class_identity
from kvrt.options.cache import CacheConfig
from kvrt.session import kv_arrays

if TYPE_CHECKING:
    from kvrt.attention.scored.layers import ScoredGroup

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
        out["groups"] = [_older_group(x) for x in out["groups"]]
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


def _older_group(found: Any) -> Any:
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


# The model's name and the type of its weights, for people and for loading it again. The digest of
# the weights decides: a file of an older version, without them, stays valid.
NAME, WEIGHT_TYPE = "name", "weight_type"
# Differences that a restore may bridge by converting the cached keys and values.
_TYPES = ("type_k", "type_v", "hadamard")

# Written where they say something alone: sessions of before know nothing of them.
LATER_OF_GROUPS, LATER_OF_STATES = ("kv_of", "latent_rank", "indexed"), ("by_layer",)
_LATER_OF_POLICIES = ("head_share", "n_read", "refresh_every", "close_up")

Fingerprint = Mapping[str, Any]  # of JSON values


def describe(
    groups: Sequence[GroupSpec],
    recurrent: RecurrentSpec | None,
    config: CacheConfig,
    n_vocab: int,
    weights: str,
    identity: Mapping[str, str],
) -> Fingerprint:
    """The fingerprint of a model on a cache.

    Args:
      groups: of the model.
      recurrent: of the model.
      config: of the cache.
      n_vocab: width of the logits.
      weights: digest of the parameters.
      identity: what else tells a model from others: its architecture, its tokenizer's digest; and
        its `NAME` and the `WEIGHT_TYPE` of its weights, which decide nothing.
    """
    return {
        "schema": SCHEMA,
        "model": {"n_vocab": n_vocab, "weights": weights, **identity},
        "groups": [_group(g, config) for g in groups],
        "recurrent": recurrent and said_of(recurrent, LATER_OF_STATES),
        "rope": config.rope,
        **kv_arrays.fingerprint_types(config),
        "self_extend": config.self_extend and plain(config.self_extend),
    }


def with_scored(
    found: Fingerprint, scored: "Sequence[ScoredGroup]", config: CacheConfig
) -> Fingerprint:
    """The fingerprint with the layers that keep tokens by score, where there are any."""
    if not scored:
        return found
    said = [
        {
            "policy": named_policy(policy, said_of(policy, _LATER_OF_POLICIES)),
            "group": _group(x.group, config),
            "slots": [
                {"budget": s.budget, "type_k": s.type_k, "type_v": s.type_v} for s in x.slots
            ],
        }
        for x in scored
        for policy in [x.slots[0].policy]
    ]
    return {**found, "scored": said}


def plain(spec: Any, *, omit_defaults: bool = False) -> Any:
    """A configuration as JSON values; of real fields, whole numbers become real ones."""
    if dataclasses.is_dataclass(spec):
        out = {}
        for f in dataclasses.fields(spec):
            value = getattr(spec, f.name)
            if omit_defaults and value == f.default:
                continue
            is_real = isinstance(f.default, float) and type(value) is int
            out[f.name] = float(value) if is_real else plain(value, omit_defaults=omit_defaults)
        return out
    if isinstance(spec, Mapping):
        return {str(k): plain(v, omit_defaults=omit_defaults) for k, v in spec.items()}
    if isinstance(spec, (list, tuple)):
        return [plain(x, omit_defaults=omit_defaults) for x in spec]
    if isinstance(spec, np.generic):
        return spec.item()
    if spec is None or isinstance(spec, str | int | float):
        return spec
    raise BadConfig(
        f"a field has the value {ascii(spec)[:60]}, and sessions tell settings apart by their "
        "JSON; use numbers, texts, None, or tuples of them"
    )


def digest(fingerprint: Fingerprint) -> str:
    """sha256 of the fingerprint, hexadecimal: one name for all that it says and that decides."""
    model = fingerprint.get("model")
    if isinstance(model, Mapping):
        decides = {k: v for k, v in model.items() if k not in (NAME, WEIGHT_TYPE)}
        fingerprint = {**fingerprint, "model": decides}
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()


def differences(found: Fingerprint, wanted: Fingerprint) -> dict[str, tuple[Any, Any]]:
    """What differs: name -> (found, wanted), None for what is missing."""
    a, b = dict(_flat("", found)), dict(_flat("", wanted))
    names = [*a, *(name for name in b if name not in a)]
    out = {n: (a.get(n), b.get(n)) for n in names if a.get(n) != b.get(n)}
    out.pop(f"model.{NAME}", None)
    named = f"model.{WEIGHT_TYPE}"
    if None in out.get(named, ()):
        del out[named]
    # Where both are known the name says more than the digests do, and a policy by score more than
    # the shapes that follow from it.
    return {n: out[n] for n in sorted(out, key=lambda n: (n != named, not n.startswith("scored")))}


def check_match(found: Fingerprint, wanted: Fingerprint, *, convert: bool) -> None:
    """Refuses a session whose keys and values would mean something else here.

    Raises:
      SessionMismatch: something differs; the message says what, and both values.
    """
    other = differences(found, wanted)
    if convert:
        other = {k: v for k, v in other.items() if k not in _TYPES}
    if not other:
        return
    name, (a, b) = next(iter(other.items()))
    more = f", and {len(other) - 1} more differ" if len(other) > 1 else ""
    if set(other) <= set(_TYPES):
        remedy = f"use {name} {_short(a)}, or convert the session"
    elif name.startswith("scored") and ".policy.class." in name:
        remedy = (
            "use the class that kept its tokens: one of another module, version or source is "
            "another policy, and older sessions do not say which they had"
        )
    elif name == f"model.{WEIGHT_TYPE}":
        remedy = f"load the model with {_short(a)} weights"
    elif set(other) == {"model.weights"} and WEIGHT_TYPE not in found["model"]:
        remedy = (
            "use the model that it was made with; an older session does not name the dtype of its "
            "weights, which may have been bf16 or f16"
        )
    elif (there := named_model(found)) and there != (here := named_model(wanted)):
        raise SessionMismatch(
            f"the session was made with the model {there}, this is {here or 'one without a name'} "
            f"({name} differs{more}); use that model (-m)"
        )
    else:
        remedy = "use the model (-m) and the settings that it was made with"
    raise SessionMismatch(
        f"{name} is {_short(a)} in the session and {_short(b)} here{more}; {remedy}"
    )


def named_model(fingerprint: Fingerprint) -> str:
    """The name of the model that a session was made with; "" in older ones."""
    model = fingerprint.get("model")
    return str(model.get(NAME, "")) if isinstance(model, Mapping) else ""


def said_of(spec: Any, later: Sequence[str]) -> dict[str, Any]:
    """A configuration, of whose `later` fields those alone that say something.

    So files of all others stay what they were before there was such a field.
    """
    out = plain(spec)
    for f in dataclasses.fields(spec):
        if f.name in later and out[f.name] == plain(f.default):
            del out[f.name]
    return out


def named_policy(policy: object, fields: Mapping[str, Any]) -> dict[str, Any]:
    """A policy by its name and fields, and what tells a class of one's own from others."""
    own = class_identity(type(policy))
    return {"name": type(policy).__name__, **fields, **({"class": own} if own else {})}


def _group(group: GroupSpec, config: CacheConfig) -> dict[str, Any]:
    out = said_of(group, LATER_OF_GROUPS)
    if group.rope is not None:
        out["rope"]["n_ctx"] = config.n_ctx if group.rope.by_length else None
    return out


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key in value:
            yield from _flat(f"{name}.{key}" if name else str(key), value[key])
    elif isinstance(value, list) and any(isinstance(x, (Mapping, list)) for x in value):
        for i, x in enumerate(value):
            yield from _flat(f"{name}[{i}]", x)
    else:
        yield name, value


def _short(value: object) -> str:
    text = "missing" if value is None else str(value)
    text = ",".join(map(str, value)) if isinstance(value, list) else text
    return text if len(text) <= 60 else text[:57] + "..."
