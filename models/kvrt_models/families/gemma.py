"""Gemma 2 and 3: layers with windows and full ones, and norms behind what they compute."""

import dataclasses
import math
from typing import Any

from kvrt.config import RopeSpec
from kvrt.errors import UnsupportedModel
from kvrt_models.families.shared.family import Family
from kvrt_models.families.shared.kinds import FULL, WINDOWED, windows
from kvrt_models.families.shared.rope import near_rope, read_rope, rope_of
from kvrt_models.header import Header, brief
from kvrt_models.spec import Layers, gemma

_STRETCHES = ("default", "linear")
ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
_USUAL = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096}
# llama.cpp knows the Gemmas whose scores are scaled otherwise by their number of layers.
_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def _gemma2(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Windowed and full layers alternate, with soft caps on scores and on logits.

    A cap that is null is off; one that is left out is that of the first models.
    """
    rope = rope_of(keys, head_dim)
    caps = [_cap(keys, f"{x}_logit_softcapping") for x in ("attn", "final")]
    windowed, full, window = windows(keys, n_layers, 2)
    return dict(
        layers=[
            Layers(layers=windowed, rope=near_rope(keys, rope), window=window, soft_cap=caps[0]),
            Layers(layers=full, rope=rope, soft_cap=caps[0]),
        ],
        **_shared(keys, n_layers, caps[1]),
    )


def _gemma3(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Windowed layers and full ones, each kind with RoPE of its own."""
    keys.only("attn_logit_softcapping", *(() if keys.tensors is None else (0.0,)))
    if keys.tensors is None:
        period = keys.whole("sliding_window_pattern", 6)
        near, far = gemma3_ropes(keys, head_dim)
    else:
        period, far = 6, rope_of(keys, head_dim)
        if far.scaling not in ("none", "linear"):
            raise UnsupportedModel(
                f"{keys.arch} with RoPE scaling {far.scaling!r}; only none or linear"
            )
        base = keys.number("rope.freq_base_swa", 10000.0)
        near = dataclasses.replace(far, base=base, scaling="none", factor=1.0)
    windowed, full, window = windows(keys, n_layers, period)
    return dict(
        layers=[Layers(layers=windowed, rope=near, window=window), Layers(layers=full, rope=far)],
        **_shared(keys, n_layers, keys.number("final_logit_softcapping", 0.0, zero=True)),
    )


def _cap(keys: Header, key: str) -> float | None:
    return None if keys.tensors is None and keys.is_null(key) else keys.number(key)


def _shared(keys: Header, n_layers: int, logit_cap: float | None) -> dict[str, Any]:
    """Scales and caps; scores of a GGUF's 27B are divided by the root of width over heads."""
    n_embd, scale = keys.whole("hidden_size"), None
    if keys.tensors is None:
        keys.only("use_bidirectional_attention", False)
        scale = 1 / math.sqrt(keys.number("query_pre_attn_scalar", 256.0))
    elif "rope_freqs.weight" in keys.tensors:
        raise UnsupportedModel(
            f"a {keys.arch} with the tensor 'rope_freqs.weight' is not supported; convert the "
            "model again"
        )
    elif n_layers == _27B_LAYERS[keys.arch]:
        scale = math.sqrt(keys.by_layer("num_attention_heads", n_layers)[0] / n_embd)
    return dict(scale=scale, **gemma(n_embd, logit_cap))


def gemma3_ropes(keys: Header, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """RoPE of windowed and of full layers; rope_scaling of older files is for the full ones."""
    rules = keys.inner("rope_parameters")
    unknown = sorted(rules.values.keys() - {WINDOWED, FULL})
    if unknown:
        raise UnsupportedModel(
            f"'rope_parameters' with {brief(unknown[0])} is not supported; only {WINDOWED}, {FULL}"
        )
    full = {**rules.inner(FULL).values, **keys.inner("rope_scaling").values}
    bases = keys.number("rope_local_base_freq", 1e4), keys.number("rope_theta", 1e6)
    near, far = (
        read_rope(keys, Header(found, usual={"rope_theta": base}), head_dim, known=_STRETCHES)
        for found, base in zip((rules.inner(WINDOWED).values, full), bases, strict=True)
    )
    return near, far


FAMILIES = (
    Family(
        read=_gemma2,
        hf="gemma2",
        gguf="gemma2",
        usual={**_USUAL, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        gguf_usual={
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        activation=ACTIVATION,
        norms_less_one=True,
    ),
    Family(
        read=_gemma3,
        hf="gemma3_text",
        gguf="gemma3",
        usual=_USUAL,
        gguf_usual={"sliding_window": 0},
        activation=ACTIVATION,
        qk_norm=True,
        norms_less_one=True,
    ),
)
