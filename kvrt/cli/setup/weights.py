"""Which type the weights get: a flag's, else that of what is resumed, else the platform's."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import jax

from kvrt.errors import BadSession, SessionMismatch
from kvrt.session import OpenedSession
from kvrt_models.load import Opened
from kvrt_models.weights.types import WeightType, default_type

# Up to int8, sessions did not name the type; almost all were made by what was the default then.
OF_OLDER: WeightType = "f32"
_SHOWN = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsChoice:
    """The type of a model's matrices.

    Attributes:
      dtype: the type.
      why: in a word or two, where no flag says it; else "".
    """

    dtype: WeightType
    why: str = ""

    def note(self, model: Opened) -> str:
        """For a summary: the type, and which matrices have another."""
        text = self.dtype + (f" ({self.why})" if self.why else "")
        if n := model.weights.as_stored:
            text += f"; {n:,} matri{'x' if n == 1 else 'ces'} as Q8_0 in the file"
        others = model.weights.in_bf16
        if not others:
            return text
        shown = ", ".join(f"{name} ({why})" for name, why in list(others.items())[:_SHOWN])
        more = f" and {len(others) - _SHOWN:,} more" if len(others) > _SHOWN else ""
        return f"{text}; {len(others):,} in bf16 for what int8 would lose: {shown}{more}"


def choose_weights(flag: WeightType | None, opened: OpenedSession | None = None) -> WeightsChoice:
    """The type for a command.

    Args:
      flag: that names it; None leaves it open.
      opened: a session that is resumed.

    Raises:
      SessionMismatch: the flag names another than the session was written with.
      BadSession: its type is none.
    """
    said = None if opened is None else weight_type(opened.path, opened.manifest.fingerprint)
    if flag is None:
        if opened is not None:
            if said is None:
                return WeightsChoice(dtype=OF_OLDER, why="as older sessions")
            return WeightsChoice(dtype=said, why="as the session")
        platform = jax.default_backend()
        return WeightsChoice(dtype=default_type(platform), why=f"default on {platform}")
    if opened is not None and said not in (None, flag):
        raise SessionMismatch(
            f"{opened.path}: the session was written with {said} weights, --dtype {flag} here; "
            "leave --dtype out, or give another session"
        )
    return WeightsChoice(dtype=flag)


def weight_type(path: Path, fingerprint: Mapping[str, Any]) -> WeightType | None:
    """What a session says of its weights; None of one that is older.

    Raises:
      BadSession: it names a type that there is not.
    """
    model = fingerprint.get("model")
    said = model.get("weight_type") if isinstance(model, Mapping) else None
    known = {name: name for name in get_args(WeightType)}
    if said is not None and (not isinstance(said, str) or said not in known):
        raise BadSession(
            f"{path}: written with weights of type {ascii(said)[:40]}, known are "
            f"{', '.join(known)}; update kvrt, or give another session"
        )
    return said  # pyright: ignore[reportReturnType]
