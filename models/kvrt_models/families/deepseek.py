"""DeepSeek V2, V3 and V3.2: one latent a token in place of keys and values, and experts.

Source: transformers `modeling_deepseek_v2`, `modeling_deepseek_v3`; llama.cpp `deepseek2.cpp`.
"""

import dataclasses
from typing import Any

from kvrt.config import Indexed, RopeSpec
from kvrt.errors import UnsupportedModel
from kvrt_models.families.shared.family import MAX_HEAD_DIM, Family, expert_groups, experts_of
from kvrt_models.families.shared.kinds import sparse_layers
from kvrt_models.families.shared.rope import ANY as RULES
from kvrt_models.families.shared.rope import rope_kind, rope_of, rope_rules, yarn_magnitude
from kvrt_models.header import Header
from kvrt_models.spec import DecoderSpec, Experts, Indexer, Latent, Layers

_V2, _INDEXED = "deepseek_v2", "deepseek_v32"
_INDEXED_LAYER = "indexed_attention"
# Of a GGUF's gating functions; 1 is softmax, and so is 0, which names none.
_SIGMOID = 2
_GROWTH = "rope.scaling.yarn_log_multiplier"
LATENT_USUAL = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def latent_of(keys: Header, q_rank: int) -> Latent:
    """The sizes of latents that a config.json names."""
    sizes = [keys.whole(key, most=MAX_HEAD_DIM) for key in LATENT_USUAL]
    return Latent(rank=sizes[0], n_rope=sizes[1], n_nope=sizes[2], n_value=sizes[3], q_rank=q_rank)


def latent_fields(of: Latent, kinds: list[Layers], scale: float) -> dict[str, Any]:
    """Fields of a spec whose attention layers keep latents."""
    width = of.rank + of.n_rope
    return dict(layers=kinds, n_kv_heads=1, head_dim=width, scale=scale, latent=of)


def _deepseek(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Latent attention in all layers, experts behind the first few."""
    if keys.tensors is not None:
        return _of_gguf(keys, n_layers)
    # Null means that queries come from the stream.
    null = keys.is_null("q_lora_rank")
    latent = latent_of(keys, 0 if null else keys.whole("q_lora_rank", 1536))
    interleaved = keys.arch in (_V2, _INDEXED) or keys.flag("rope_interleave", True)
    kind = Layers(
        layers=tuple(range(n_layers)),
        rope=rope_of(keys, latent.n_rope, layout="norm" if interleaved else "neox"),
        latent_rank=latent.rank,
    )
    kinds = [kind]
    if keys.arch == _INDEXED:
        keys.kinds("layer_types", [_INDEXED_LAYER] * n_layers, _INDEXED_LAYER)
        indexer = _indexer(keys, latent)
        latent, kinds = dataclasses.replace(latent, indexer=indexer), _index_keys(kind, indexer)
    layers = () if keys.is_null("num_experts") else sparse_layers(keys, n_layers)
    return dict(
        **latent_fields(latent, kinds, _scale(keys, latent)), experts=_experts(keys, layers)
    )


def _scale(keys: Header, of: Latent) -> float:
    """1 / sqrt of a head's channels times the square of YaRN's growth by `mscale_all_dim`."""
    rules, scale = rope_rules(keys), (of.n_nope + of.n_rope) ** -0.5
    growth = rules.number("mscale_all_dim", 0.0, zero=True)
    if rope_kind(rules, keys.arch, RULES) == "default" or not growth:
        return scale
    return scale * yarn_magnitude(rules.number("factor"), growth) ** 2


def _experts(keys: Header, layers: Any) -> Experts | None:
    """Routing as transformers has it: V2 without renormalised weights, whatever the file says."""
    if not layers:
        return None
    v2, groups = keys.arch == _V2, {}
    scoring = "share"
    if not v2:
        scoring = "sigmoid_share" if keys.flag("norm_topk_prob", True) else "sigmoid_each"
        groups = expert_groups(keys, 2)
    elif keys.text("topk_method", "greedy") != "greedy":
        keys.only("topk_method", "group_limited_greedy")
        groups = expert_groups(keys, 1)
    alone = keys.is_null("n_shared_experts")
    n_shared = 0 if alone else keys.whole("n_shared_experts", least=0)
    return experts_of(
        keys,
        layers,
        scoring,
        n_ff_shared=keys.whole("moe_intermediate_size") * n_shared,
        scale=keys.number("routed_scaling_factor"),
        choice_bias=not v2,
        **groups,
    )


def _indexer(keys: Header, latent: Latent) -> Indexer:
    """What chooses the tokens that queries read; its own queries come from the narrow latent.

    Raises:
      UnsupportedModel: index keys have no channel that RoPE leaves alone.
    """
    most = MAX_HEAD_DIM
    head_dim = keys.whole("index_head_dim", 128, most=most)
    if head_dim <= latent.n_rope or not latent.q_rank:
        raise UnsupportedModel(
            f"{_INDEXED} with index keys of {head_dim} channels, {latent.n_rope} of them rotated, "
            f"and q_lora_rank {latent.q_rank} is not supported; more channels than are rotated, "
            "and a rank above 0, are"
        )
    return Indexer(
        n_heads=keys.whole("index_n_heads", 64, most=most),
        head_dim=head_dim,
        n_cells=keys.whole("index_topk", 2048),
    )


def _index_keys(kind: Layers, of: Indexer) -> list[Layers]:
    """Layers of latent attention, and behind them what keeps their index keys."""
    assert kind.rope is not None
    keys_of = tuple((i, len(kind.layers) + i) for i in kind.layers)
    index_keys = Layers(
        layers=tuple(i for _, i in keys_of),
        # Halves of a head are paired here, whatever the latents' keys have.
        rope=dataclasses.replace(kind.rope, layout="neox"),
        latent_rank=of.head_dim - kind.rope.n_rot,
        head_dim=of.head_dim,
        scale=1.0,
    )
    indexed = Indexed(n_cells=of.n_cells, keys_of=keys_of)
    return [dataclasses.replace(kind, indexed=indexed), index_keys]


def _of_gguf(keys: Header, n_layers: int) -> dict[str, Any]:
    """The same of a GGUF; a matrix that is joined is said of, as before April 2025, by head."""
    assert keys.tensors is not None
    before = "blk.0.attn_kv_b.weight" in keys.tensors
    end = "" if before else "_mla"
    rank, n_rope = (
        keys.whole(key, most=MAX_HEAD_DIM) for key in ("kv_lora_rank", "rope.dimension_count")
    )
    head = keys.whole(f"attention.key_length{end}", least=n_rope + 1, most=2 * MAX_HEAD_DIM)
    if not before:
        keys.only("attention.key_length", rank + n_rope)
        keys.only("attention.value_length", rank)
    keys.only("num_key_value_heads", keys.whole("num_attention_heads") if before else 1)
    # Mistral Large 3, which goes by the same name.
    keys.only("attention.temperature_scale", 0.0)
    latent = Latent(
        rank=rank,
        n_rope=n_rope,
        n_nope=head - n_rope,
        n_value=keys.whole(f"attention.value_length{end}", most=MAX_HEAD_DIM),
        q_rank=keys.whole("q_lora_rank", 0, least=0),
        norm_eps=keys.number("rms_norm_eps"),
    )
    rope = rope_of(keys, n_rope, gguf_layout="norm")
    # Converters write a tenth of `mscale_all_dim`.
    growth = keys.number(_GROWTH, 0.0, zero=True) / 0.1
    if growth:  # of the scores, by the square
        rope = dataclasses.replace(rope, magnitude=keys.number("rope.scaling.attn_factor", 1.0))
    kind = Layers(layers=tuple(range(n_layers)), rope=rope, latent_rank=rank)
    return dict(
        **latent_fields(latent, [kind], _gguf_scale(rope, head, growth)),
        experts=_gguf_experts(keys, n_layers),
    )


def _gguf_scale(rope: RopeSpec, width: int, growth: float) -> float:
    """1 / sqrt of a head's channels; with YaRN times the square of its growth."""
    if rope.scaling != "yarn":
        return width**-0.5
    own = 1.0 if rope.magnitude is None else rope.magnitude
    return width**-0.5 * (own * yarn_magnitude(rope.factor, growth)) ** 2


def _gguf_experts(keys: Header, n_layers: int) -> Experts | None:
    """Softmax of all scores, or sigmoids with biases and groups."""
    first = keys.whole("first_k_dense_replace", 0, least=0)
    if first >= n_layers:
        return None
    sigmoid = keys.whole("expert_gating_func", 0, least=0, most=_SIGMOID) == _SIGMOID
    shares = keys.flag("norm_topk_prob", False)
    n_groups, groups = keys.whole("n_group", 1, least=0) or 1, {}
    if n_groups > 1 and not sigmoid:
        raise UnsupportedModel(
            f"a deepseek2 that chooses by softmax among {n_groups} groups of experts is not "
            "supported from a GGUF; load the model's Hugging Face folder"
        )
    if n_groups > 1:
        groups = expert_groups(keys, 2)
    by_softmax = "softmax" if shares else "share"
    return experts_of(
        keys,
        range(first, n_layers),
        ("sigmoid_share" if shares else "sigmoid_each") if sigmoid else by_softmax,
        n_ff_shared=keys.whole("moe_intermediate_size") * keys.whole("n_shared_experts"),
        scale=keys.number("expert_weights_scale", 1.0, zero=True) or 1.0,
        choice_bias=f"blk.{first}.exp_probs_b.bias" in (keys.tensors or {}),
        **groups,
    )


def _notes(keys: Header, of: DecoderSpec) -> tuple[str, ...]:
    """What has to be guessed: transformers has no default for the experts that a token takes."""
    key = "num_experts_per_tok"
    if of.experts is None or keys.has(key):
        return ()
    taken = keys.usual[key]
    return (f"config.json has no {key!r}; {taken} are taken, as by all published DeepSeek-V2",)


_KEYS = {"num_experts": "n_routed_experts"}
_NAMES = {f"ffn_{x}_shexp": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")}
_V3_USUAL = {
    **LATENT_USUAL,
    "first_k_dense_replace": 3,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}
FAMILIES = (
    Family(
        read=_deepseek,
        hf=_V2,
        gguf="deepseek2",
        keys=_KEYS,
        usual={
            **LATENT_USUAL,
            "first_k_dense_replace": 0,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
        },
        heads="latent",
        bias="none",
        names=_NAMES,
        notes=_notes,
    ),
    *(
        Family(
            read=_deepseek,
            hf=name,
            keys=_KEYS,
            usual=_V3_USUAL,
            heads="latent",
            bias="none",
            names=_NAMES,
        )
        for name in ("deepseek_v3", _INDEXED)
    ),
)
