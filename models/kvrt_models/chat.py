"""Chat templates: messages to the text that a chat model was trained on.

The template is code from a model file, so a process of its own renders it, with bounds on steps,
memory and time. It costs about 50 ms.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from kvrt.errors import UsageError
from kvrt_models import bounded

_WALL_S = 20.0
_CPU_S = 0.5
_MEMORY_BYTES = 512 << 20


def render_template(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
    now: str | None = None,
) -> str:
    """The prompt that a template makes of messages.

    Args:
      template: Jinja source, `Tokenizer.chat_template`.
      messages: dicts with "role" and "content".
      bos: text of the bos token, "" if there is none.
      eos: text of the eos token, "" if there is none.
      add_generation_prompt: end with what begins the assistant's turn.
      now: time in ISO format that the template writes as today's; the clock's by default.

    Returns:
      The text, to be encoded with parse_special=True; a template that writes bos itself wants
      add_special=False.

    Raises:
      UsageError: no template, or one that fails, refuses the messages or asks for too much.
    """
    if not template:
        raise UsageError("the model has no chat template; leave out --chat or take another model")
    values = {
        "messages": list(map(dict, messages)),
        "bos_token": bos,
        "eos_token": eos,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        request = json.dumps({"template": template, "values": values, "now": now})
    except (TypeError, ValueError) as error:
        raise UsageError(f"a chat message is not plain data: {error}; use text") from error
    answer = _ask(request)
    if "text" not in answer:
        raise UsageError(f"the chat template failed: {answer.get('error')}; leave out --chat")
    return answer["text"]


def _ask(request: str) -> dict[str, str]:
    """One request to a fresh process."""
    command = bounded.limited_command("chat_child.py", memory_bytes=_MEMORY_BYTES, cpu_s=_CPU_S)
    try:
        done = subprocess.run(
            command, input=request.encode(), capture_output=True, timeout=_WALL_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _refused(f"took more than {_WALL_S:.0f} s") from error
    if done.returncode < 0:
        raise _refused("needs more time or memory than a chat template may have")
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        said = " ".join(done.stderr.decode(errors="replace").split())[-200:]
        raise _refused(f"could not be rendered: {said or 'no answer'}") from error


def _refused(why: str) -> UsageError:
    return UsageError(f"the chat template {why}; leave out --chat or take another model")
