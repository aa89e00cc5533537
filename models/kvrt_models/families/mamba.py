"""Families with state-space layers: mamba, mamba2, and jamba and bamba, which have attention too.

Source: transformers `modeling_jamba`, `modeling_bamba`; llama.cpp, where Bamba goes by the name of
granitehybrid.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

from kvrt.config import RopeSpec
from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models.families.shared.family import MAX_HEAD_DIM, Family, experts_of
from kvrt_models.families.shared.rope import make_rope, rope_of
from kvrt_models.header import REMEDY, Header, brief
from kvrt_models.spec import Experts, Layers, Scoring, SsmSpec

_MAX_SIZE = 1 << 24
# As JSON of Python has it, and as transformers writes it.
_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
# transformers rotates half of Bamba's channels unless the rules of RoPE themselves say otherwise.
_ROTARY = 0.5
Mamba = Literal["mamba1", "mamba2"]


def _mamba1(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    return dict(layers=[], ssm=_ssm(keys, "mamba1", range(n_layers)))


def _mamba2(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    return dict(layers=[], ssm=_ssm(keys, "mamba2", range(n_layers)))


def _jamba(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Mamba-1 with norms, attention without positions, and experts in the layers of a period."""
    if keys.tensors is not None:
        attention, experts = _attention(keys, n_layers), _gguf_experts(keys, n_layers, "share")
    else:
        keys.only("sliding_window")
        attention = _period(keys, n_layers, "attn_layer", (8, 4))
        # One expert is a plain network.
        mixed = keys.whole("num_experts") > 1
        layers = _period(keys, n_layers, "expert_layer", (2, 1))
        experts = experts_of(keys, layers if mixed else (), "share")
    recurrent = [i for i in range(n_layers) if i not in attention]
    return dict(
        layers=[Layers(layers=attention, rope=None)],
        experts=experts,
        ssm=_ssm(keys, "mamba1", recurrent),
    )


def _bamba(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Mamba-2, and attention that rotates a part of each head; a GGUF has Granite's multipliers."""
    if keys.tensors is not None:
        attention, rope = _attention(keys, n_layers), _gguf_rope(keys, head_dim)
        more = dict(experts=_gguf_experts(keys, n_layers, "softmax"), **_multipliers(keys))
    else:
        limits = keys.values.get("time_step_limit")
        if limits is not None and limits not in _NO_LIMITS:
            raise UnsupportedModel(
                f"'time_step_limit' is {brief(limits)}, which is not supported; only [0.0, "
                "Infinity]"
            )
        attention = keys.layers("attn_layer_indices", n_layers)
        rope, more = rope_of(keys, head_dim, known=("default",), part=_ROTARY), {}
        keys.only("partial_rotary_factor", _ROTARY)
    recurrent = [i for i in range(n_layers) if i not in attention]
    return dict(
        layers=[Layers(layers=attention, rope=rope)], ssm=_ssm(keys, "mamba2", recurrent), **more
    )


def _period(keys: Header, n_layers: int, what: str, usual: tuple[int, int]) -> tuple[int, ...]:
    """One layer of each period, which may begin before the first."""
    period = keys.whole(f"{what}_period", usual[0])
    offset = keys.whole(f"{what}_offset", usual[1], least=0)
    return tuple(i for i in range(n_layers) if i % period == offset)


def _attention(keys: Header, n_layers: int) -> tuple[int, ...]:
    """Layers of a GGUF with kv heads; the others are recurrent."""
    heads = keys.by_layer("num_attention_heads", n_layers, least=0)
    kv_heads = keys.by_layer("num_key_value_heads", n_layers, heads, least=0)
    return tuple(i for i, n in enumerate(kv_heads) if n)


def _gguf_experts(keys: Header, n_layers: int, scoring: Scoring) -> Experts | None:
    """Mixtures in the layers that have a router; Granite's stand beside a shared network."""
    tensors, widths = keys.tensors or {}, keys.by_layer("intermediate_size", n_layers)
    layers = [i for i in range(n_layers) if f"blk.{i}.ffn_gate_inp.weight" in tensors]
    n_ff = {widths[i] for i in layers}
    if len(n_ff) > 1:
        raise UnsupportedModel(
            f"{keys.arch} with experts of {len(n_ff)} widths in its layers is not supported; only "
            "of one"
        )
    shared, key = 0, "expert_shared_feed_forward_length"
    if layers and keys.arch == "granitehybrid":
        shared = keys.whole(key, 0, least=0)
    return experts_of(keys, layers, scoring, n_ff=sum(n_ff), n_ff_shared=shared)


def _multipliers(keys: Header) -> dict[str, Any]:
    """Granite's multipliers; Bamba has none, and 0 means none."""
    names = {
        "scale": "attention.scale",
        "embed_scale": "embedding_scale",
        "residual_scale": "residual_scale",
        "logit_divisor": "logit_scale",
    }
    found = {field: keys.number(key, 0.0, zero=True) for field, key in names.items()}
    return {field: value for field, value in found.items() if value}


def _gguf_rope(keys: Header, head_dim: int) -> RopeSpec | None:
    """The plain rule, on pairs of neighbours; a key of its own turns it off."""
    if not keys.flag("rope.scaling.finetuned", True):
        return None
    keys.only("rope.scaling.type", "none")
    for key in ("rope.scale_linear", "rope.scaling.factor"):
        keys.only(key, 0.0, 1.0)
    keys.only("rope.scaling.attn_factor", 1.0)
    if any(name.startswith("rope_") for name in keys.tensors or {}):
        raise UnsupportedModel(f"{keys.arch} with divisors of RoPE's frequencies is not supported")
    return make_rope(
        n_rot=keys.whole("rope.dimension_count", head_dim, most=MAX_HEAD_DIM),
        base=keys.number("rope_theta", 10000.0),
        layout="norm",
    )


def _ssm(keys: Header, kind: Mamba, layers: Sequence[int]) -> SsmSpec | None:
    """The state-space layers; None where there are none."""
    if not layers:
        return None
    sizes = _sizes if keys.tensors is None else _gguf_sizes
    return SsmSpec(
        kind=kind,
        layers=tuple(layers),
        d_conv=keys.whole("mamba_d_conv", least=2, most=_MAX_SIZE),
        d_state=keys.whole("mamba_d_state", most=_MAX_SIZE),
        n_groups=keys.whole("mamba_n_groups", most=_MAX_SIZE) if kind == "mamba2" else 1,
        **sizes(keys, kind, layers[0]),
    )


def _sizes(keys: Header, kind: Mamba, first: int) -> dict[str, Any]:
    n_embd = keys.whole("hidden_size")
    d_inner = keys.whole("mamba_expand", 2, most=_MAX_SIZE) * n_embd
    if kind == "mamba1":
        auto = keys.values.get("mamba_dt_rank") in (None, "auto")
        rank = math.ceil(n_embd / 16) if auto else keys.whole("mamba_dt_rank")
        own: dict[str, Any] = dict(dt_rank=rank, norms=True)
    else:
        own = dict(n_heads=keys.whole("mamba_n_heads", 128, most=_MAX_SIZE))
        width = keys.values.get("mamba_d_head")
        if width not in (None, "auto") and keys.whole("mamba_d_head") * own["n_heads"] != d_inner:
            raise BadModelFile(
                f"the model's header names {own['n_heads']} heads of {width} for {d_inner} "
                f"channels of Mamba-2; {REMEDY}"
            )
    biases = {f"{x}_bias": keys.flag(f"mamba_{x}_bias", x == "conv") for x in ("conv", "proj")}
    return dict(d_inner=d_inner, **biases, **own)


def _gguf_sizes(keys: Header, kind: Mamba, first: int) -> dict[str, Any]:
    """What llama.cpp calls the rank is the number of Mamba-2's heads."""
    keys.only("ssm.dt_b_c_rms", False)
    rank = keys.whole("ssm.time_step_rank", most=_MAX_SIZE)
    own: dict[str, Any] = dict(n_heads=rank)
    if kind == "mamba1":
        own = dict(dt_rank=rank, norms=keys.arch == "jamba")
    return dict(
        d_inner=keys.whole("ssm.inner_size", most=_MAX_SIZE),
        conv_bias=f"blk.{first}.ssm_conv1d.bias" in (keys.tensors or {}),
        **own,
    )


_USUAL = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
}
_NAMES = {"ffn_norm": "pre_ff_layernorm", "output_norm": "final_layernorm"}
FAMILIES = (
    Family(read=_mamba1, gguf="mamba", heads="none"),
    Family(read=_mamba2, gguf="mamba2", heads="none"),
    Family(
        read=_jamba,
        hf="jamba",
        gguf="jamba",
        keys={"moe_intermediate_size": "intermediate_size"},
        usual={**_USUAL, "mamba_d_state": 16, "num_experts": 16, "num_experts_per_tok": 2},
        bias="none",
        hybrid=True,
        moe=True,
        mlp="feed_forward",
        names={**_NAMES, "ffn_gate_inp": "feed_forward.router"},
    ),
    Family(
        read=_bamba,
        hf="bamba",
        gguf="granitehybrid",
        usual={**_USUAL, "mamba_d_state": 256, "rms_norm_eps": 1e-5},
        mlp_bias=True,
        hybrid=True,
        moe=True,
        mlp="feed_forward",
        names=_NAMES,
    ),
)
