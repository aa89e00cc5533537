"""Families whose layers are all alike: llama, mistral, qwen2 and qwen3."""

from typing import Any

from kvrt.errors import UnsupportedModel
from kvrt_models.families.shared.family import MAX_EXPERTS, Family, experts_of
from kvrt_models.families.shared.kinds import FULL, WINDOWED
from kvrt_models.families.shared.rope import rope_of
from kvrt_models.header import Header
from kvrt_models.spec import Layers


def _llama(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Full attention everywhere; a GGUF of this name may be a Mistral or a Mixtral."""
    ids = tuple(range(n_layers))
    rope, window = rope_of(keys, head_dim, gguf_layout="norm"), 0
    if keys.tensors is None:
        return dict(layers=[Layers(layers=ids, rope=rope)])
    window = keys.whole("sliding_window", 0, least=0)
    with_experts = keys.whole("num_experts", 0, least=0, most=MAX_EXPERTS) > 0
    return dict(
        layers=[Layers(layers=ids, rope=rope, window=window)],
        experts=experts_of(keys, ids if with_experts else (), "softmax"),
    )


def _mistral(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """A window in all layers, of 4096 tokens where the file says nothing, or in none."""
    window = 0 if keys.is_null("sliding_window") else keys.whole("sliding_window", 4096)
    _check_kinds(keys, WINDOWED if window else FULL)
    rope = rope_of(keys, head_dim)
    return dict(layers=[Layers(layers=tuple(range(n_layers)), rope=rope, window=window)])


def _qwen(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Full attention; windows in the upper layers alone are refused, a GGUF's mean nothing."""
    kinds: list[str] = []
    if keys.tensors is None:
        off = keys.is_null("sliding_window")
        size = 0 if off else keys.whole("sliding_window", 4096, least=0)
        first = keys.whole("max_window_layers", 28, least=0)
        windowed = keys.flag("use_sliding_window", False) and size and first < n_layers
        kinds = [WINDOWED] if windowed else []
        _check_kinds(keys, FULL, kinds)
    else:
        keys.whole("sliding_window", 0, least=0)
    return dict(layers=[Layers(layers=tuple(range(n_layers)), rope=rope_of(keys, head_dim))])


def _check_kinds(keys: Header, usual: str, kinds: list[str] | None = None) -> None:
    found = keys.values.get("layer_types") or kinds or []
    if not isinstance(found, list) or any(kind != usual for kind in found):
        raise UnsupportedModel(
            f"{keys.arch} with layer_types or a sliding window that differ by layer is not "
            f"supported; every layer must be {usual!r}"
        )


FAMILIES = (
    Family(
        read=_llama,
        hf="llama",
        gguf="llama",
        gguf_keys={"moe_intermediate_size": "feed_forward_length"},
        kv_heads_as_heads=True,
        mlp_bias=True,
        moe=True,
    ),
    Family(read=_mistral, hf="mistral", bias="none"),
    Family(read=_qwen, hf="qwen2", gguf="qwen2", bias="qkv"),
    Family(read=_qwen, hf="qwen3", gguf="qwen3", qk_norm=True),
)
