"""A session that is there: what it says, whether it fits, and its way into a runtime."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any, TypeVar

from kvrt.cli.flags.evaluate import EvalFlags, SamplingFlags
from kvrt.errors import BadConfig, BadSession
from kvrt.options.cache import CacheConfig
from kvrt.options.option import Options
from kvrt.session import OpenedSession, described, fingerprint
from kvrt.session.manifest import Manifest

if TYPE_CHECKING:
    from kvrt.policies import AnyPolicy
    from kvrt_models.load import Opened

_Flags = TypeVar("_Flags", bound=EvalFlags)
# Of a text whose session has some, where no flag says how many.
_N_CHECKPOINTS = 32
_Drawn = TypeVar("_Drawn", bound=SamplingFlags)
_AnyFlags = TypeVar("_AnyFlags", bound=Options)


def follow(options: _Flags, found: Manifest) -> _Flags:
    """The options with what a session says in place of flags that were not given."""
    said = found.fingerprint
    extend = said.get("self_extend") or {}
    options = follow_types(options, found)
    masks = [described.mask(said, i) for i in range(len(found.groups))]
    wanted = {
        "rope": said.get("rope"),
        "hadamard": said.get("hadamard"),
        "n_ctx": max((g.n_cells for g in found.groups), default=None),
        "grp_attn_n": extend.get("ga_n"),
        "grp_attn_w": extend.get("ga_w"),
        "self_extend": extend.get("kind", "cache") if extend else None,
        "window_sinks": max((m.n_sink for m in masks if m.kind == "window"), default=None),
        "n_checkpoints": max(len(found.checkpoints), _N_CHECKPOINTS) if found.checkpoints else None,
    }
    if said.get("scored") and "policy" not in options.given:
        wanted |= _scored_policy(found)
    return _filled(options, wanted)


def _filled(options: _AnyFlags, wanted: dict[str, Any]) -> _AnyFlags:
    """The options with these values, but for None, in place of flags that were not given."""
    new = {k: v for k, v in wanted.items() if v is not None and k not in options.given}
    return dataclasses.replace(options, **new)


def _scored_policy(found: Manifest) -> dict[str, Any]:
    """The flags of a session's policy by score; nothing where it is one of somebody's own."""
    from kvrt.policies.scored import SCORED, DuoAttention  # it needs JAX

    said, known = found.policy or {}, {**SCORED, "duo_attention": DuoAttention}
    name = next((k for k, v in known.items() if v.__name__ == said.get("name")), None)
    if name is None or "class" in said:
        return {}
    interval = said.get("interval", known[name].interval)
    budget, n_sink = said.get("budget"), said.get("n_sink")
    wanted = {"policy_budget": str(budget), "policy_interval": interval, "n_sink": n_sink}
    wanted["close_up"] = said.get("close_up")
    if name == "duo_attention":
        heads = json.dumps(said.get("streaming"))
        wanted |= {"streaming_heads": heads, "n_stream": said.get("n_stream")}
    if said.get("n_read"):
        wanted |= {"n_read": said["n_read"], "refresh_every": said.get("refresh_every")}
    return {"policy": name, **wanted}


def follow_types(options: _Flags, found: Manifest) -> _Flags:
    """The options with the KV dtypes of a session where no flags name any."""
    said = found.fingerprint
    types = {f"cache_{name}": said.get(name) for name in ("type_k", "type_v")}
    return _filled(options, {k: tuple(x) if isinstance(x, list) else x for k, x in types.items()})


def follow_sampling(options: _Drawn, opened: OpenedSession | None) -> _Drawn:
    """The options with the sampling that a session was left with, where flags were not given.

    Raises:
      BadSession: no tokens can be sampled so.
    """
    if opened is None or opened.draw is None:
        return options
    # Late: commands that only look at sessions do without JAX.
    from kvrt import Sampling

    fields: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Sampling)}
    said: dict[str, Any] = {k: v for k, v in opened.draw.sampling.items() if k in fields}
    try:
        if any(type(fields[k]) is int and type(v) is not int for k, v in said.items()):
            raise BadConfig(f"whole numbers are wanted, found {dict(said)}")
        Sampling(**said)
    except BadConfig as error:
        raise BadSession(
            f"{opened.path}: its settings of sampling: {error}; give a sound session"
        ) from error
    names = {f.name for f in dataclasses.fields(SamplingFlags)} - {"given"}
    return _filled(options, {k: v for k, v in said.items() if k in names})


def check_fits(
    opened: OpenedSession,
    model: "Opened",
    config: CacheConfig,
    policy: "AnyPolicy | None" = None,
) -> None:
    """Refuses a session of another model or cache as far as that is known without weights.

    Raises:
      SessionMismatch: it is one; the message names the file.
    """
    from kvrt.cli.setup.config import layers_of_spec  # it needs JAX, most commands here do not

    said, spec = opened.manifest.fingerprint, model.spec
    layers = layers_of_spec(spec, config, policy)
    weights = (said.get("model") or {}).get("weights", "")
    here = fingerprint.describe(
        layers.groups, layers.recurrent, layers.config, spec.n_vocab, weights, model.identity
    )
    here = fingerprint.with_scored(here, layers.scored, layers.config)
    with opened.naming():
        fingerprint.check_match(said, here, convert=False)
