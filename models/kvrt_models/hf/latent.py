"""Families whose layers keep one latent a token, from a Hugging Face config.json.

Source: transformers `modeling_deepseek_v2` and `modeling_deepseek_v3`.
"""

import dataclasses
from typing import Any

from kvrt_models import spec
from kvrt_models.header import Header
from kvrt_models.hf import rope as hf_rope
from kvrt_models.spec import Experts, Latent, Layers


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
    interleaved = arch == "deepseek_v2" or keys.flag("rope_interleave", True)
    kind = Layers(
        ids=tuple(range(n_layers)),
        rope=dataclasses.replace(rope, layout="norm" if interleaved else "neox"),
        latent_rank=latent.rank,
    )
    first = keys.whole("first_k_dense_replace", 0 if arch == "deepseek_v2" else 3, least=0)
    return dict(
        layers=[kind],
        n_kv_heads=1,
        head_dim=latent.rank + latent.n_rope,
        scale=_scale(keys, latent.n_nope + latent.n_rope),
        latent=latent,
        experts=_experts(keys, arch, tuple(range(first, n_layers))) if first < n_layers else None,
    )


def _q_rank(keys: Header) -> int:
    """Null means that queries come from the stream; a missing key means 1536."""
    null = "q_lora_rank" in keys.values and not keys.has("q_lora_rank")
    return 0 if null else keys.whole("q_lora_rank", 1536)


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
    n = keys.whole("n_routed_experts", most=spec.MAX_EXPERTS)
    n_used, n_ff = keys.whole("num_experts_per_tok", most=n), keys.whole("moe_intermediate_size")
    n_shared = keys.whole("n_shared_experts", 2 if arch == "deepseek_v2" else 1, least=0)
    n_groups, n_open, scoring = 1, 1, "share"
    by_group = arch == "deepseek_v3"
    if arch == "deepseek_v3":
        scoring = "sigmoid_share" if keys.flag("norm_topk_prob", True) else "sigmoid_each"
    elif keys.text("topk_method", "greedy") != "greedy":
        keys.only("topk_method", "group_limited_greedy")
        by_group = True
    if by_group:
        n_groups = keys.whole("n_group", 8 if arch == "deepseek_v3" else None, most=n)
        n_open = keys.whole("topk_group", 4 if arch == "deepseek_v3" else None, most=n_groups)
        spec.check_expert_groups(n, n_groups, n_open, n_used, 2 if arch == "deepseek_v3" else 1)
    return Experts(
        layers=layers,
        n_experts=n,
        n_used=n_used,
        n_ff=n_ff,
        scoring=scoring,
        n_ff_shared=n_ff * n_shared,
        scale=keys.number("routed_scaling_factor", 1.0 if arch == "deepseek_v2" else 2.5),
        n_groups=n_groups,
        n_groups_used=n_open,
        choice_bias=arch == "deepseek_v3",
    )
