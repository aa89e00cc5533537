"""Renders one chat template: the process that `kvrt_models.chat` starts; imports nothing of kvrt.

Reads a JSON request from standard input and writes a JSON answer. A template comes with a model
file and may be hostile: minijinja's fuel bounds the steps, but neither the memory (a string that
doubles forty times aborts the process) nor the time of one step, so `bounded.py` runs it.
"""

import datetime
import json
import re
import sys
from collections.abc import Iterable
from typing import Any

# Marks an answer for training; its variables are its own, and it prints what is in it.
GENERATION = re.compile(r"({%[-+]?\s*(?:end)?)generation(\s*[-+]?%})")
FUEL = 1_000_000
OUTPUT_CHARS = 1 << 24


def main() -> None:
    """Answers one request: {"text": ...}, or {"error": ...} in one line."""
    request = json.load(sys.stdin)
    # A string goes out, never an object: what cannot be encoded is an error like any other.
    json.dump(_answer(request), sys.stdout)


def _answer(request: dict[str, Any]) -> dict[str, str]:
    import minijinja

    at = request.get("now")
    now = datetime.datetime.fromisoformat(at) if at else datetime.datetime.now()
    environment = minijinja.Environment(
        fuel=FUEL,
        trim_blocks=True,
        lstrip_blocks=True,
        filters={"tojson": _tojson},
        tests={"iterable": _is_iterable},
        globals={"raise_exception": _raise_exception, "strftime_now": now.strftime},
    )
    # A message is text, not HTML; and no debug output, which would quote the template.
    environment.auto_escape_callback = lambda name: False
    environment.debug = False
    template = GENERATION.sub(r"\1with\2", request["template"])
    # What Hugging Face's renderer always defines, and what FireFunction's template wants without.
    day = now.strftime("%b %d %Y")
    values = {"tools": None, "documents": None, "functions": "", "datetime": day}
    try:
        text = environment.render_str(template, "chat_template", **values | request["values"])
    except (minijinja.TemplateError, ValueError, TypeError, MemoryError) as error:
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}
    if len(text) > OUTPUT_CHARS:
        return {"error": f"it makes {len(text)} characters, {OUTPUT_CHARS} is the limit"}
    return {"text": text}


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _is_iterable(value: Any) -> bool:
    """As in Jinja, where none is not."""
    return isinstance(value, (str, Iterable))


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as Hugging Face's templates expect it: no HTML escapes, no ASCII escapes."""
    if indent is not None and not 0 <= indent <= 16:
        raise ValueError("tojson: indent must be 0 to 16")
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


if __name__ == "__main__":
    main()
