"""What llama.cpp's session files say, whoever reads or writes them.

    whole file     "ggsn", version, tokens, architecture, sections
    one sequence   "ggsq", version, tokens, sections

A section holds the cells, keys and values of one of llama.cpp's caches: of all layers, or one of
the layers that see everything and a second of the windowed ones.

Source: llama.cpp `llama-context.cpp`, `llama-kv-cache.cpp`, `llama-kv-cache-iswa.cpp`.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvrt.config import GroupSpec, RopeLayout
from kvrt.errors import SessionMismatch
from kvrt.session.interop.foreign import DTYPES

WHOLE, SEQUENCE = 0x6767736E, 0x67677371
# The older and the newer version: since llama.cpp 0.6 a section says whether keys and values were
# rotated to be quantized, by the size of the rotation of keys and of values, 0 for none.
VERSIONS = {WHOLE: (10, 11), SEQUENCE: (3, 4)}
# KV dtypes: llama.cpp's number and name; those that kvrt has, and the others.
GGML_TYPES = {0: "f32", 1: "f16", 30: "bf16", 8: "q8_0"}
GGML_IDS = {name: number for number, name in GGML_TYPES.items()}
QUANTIZED = {2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 20: "iq4_nl"}
# A group of q8_0: its scale, then its whole numbers.
Q8_0 = np.dtype([("scale", "<f2"), ("codes", "i1", (32,))])
# Heads that llama.cpp rotates before it quantizes are multiples of so many channels.
ROTATED = 64
# What the server writes before the tokens of a slot.
SLOT_MARK, SLOT_VERSION = -1, 1
# What it writes after keys and values, of states that it may go back to.
CHECKPOINTS, CHECKPOINTS_VERSION = 0x504B4353, 1

# Order of a key's channels in llama.cpp, by its name of the architecture.
_LAYOUTS: dict[str, RopeLayout] = {
    "llama": "norm",
    "qwen2": "neox",
    "qwen3": "neox",
    "gemma2": "neox",
    "gemma3": "neox",
    "gpt-oss": "neox",
    # Without RoPE: the order does not matter.
    "mamba": "norm",
    "mamba2": "norm",
    "jamba": "norm",
    "granitehybrid": "norm",
}
# Names that Hugging Face has for them.
_NAMES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "bamba": "granitehybrid",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a layer's keys and values belong.

    Attributes:
      layer: of the model.
      group: index of its group.
      index: of the layer in that group.
    """

    layer: int
    group: int
    index: int


def architecture(name: str) -> str:
    """llama.cpp's name of an architecture.

    Raises:
      SessionMismatch: its files are not known here.
    """
    arch = _NAMES.get(name, name)
    if arch not in _LAYOUTS:
        raise SessionMismatch(
            f"session files of llama.cpp are not supported for {name!r}; only for "
            f"{', '.join((*_LAYOUTS, *_NAMES))}"
        )
    return arch


def layout(arch: str) -> RopeLayout:
    """Order of a key's channels in llama.cpp."""
    return _LAYOUTS[arch]


def sections(groups: Sequence[GroupSpec]) -> list[list[Place]]:
    """Layers of each section, in the file's order: of all, or full ones and then windowed ones.

    Raises:
      SessionMismatch: llama.cpp has no cache for such layers.
    """
    for group in groups:
        if group.mask.kind == "symmetric" or group.mask.n_sink:
            raise SessionMismatch(
                f"llama.cpp has no cache for a {group.mask.kind} mask with {group.mask.n_sink} "
                "sinks; only for full, windowed and chunked ones without"
            )
    if len({group.mask for group in groups if group.mask.kind != "full"}) > 1:
        raise SessionMismatch("llama.cpp has one size of windows a model, this one has several")
    places: dict[bool, list[Place]] = {}
    for g, group in enumerate(groups):
        found = places.setdefault(group.mask.kind == "full", [])
        found += [Place(layer=at, group=g, index=i) for i, at in enumerate(group.layers)]
    return [sorted(places[full], key=lambda p: p.layer) for full in (True, False) if full in places]


def unit(name: str) -> tuple[np.dtype, int]:
    """Elements of keys or values of a dtype, and channels of each."""
    return (Q8_0, 32) if name == "q8_0" else (DTYPES[name], 1)


def type_name(name: str, number: int) -> str:
    """The KV dtype that a number stands for in the file of a name.

    Raises:
      SessionMismatch: kvrt does not have it.
    """
    if number in GGML_TYPES:
        return GGML_TYPES[number]
    raise SessionMismatch(
        f"{name}: KV dtype {QUANTIZED.get(number, number)} is not supported, only "
        f"{', '.join(GGML_IDS)}; save it from a cache of type f16 (-ctk f16 -ctv f16)"
    )
