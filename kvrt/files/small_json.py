"""Small files of JSON that a user names: of heads, of channels."""

import json
from typing import Any

from kvrt.errors import BadConfig
from kvrt.files import regular

_MOST_BYTES = 1 << 26


def read_json_file(path: str, what: str) -> Any:
    """The value in a file of `what`, which the line of a mistake names.

    Raises:
      BadConfig: it is no regular file, cannot be read, is larger than 64 MiB, or has no JSON.
    """
    try:
        with open(regular.open_fd(path), "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError("it is larger than 64 MiB")
        return json_value(data)
    except (OSError, ValueError) as error:
        said = error.strerror or error if isinstance(error, OSError) else error
        raise BadConfig(f"{path}: {said}; name a file of {what}") from error


def json_value(text: str | bytes) -> Any:
    """The value of JSON.

    Raises:
      ValueError: it is none, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
