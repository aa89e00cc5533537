"""Small things that were found out once and hold for this machine: one JSON file each.

A file says what it depends on, its key, and is believed only where that is what is found now. It is
never needed: one that is damaged is found out anew, and a folder that cannot be written costs that
at each start.
"""

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvrt.errors import reason
from kvrt.files import regular
from kvrt.files.atomic import temporary

_MOST_BYTES = 1 << 16

T = TypeVar("T")


def kept_path(folder: Path, kind: str, key: Mapping[str, Any]) -> Path:
    """The file of a key: one of another key has another name."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / f"{kind}-{digest[:32]}.json"


def read_kept(path: Path, key: Mapping[str, Any], parse: Callable[[Any], T], what: str) -> T | None:
    """What was kept for this key, or None.

    Args:
      path: as `kept_path` has it.
      key: JSON values.
      parse: of the JSON value; raises ValueError, KeyError or TypeError where it is none.
      what: is done again, for the warning about a file that is no use.
    """
    try:
        with regular.open_file(path) as file:
            held = json.loads(file.read(_MOST_BYTES))
        if held["key"] == dict(key):
            return parse(held["value"])
        found = "of something else"
    except FileNotFoundError:
        return None
    except OSError as error:
        found = f"cannot be read: {reason(error)}"
    except (ValueError, KeyError, TypeError, RecursionError):
        found = "damaged"
    warnings.warn(f"{path}: {found}; {what} again", stacklevel=2)
    return None


def keep(path: Path, key: Mapping[str, Any], value: Any) -> None:
    """Keeps a JSON value for a key, where that is possible."""
    text = json.dumps({"key": dict(key), "value": value}, indent=1)
    new = temporary(path)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            new.write_text(text)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
