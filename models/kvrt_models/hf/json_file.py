"""Reads the JSON files of a model folder within a size limit."""

import collections
import json
import os
from pathlib import Path
from typing import Any

from kvrt.errors import BadModelFile
from kvrt.files import regular

MAX_BYTES = 1 << 26
# Three bytes of text can make an object of 64 bytes.
MAX_NESTED = 1 << 22


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most `MAX_BYTES`.

    Raises:
      BadModelFile: missing, too large, not UTF-8, not JSON, or not an object.
    """
    return parse_json(path, read_text_file(path))


def read_text_file(path: Path) -> str:
    """A text file of at most `MAX_BYTES`.

    Raises:
      BadModelFile: missing, too large, or not UTF-8.
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
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadModelFile(
            f"{path}: not UTF-8 at byte {error.start}; fetch the file again"
        ) from error


def parse_json(path: Path, text: str) -> dict[str, Any]:
    """A JSON object that stands in a file; what readers may understand differently is refused.

    Args:
      path: the file, for messages.
      text: its content.

    Raises:
      BadModelFile: not JSON, not an object, a key that stands twice, half a character, or too
        many lists and objects.
    """
    n_nested = text.count("[") + text.count("{")
    if n_nested > MAX_NESTED:
        raise BadModelFile(
            f"{path}: {n_nested} lists and objects, {MAX_NESTED} are allowed; take the model's own "
            f"file"
        )
    try:
        value = json.loads(text, object_pairs_hook=_object)
        if "\\ud" in text or "\\uD" in text:
            # An escape may name half of a character, which no text can hold.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadModelFile(f"{path}: not JSON: {reason}; fetch the file again") from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{path}: holds no JSON object; fetch the file again")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys stand once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = collections.Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {twice[:60]!a} stands twice")
    return found
