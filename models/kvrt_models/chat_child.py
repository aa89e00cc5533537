"""Renders one chat template: the process that `kvrt_models.chat` starts; imports nothing of kvrt.

Reads a JSON request from standard input and writes a JSON answer. A template comes with a model
file and may be hostile: minijinja's fuel bounds the steps, but neither the memory (a string that
doubles forty times aborts the process) nor the time of one step, so `bounded.py` runs it.
"""

import datetime
import json
import sys
from typing import Any

FUEL = 1_000_000
OUTPUT_CHARS = 1 << 24


def main() -> None:
    """Answers one request: {"text": ...}, or {"error": ...} in one line."""
    request = json.load(sys.stdin)
    # A string goes out, never an object: what cannot be encoded is an error like any other.
    json.dump(_answer(request), sys.stdout)


def _answer(request: dict[str, Any]) -> dict[str, str]:
    import minijinja

    environment = minijinja.Environment(
        fuel=FUEL,
        trim_blocks=True,
        lstrip_blocks=True,
        filters={"tojson": _tojson},
        globals={"raise_exception": _raise_exception, "strftime_now": _strftime_now},
    )
    # A message is text, not HTML; and no debug output, which would quote the template.
    environment.auto_escape_callback = lambda name: False
    environment.debug = False
    try:
        text = environment.render_str(request["template"], "chat_template", **request["values"])
    except (minijinja.TemplateError, ValueError, TypeError, MemoryError) as error:
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}
    if len(text) > OUTPUT_CHARS:
        return {"error": f"it makes {len(text)} characters, {OUTPUT_CHARS} is the limit"}
    return {"text": text}


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as Hugging Face's templates expect it: no HTML escapes, no ASCII escapes."""
    if indent is not None and not 0 <= indent <= 16:
        raise ValueError("tojson: indent must be 0 to 16")
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


if __name__ == "__main__":
    main()
