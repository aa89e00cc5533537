"""Qwen3-Next: Gated DeltaNet and gated attention, and a mixture of experts in most layers."""

from typing import Any

from kvrt_models.families.shared.family import MAX_EXPERTS, Family, experts_of
from kvrt_models.families.shared.kinds import FULL, LINEAR, of_kind, periodic
from kvrt_models.families.shared.rope import rope_of
from kvrt_models.header import Header
from kvrt_models.spec import Experts, Layers, SsmSpec

_MAX_SIZE = 1 << 20


def _qwen3_next(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Layers are as `layer_types` says, or the last of each few has attention."""
    usual = periodic(keys.whole("full_attention_interval", 4), n_layers, LINEAR)
    kinds = keys.kinds("layer_types", usual, LINEAR, FULL)
    rope = rope_of(keys, head_dim, known=("default",), part=0.25)
    period = keys.whole("decoder_sparse_step", 1)
    dense = keys.layers("mlp_only_layers", n_layers)
    mixed = keys.whole("num_experts", least=0, most=MAX_EXPERTS) > 0
    layers = [i for i in range(n_layers) if mixed and i not in dense and (i + 1) % period == 0]
    return dict(
        layers=[Layers(layers=of_kind(kinds, FULL), rope=rope)],
        attn_gate=True,
        experts=_experts(keys, layers),
        ssm=_delta(keys, of_kind(kinds, LINEAR)),
    )


def _experts(keys: Header, layers: list[int]) -> Experts | None:
    if not layers:
        return None
    return experts_of(
        keys,
        layers,
        "softmax" if keys.flag("norm_topk_prob", True) else "share",
        n_ff_shared=keys.whole("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def _delta(keys: Header, layers: tuple[int, ...]) -> SsmSpec | None:
    """The layers of the gated delta rule; None where there are none."""
    if not layers:
        return None

    def size(key: str, usual: int, least: int = 1) -> int:
        return keys.whole(f"linear_{key}", usual, least=least, most=_MAX_SIZE)

    n_heads = size("num_value_heads", 32)
    return SsmSpec(
        kind="delta",
        layers=layers,
        d_inner=n_heads * size("value_head_dim", 128),
        d_state=size("key_head_dim", 128),
        d_conv=size("conv_kernel_dim", 4, 2),
        n_heads=n_heads,
        n_groups=size("num_key_heads", 16),
        conv_bias=False,
    )


FAMILIES = (
    Family(
        read=_qwen3_next,
        hf="qwen3_next",
        usual={
            "head_dim": 256,
            "num_key_value_heads": 2,
            "intermediate_size": 5632,
            "max_position_embeddings": 32768,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
        },
        qk_norm=True,
        norms_less_one=True,
        gguf_names={"ffn_norm": "post_attention_norm"},
    ),
)
