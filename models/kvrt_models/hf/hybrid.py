"""Families whose layers differ, from a Hugging Face config.json: windows in some layers only."""

import math
from collections.abc import Sequence
from typing import Any

from kvrt.config import RopeSpec
from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models import spec
from kvrt_models.header import REMEDY, Header, brief
from kvrt_models.hf import rope as hf_rope
from kvrt_models.spec import Layers

WINDOWED, FULL = "sliding_attention", "full_attention"


def gemma2(keys: Header, arch: str, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Windowed and full layers alternate, with soft caps on scores and on logits.

    A cap that is null is off; one that is left out is that of transformers.
    """
    rope = hf_rope.shared_rope(keys, head_dim)
    cap = _cap(keys, "attn_logit_softcapping", 50.0)
    windowed, full = windowed_and_full(layer_kinds(keys, arch, periodic(2, n_layers)))
    return dict(
        layers=[
            Layers(ids=windowed, rope=rope, window=window_of(keys, windowed), soft_cap=cap),
            Layers(ids=full, rope=rope, soft_cap=cap),
        ],
        **_gemma(keys, _cap(keys, "final_logit_softcapping", 30.0)),
    )


def gemma3(keys: Header, arch: str, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Windowed layers and full ones, each kind with RoPE of its own."""
    keys.only("attn_logit_softcapping")
    period = keys.whole("sliding_window_pattern", 6)
    windowed, full = windowed_and_full(layer_kinds(keys, arch, periodic(period, n_layers)))
    own_rope, full_rope = gemma3_ropes(keys, head_dim)
    return dict(
        layers=[
            Layers(ids=windowed, rope=own_rope, window=window_of(keys, windowed)),
            Layers(ids=full, rope=full_rope),
        ],
        qk_norm=True,
        **_gemma(keys, keys.number("final_logit_softcapping", 0.0, zero=True)),
    )


def _gemma(keys: Header, logit_cap: float | None) -> dict[str, Any]:
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    keys.only("use_bidirectional_attention", False)
    return dict(
        scale=1 / math.sqrt(keys.number("query_pre_attn_scalar", 256.0)),
        **spec.gemma(keys.whole("hidden_size"), logit_cap),
    )


def _cap(keys: Header, key: str, usual: float) -> float | None:
    off = key in keys.values and not keys.has(key)
    return None if off else keys.number(key, usual)


def window_of(keys: Header, windowed: Sequence[int], usual: int = 4096) -> int:
    """Tokens that windowed layers see."""
    missing = "sliding_window" not in keys.values
    return usual if missing or not windowed else keys.whole("sliding_window")


def windowed_and_full(kinds: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of windowed layers and of full ones."""
    windowed, full = (
        tuple(i for i, k in enumerate(kinds) if k == kind) for kind in (WINDOWED, FULL)
    )
    return windowed, full


def periodic(period: int, n_layers: int) -> list[str]:
    """Every `period`-th layer full, the others windowed."""
    return [WINDOWED if (i + 1) % period else FULL for i in range(n_layers)]


def layer_kinds(keys: Header, arch: str, usual: list[str], local: str = WINDOWED) -> list[str]:
    """The kind of each layer: as listed, or as usual where a file says nothing."""
    kinds = keys.values.get("layer_types")
    if kinds is None:
        return usual
    if not isinstance(kinds, list) or len(kinds) != len(usual):
        raise bad_list("layer_types", kinds, f"a list of {len(usual)} names")
    for kind in kinds:
        if kind not in (local, FULL):
            raise UnsupportedModel(
                f"{arch} with a layer of kind {brief(kind)} is not supported; one of {local}, "
                f"{FULL}"
            )
    return kinds


def gemma3_ropes(keys: Header, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """RoPE of windowed and of full layers; rope_scaling of older files is for the full ones."""
    rules = keys.inner("rope_parameters")
    unknown = sorted(rules.values.keys() - {WINDOWED, FULL})
    if unknown:
        raise UnsupportedModel(
            f"'rope_parameters' with {brief(unknown[0])} is not supported; only {WINDOWED}, {FULL}"
        )
    own = rules.inner(WINDOWED)
    full = Header({**rules.inner(FULL).values, **keys.inner("rope_scaling").values})
    own_base = own.number("rope_theta", keys.number("rope_local_base_freq", 1e4))
    full_base = full.number("rope_theta", keys.number("rope_theta", 1e6))
    known = ("default", "linear")
    return (
        hf_rope.read_rope(keys, own, own_base, head_dim, known),
        hf_rope.read_rope(keys, full, full_base, head_dim, known),
    )


def bad_list(key: str, found: Any, wanted: str) -> BadModelFile:
    """What to raise where a list of the header is none, or another."""
    return BadModelFile(
        f"the model's header is damaged: {key!r} is {brief(found)}, {wanted} is wanted; {REMEDY}"
    )
