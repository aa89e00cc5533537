"""A session that is there: what it says, whether it fits, and its way into a runtime."""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvrt import session
from kvrt.cli.flags.evaluate import EvalFlags, SamplingFlags
from kvrt.cli.report.phrases import token_noun
from kvrt.config import CacheConfig
from kvrt.errors import (
    BadConfig,
    BadSession,
    CacheFull,
    SessionMismatch,
    UsageError,
    reason,
)
from kvrt.session import OpenedSession, described, fingerprint
from kvrt.session.kv_file import frame
from kvrt.session.library.stored import FOLDER_INDEX
from kvrt.session.manifest import Manifest

if TYPE_CHECKING:
    from kvrt import Runtime
    from kvrt.policies import AnyPolicy
    from kvrt_models.load import Opened

_Flags = TypeVar("_Flags", bound=EvalFlags)
_SHOWN = 8  # sequences that a message lists
# Of a text whose session has some, where no flag says how many.
_N_CHECKPOINTS = 32
_Drawn = TypeVar("_Drawn", bound=SamplingFlags)


def open_existing(path: Path) -> OpenedSession:
    """Reads all of a session but its cached keys and values.

    Raises:
      UsageError: nothing is there.
      BadSession: it is damaged, or no session.
    """
    return session.open_session(existing(path))


def choose_sequence(
    opened: OpenedSession, seq_id: int | None, *, is_new_one: bool = False
) -> OpenedSession:
    """A session with the sequence that --seq names; without it the only one.

    Args:
      opened: the session.
      seq_id: the sequence; None leaves it open.
      is_new_one: it may be one that the session does not hold yet.

    Raises:
      UsageError: it holds several and none is named, or not the one that is.
    """
    there = opened.seq_ids
    if (seq_id is None and len(there) <= 1) or seq_id in there:
        return dataclasses.replace(opened, chosen=seq_id)
    if is_new_one and seq_id is not None:
        return dataclasses.replace(opened, chosen=seq_id)
    n_tokens = opened.manifest.n_tokens
    listed = ", ".join(f"{s} ({n_tokens[s]:,} {token_noun(n_tokens[s])})" for s in there[:_SHOWN])
    more = f" and {len(there) - _SHOWN:,} more" if len(there) > _SHOWN else ""
    lacks = "" if seq_id is None else f", and no {seq_id}"
    raise UsageError(
        f"{opened.path}: holds {'sequences' if len(there) > 1 else 'sequence'} {listed or 'none'}"
        f"{more}{lacks}; choose one with --seq"
    )


def existing(path: Path) -> Path:
    """The path of a session that is to be read.

    Raises:
      UsageError: nothing is there, or nothing that may be seen.
    """
    try:
        path.stat()
    except OSError as error:
        raise UsageError(f"{path}: {reason(error)}; give the path of a session") from error
    return path


def real_path(name: str | Path) -> Path:
    """Where a session is written: what a link points to, so that the link stays one."""
    path = Path(name)
    return path.resolve() if path.is_symlink() else path


def holds_session(path: Path) -> bool:
    """Whether a session is at a path, sound or damaged, that no other output may replace."""
    if path.is_dir():
        return (path / FOLDER_INDEX).exists()
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return frame.is_session(file.read(frame.PAGE))


def is_library(path: Path) -> bool:
    """Whether a path is a folder of sessions, and not one session in a folder."""
    return os.path.isdir(path) and not os.path.exists(path / FOLDER_INDEX)


def follow(options: _Flags, found: Manifest) -> _Flags:
    """The options with what a session says in place of flags that were not given."""
    said = found.fingerprint
    extend = said.get("self_extend") or {}
    options = follow_types(options, found)
    wanted = {
        "rope": said.get("rope"),
        "hadamard": said.get("hadamard"),
        "n_ctx": max((g.n_cells for g in found.groups), default=None),
        "grp_attn_n": extend.get("ga_n"),
        "grp_attn_w": extend.get("ga_w"),
        "self_extend": extend.get("kind", "cache") if extend else None,
        "window_sinks": _window_sinks(found),
        "n_checkpoints": max(len(found.checkpoints), _N_CHECKPOINTS) if found.checkpoints else None,
    }
    if said.get("scored") and "policy" not in options.given:
        wanted |= _scored_policy(found)
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


def _window_sinks(found: Manifest) -> int | None:
    """First tokens that windowed layers of a session go on seeing; None where there are none."""
    masks = [described.mask(found.fingerprint, i) for i in range(len(found.groups))]
    return max((m.n_sink for m in masks if m.kind == "window"), default=None)


def follow_types(options: _Flags, found: Manifest) -> _Flags:
    """The options with the KV dtypes of a session where no flags name any."""
    said = found.fingerprint
    wanted = {
        "cache_type_k": _types(said.get("type_k")),
        "cache_type_v": _types(said.get("type_v")),
    }
    new = {k: v for k, v in wanted.items() if v is not None and k not in options.given}
    return dataclasses.replace(options, **new)


def _types(said: Any) -> Any:
    """KV dtypes as flags give them."""
    return tuple(said) if isinstance(said, list) else said


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
    names = {f.name for f in dataclasses.fields(SamplingFlags)} - {"given"} - options.given
    return dataclasses.replace(options, **{k: v for k, v in said.items() if k in names})


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
    from kvrt.cli.setup.policy import layers_of_spec  # it needs JAX, most commands here do not

    said, spec = opened.manifest.fingerprint, model.spec
    layers = layers_of_spec(spec, config, policy)
    weights = (said.get("model") or {}).get("weights", "")
    here = fingerprint.describe(
        layers.groups, layers.recurrent, layers.config, spec.n_vocab, weights, model.identity
    )
    here = fingerprint.with_scored(here, layers.scored, layers.config)
    with naming_session(opened.path):
        fingerprint.check_match(said, here, convert=False)


@contextlib.contextmanager
def naming_session(path: Path) -> Iterator[None]:
    """Puts the name of a session in front of what does not fit."""
    try:
        yield
    except (SessionMismatch, CacheFull) as error:
        raise type(error)(f"{path}: {error}") from error


def restore_first(runtime: "Runtime", opened: OpenedSession) -> float:
    """Puts the first sequence of a session into a runtime as its sequence 0.

    Returns:
      Seconds, without compiling.

    Raises:
      SessionMismatch: it is of another model or cache.
      BadSession: it is damaged.
    """
    import jax  # late: a session is also opened by commands that need none

    compiled, start = runtime.stats().compile_s, time.perf_counter()
    snapshot = session.read(opened)
    with naming_session(opened.path):
        mine = {opened.seq_id: 0} if opened.seq_id in snapshot.seq_ids else {}
        runtime.restore(snapshot, mine if snapshot.seq_ids else None)
    jax.block_until_ready(runtime.cache)
    return time.perf_counter() - start - (runtime.stats().compile_s - compiled)
