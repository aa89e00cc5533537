"""Keys of a GGUF that kvrt and llama.cpp read differently, or that neither of them uses.

Source: logits of llama.cpp's builds of October 2026 with and without each key.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvrt_models.header import Header, brief

# Keys that change no logits there either, with the values at which they say nothing.
_UNUSED = {
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 0.0, 1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
# Likewise, of a family; and keys above that a family does use.
_UNUSED_OF = {"gpt-oss": {"expert_shared_count": (0,), "expert_weights_scale": (0.0, 1.0)}}
_USED_OF = {"deepseek2": ("rope.scaling.yarn_log_multiplier",)}
_YARN = {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
_WINDOW = "attention.sliding_window"
# Of Mistral's files, which go by this name, every layer has the window.
_WINDOWED = "llama"
# Families whose layers have windows there as well.
_WITH_WINDOWS = ("gemma2", "gemma3", "gpt-oss")


def departures(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """A line for each such key of a header whose spec was found sound."""
    arch = metadata["general.architecture"]
    keys = Header(metadata, f"{arch}.")
    lines = []
    for key, neutral in (_UNUSED | _UNUSED_OF.get(arch, {})).items():
        value = keys.values.get(keys.prefix + key)
        is_neutral = value is None or (not isinstance(value, np.ndarray) and value in neutral)
        if not is_neutral and key not in _USED_OF.get(arch, ()):
            lines.append(_unused(keys, key, value))
    if keys.text("rope.scaling.type", "none") == "yarn":
        for key, theirs in _YARN.items():
            value = keys.number(key, theirs)
            if value != theirs:
                lines.append(_differs(keys, key, value, f"takes {theirs:g}"))
    window = keys.whole(_WINDOW, 0, least=0)
    if 0 < window < keys.whole("context_length"):
        if arch == _WINDOWED:
            lines.append(_differs(keys, _WINDOW, window, "attends to every token"))
        elif arch not in _WITH_WINDOWS:
            lines.append(_unused(keys, _WINDOW, window))
    return tuple(lines)


def _unused(keys: Header, key: str, value: Any) -> str:
    return f"{keys.prefix + key!r} is {brief(value)} and is not used, as in llama.cpp"


def _differs(keys: Header, key: str, value: float, there: str) -> str:
    return (
        f"{keys.prefix + key!r} is {value:g} and is used; llama.cpp {there}, so its logits differ, "
        "and its session files do not fit"
    )
