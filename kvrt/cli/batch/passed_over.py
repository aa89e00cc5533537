"""Sessions of a folder that no request could begin from, for other flags would be needed."""

from collections import Counter
from pathlib import Path
from typing import Any

from kvrt.cli.setup.weights import OF_OLDER, weight_type
from kvrt.errors import KvrtError
from kvrt.session import fingerprint, io
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.library.entries import Entry, is_as_added
from kvrt.session.library.library import Library

_WEIGHTS, _TYPE = "model.weights", f"model.{fingerprint.WEIGHT_TYPE}"
_CACHE = {"type_k": "--cache_type_k", "type_v": "--cache_type_v"}
_SHOWN = 2


def passed_over(folder: Path, here: Fingerprint) -> str | None:
    """A line of a summary; None where all sessions of the folder serve, or are of other models.

    Weights of another type have another digest: whether they are this model's, nobody can say.

    Args:
      folder: with an index.
      here: the fingerprint of the engine.
    """
    found: Counter[str] = Counter()
    flags: dict[str, str | None] = {fingerprint.digest(here): None}
    # Sessions with one digest have one fingerprint, so few are opened.
    for entry in _entries(folder):
        if entry.fingerprint not in flags and is_as_added(entry):
            flags[entry.fingerprint] = _flags(entry.path, here)
        if flag := flags.get(entry.fingerprint):
            found[flag] += 1
    if not found:
        return None
    shown = "; ".join(f"{n:,} with {flag}" for flag, n in found.most_common(_SHOWN))
    more = f"; {len(found) - _SHOWN:,} more settings" if len(found) > _SHOWN else ""
    n = found.total()
    were = "session there was" if n == 1 else "sessions there were"
    return f"{'':11}{n:,} {were} passed over; of this model they serve {shown}{more}"


def _entries(folder: Path) -> tuple[Entry, ...]:
    """What the index has; nothing if it was damaged since the engine began, for all are served."""
    try:
        return Library(folder).entries()
    except KvrtError:
        return ()


def _flags(path: Path, here: Fingerprint) -> str | None:
    """Flags with which a session would serve; None where no flags would do, or it is damaged."""
    try:
        said = io.open_session(path, is_use=False).manifest.fingerprint
        weights = weight_type(path, said) or OF_OLDER
    except (OSError, KvrtError):
        return None
    other = fingerprint.differences(said, here)
    if not set(other) <= {_WEIGHTS, _TYPE, *_CACHE, "hadamard"}:
        return None
    wanted = []
    if _WEIGHTS in other:
        if weights == here["model"].get(fingerprint.WEIGHT_TYPE):
            return None  # of another model
        wanted.append(f"--dtype {weights}")
    wanted += [f"{flag} {_listed(said[name])}" for name, flag in _CACHE.items() if name in other]
    if "hadamard" in other:
        wanted.append("--hadamard" if said["hadamard"] else "--nohadamard")
    return " ".join(wanted) or None


def _listed(types: Any) -> str:
    return types if isinstance(types, str) else ",".join(types)
