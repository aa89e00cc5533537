"""Kimi-Linear: delta rules with a decay for each channel, and latents without positions.

Source: arXiv:2510.26692; transformers `modeling_kimi_linear`.
"""

from typing import Any

from kvrt.errors import BadModelFile
from kvrt_models.families.deepseek import LATENT_USUAL, latent_fields, latent_of
from kvrt_models.families.shared.family import Family, expert_groups, experts_of
from kvrt_models.families.shared.kinds import FULL, LINEAR, of_kind, sparse_layers
from kvrt_models.header import REMEDY, Header
from kvrt_models.spec import Experts, Layers, SsmSpec

_MAX_SIZE = 1 << 20


def _kimi_linear(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    keys.only("tie_word_embeddings", False)
    keys.only("mla_use_nope", True)
    keys.only("num_nextn_predict_layers", 0)
    keys.only("moe_router_activation_func", "sigmoid")
    keys.only("moe_layer_freq", 1)
    latent = latent_of(keys, keys.whole("q_lora_rank", 0, least=0, most=_MAX_SIZE))
    attention = _attention_layers(keys, n_layers)
    kind = Layers(layers=attention, rope=None, latent_rank=latent.rank)
    others = tuple(i for i in range(n_layers) if i not in attention)
    return dict(
        **latent_fields(latent, [kind], (latent.n_nope + latent.n_rope) ** -0.5),
        experts=_experts(keys, n_layers),
        ssm=_delta(keys, others),
    )


def _attention_layers(keys: Header, n_layers: int) -> tuple[int, ...]:
    """Layers with attention: by kinds, or as published by numbers that begin with 1."""
    if keys.has("layer_types"):
        return of_kind(keys.kinds("layer_types", [FULL] * n_layers, LINEAR, FULL), FULL)
    rules = keys.inner("linear_attn_config").values
    lists = [rules.get(name) for name in ("full_attn_layers", "kda_layers")]
    if lists == [None, None]:
        return tuple(range(4, n_layers, 4))
    attention, others = (one if isinstance(one, list) else [] for one in lists)
    numbers = [x for x in (*attention, *others) if type(x) is int]
    whole = len(numbers) == len(attention) + len(others)
    if not whole or sorted(numbers) != list(range(1, n_layers + 1)):
        raise BadModelFile(
            "the model's header is damaged: 'full_attn_layers' and 'kda_layers' of "
            f"'linear_attn_config' do not name each of {n_layers} layers once, from 1 on; {REMEDY}"
        )
    return tuple(sorted(x - 1 for x in attention))


def _experts(keys: Header, n_layers: int) -> Experts | None:
    """Sigmoids with biases choose among the best groups."""
    layers = sparse_layers(keys, n_layers)
    if not layers:
        return None
    n_shared = keys.whole("n_shared_experts", least=0)
    return experts_of(
        keys,
        layers,
        "sigmoid_share" if keys.flag("moe_renormalize", True) else "sigmoid_each",
        n_ff_shared=keys.whole("moe_intermediate_size") * n_shared,
        scale=keys.number("routed_scaling_factor", 2.446),
        choice_bias=True,
        **expert_groups(keys, 2),
    )


def _delta(keys: Header, layers: tuple[int, ...]) -> SsmSpec | None:
    """The layers of the gated delta rule; None where there are none."""
    if not layers:
        return None
    rules = keys.inner("linear_attn_config")

    def size(inner: str, key: str, usual: int, least: int = 1) -> int:
        there = rules if rules.has(inner) else Header({inner: keys.values.get(key)})
        return there.whole(inner, usual, least=least, most=_MAX_SIZE)

    n_heads = size("num_heads", "linear_num_heads", 32)
    head_dim = size("head_dim", "linear_head_dim", 128)
    return SsmSpec(
        kind="kda",
        layers=layers,
        d_inner=n_heads * head_dim,
        d_state=head_dim,
        d_conv=size("short_conv_kernel_size", "linear_conv_kernel_dim", 4, 2),
        n_heads=n_heads,
        n_groups=n_heads,
        conv_bias=False,
    )


FAMILIES = (
    Family(
        read=_kimi_linear,
        hf="kimi_linear",
        keys={
            "max_position_embeddings": "model_max_length",
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
            "n_group": "num_expert_group",
        },
        usual={
            **LATENT_USUAL,
            "intermediate_size": 9216,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
            "first_k_dense_replace": 1,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        heads="latent",
        bias="none",
        names={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
            **{
                f"ffn_{x}_shexp": f"block_sparse_moe.shared_experts.{x}_proj"
                for x in ("gate", "up", "down")
            },
            "exp_probs_b": "block_sparse_moe.gate.e_score_correction_bias",
        },
        # Networks without experts, as published and as transformers writes them.
        other_names=(".mlp.", ".block_sparse_moe."),
    ),
)
