"""Families whose layers keep one latent a token, from a Hugging Face config.json.

Source: transformers `modeling_deepseek_v2` and `modeling_deepseek_v3`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvrt.config import Indexed
from kvrt.errors import UnsupportedModel
from kvrt_models import spec
from kvrt_models.header import Header
from kvrt_models.hf import rope as hf_rope
from kvrt_models.layers.latent_sizes import Indexer, Latent
from kvrt_models.spec import Experts, Layers

_V3 = ("deepseek_v3", "deepseek_v32")
# The family whose queries choose what they read, and what its files call such a layer.
INDEXED = "deepseek_v32"
_INDEXED_LAYER = "indexed_attention"
# Experts that all published DeepSeek-V2 take for a token; transformers has no default.
_N_USED_V2 = 6


def deepseek(keys: Header, arch: str, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Latent attention in all layers, experts behind the first few; DeepSeek-V2 and V3."""
    del head_dim  # of the rotated part in newer files, of nothing in older ones
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    most = spec.MAX_HEAD_DIM
    latent = Latent(
        rank=keys.whole("kv_lora_rank", 512, most=most),
        n_rope=keys.whole("qk_rope_head_dim", 64, most=most),
        n_nope=keys.whole("qk_nope_head_dim", 128, most=most),
        n_value=keys.whole("v_head_dim", 128, most=most),
        q_rank=_q_rank(keys),
    )
    rope = hf_rope.shared_rope(keys, latent.n_rope)
    interleaved = arch in ("deepseek_v2", INDEXED) or keys.flag("rope_interleave", True)
    kind = Layers(
        ids=tuple(range(n_layers)),
        rope=dataclasses.replace(rope, layout="norm" if interleaved else "neox"),
        latent_rank=latent.rank,
    )
    indexer = _indexer(keys, latent) if arch == INDEXED else None
    first = keys.whole("first_k_dense_replace", 0 if arch == "deepseek_v2" else 3, least=0)
    if arch == INDEXED:
        first = _n_dense(keys, n_layers, first)
    return dict(
        layers=[kind] if indexer is None else _with_index_keys(kind, indexer),
        n_kv_heads=1,
        head_dim=latent.rank + latent.n_rope,
        scale=_scale(keys, latent.n_nope + latent.n_rope),
        latent=dataclasses.replace(latent, indexer=indexer),
        experts=_experts(keys, arch, tuple(range(first, n_layers)))
        if first < n_layers and not _is_null(keys, "n_routed_experts")
        else None,
    )


def notes(config: Mapping[str, Any], experts: Experts | None) -> tuple[str, ...]:
    """What a reader of config.json has to guess, for people."""
    key = "num_experts_per_tok"
    if config.get("model_type") != "deepseek_v2" or experts is None or Header(config).has(key):
        return ()
    return (f"config.json has no {key!r}; {_N_USED_V2} are taken, as by all published DeepSeek-V2",)


def _is_null(keys: Header, key: str) -> bool:
    return key in keys.values and not keys.has(key)


def _indexer(keys: Header, latent: Latent) -> Indexer:
    """What chooses the tokens that queries read; its own queries come from the narrow latent.

    Raises:
      UnsupportedModel: layers differ, or index keys have no channel that RoPE leaves alone.
    """
    kinds = keys.values.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != _INDEXED_LAYER for kind in kinds):
        raise UnsupportedModel(
            f"{INDEXED} with layer_types other than {_INDEXED_LAYER!r} throughout is not supported"
        )
    most = spec.MAX_HEAD_DIM
    head_dim = keys.whole("index_head_dim", 128, most=most)
    if head_dim <= latent.n_rope or not latent.q_rank:
        raise UnsupportedModel(
            f"{INDEXED} with index keys of {head_dim} channels, {latent.n_rope} of them rotated, "
            f"and q_lora_rank {latent.q_rank} is not supported; more channels than are rotated, "
            "and a rank above 0, are"
        )
    return Indexer(
        n_heads=keys.whole("index_n_heads", 64, most=most),
        head_dim=head_dim,
        n_cells=keys.whole("index_topk", 2048),
    )


def _n_dense(keys: Header, n_layers: int, first: int) -> int:
    """Layers before those with experts, which a list says where there is one.

    Raises:
      UnsupportedModel: layers without experts stand among those with them.
    """
    kinds = keys.values.get("mlp_layer_types") or ["dense"] * min(first, n_layers)
    n = kinds.count("dense") if isinstance(kinds, list) else 0
    if keys.has("mlp_layer_types") and kinds != ["dense"] * n + ["sparse"] * (n_layers - n):
        raise UnsupportedModel(
            f"{INDEXED} with mlp_layer_types other than 'dense' layers before 'sparse' ones, "
            f"{n_layers} together, is not supported"
        )
    return n


def _with_index_keys(kind: Layers, of: Indexer) -> list[Layers]:
    """Layers of latent attention, and behind them what keeps their index keys."""
    assert kind.rope is not None
    keys_of = tuple((i, len(kind.ids) + i) for i in kind.ids)
    index_keys = Layers(
        ids=tuple(i for _, i in keys_of),
        # Halves of a head are paired here, whatever the latents' keys have.
        rope=dataclasses.replace(kind.rope, layout="neox"),
        latent_rank=of.head_dim - kind.rope.n_rot,
        head_dim=of.head_dim,
        scale=1.0,
    )
    indexed = Indexed(n_cells=of.n_cells, keys_of=keys_of)
    return [dataclasses.replace(kind, indexed=indexed), index_keys]


def _q_rank(keys: Header) -> int:
    """Null means that queries come from the stream; a missing key means 1536."""
    return 0 if _is_null(keys, "q_lora_rank") else keys.whole("q_lora_rank", 1536)


def _scale(keys: Header, width: int) -> float:
    """1 / sqrt(width) times the square of YaRN's growth by `mscale_all_dim`."""
    rules = keys.inner("rope_scaling")
    if not rules.values:
        rules = keys.inner("rope_parameters")
    growth = rules.number("mscale_all_dim", 0.0, zero=True)
    if rules.text("rope_type", rules.text("type", "default")) == "default" or not growth:
        return width**-0.5
    return width**-0.5 * spec.yarn_magnitude(rules.number("factor"), growth) ** 2


def _experts(keys: Header, arch: str, layers: tuple[int, ...]) -> Experts:
    """Routing as transformers has it: V2 without renormalised weights, whatever the file says."""
    v2 = arch == "deepseek_v2"
    n = keys.whole("n_routed_experts", 64 if v2 else 256, most=spec.MAX_EXPERTS)
    n_used = keys.whole("num_experts_per_tok", _N_USED_V2 if v2 else 8, most=n)
    n_ff = keys.whole("moe_intermediate_size", 1407 if v2 else 2048)
    is_alone = _is_null(keys, "n_shared_experts")
    n_shared = 0 if is_alone else keys.whole("n_shared_experts", 2 if v2 else 1, least=0)
    n_groups, n_open, scoring = 1, 1, "share"
    by_group = arch in _V3
    if arch in _V3:
        scoring = "sigmoid_share" if keys.flag("norm_topk_prob", True) else "sigmoid_each"
    elif keys.text("topk_method", "greedy") != "greedy":
        keys.only("topk_method", "group_limited_greedy")
        by_group = True
    if by_group:
        n_groups = keys.whole("n_group", 8 if arch in _V3 else None, most=n)
        n_open = keys.whole("topk_group", 4 if arch in _V3 else None, most=n_groups)
        spec.check_expert_groups(n, n_groups, n_open, n_used, 2 if arch in _V3 else 1)
    return Experts(
        layers=layers,
        n_experts=n,
        n_used=n_used,
        n_ff=n_ff,
        scoring=scoring,
        n_ff_shared=n_ff * n_shared,
        scale=keys.number("routed_scaling_factor", 1.0 if v2 else 2.5),
        n_groups=n_groups,
        n_groups_used=n_open,
        choice_bias=arch in _V3,
    )
