"""Reads the JSON files of a model folder within a size limit."""

import json
import os
from pathlib import Path
from typing import Any

from kvrt import regular
from kvrt.errors import BadModelFile

MAX_BYTES = 1 << 26


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most `MAX_BYTES`.

    Raises:
      BadModelFile: missing, too large, not JSON, or not an object.
    """
    try:
        with regular.open_file(path) as file:
            n_bytes = os.fstat(file.fileno()).st_size
            raw = file.read(n_bytes) if n_bytes <= MAX_BYTES else b""
    except OSError as error:
        raise BadModelFile(f"{path}: cannot be read: {error.strerror or error}") from error
    if n_bytes > MAX_BYTES:
        raise BadModelFile(
            f"{path}: {n_bytes} bytes, {MAX_BYTES} are allowed; take the model's own file"
        )
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{path}: not JSON: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{path}: holds no JSON object; fetch the file again")
    return value
