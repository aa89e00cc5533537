"""Kimi-Linear from a Hugging Face config.json, as transformers reads it.

Source: arXiv:2510.26692; transformers `modeling_kimi_linear`.
"""

from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models import spec
from kvrt_models.header import REMEDY, Header, brief
from kvrt_models.hf.hybrid import FULL, bad_list
from kvrt_models.layers.latent_sizes import Latent
from kvrt_models.layers.ssm import SsmSpec
from kvrt_models.spec import DecoderSpec, Experts, Layers

ARCH = "kimi_linear"
_DELTA = "linear_attention"
_DENSE, _SPARSE = "dense", "sparse"
_MAX_SIZE = 1 << 20


def kimi_linear_spec_from_config(keys: Header) -> DecoderSpec:
    """Reads the spec: delta rules with a decay for each channel, and latents without positions.

    Raises:
      UnsupportedModel: the file asks for what is unknown here.
      BadModelFile: a key is missing, of the wrong type, or contradicts another.
    """
    keys.only("hidden_act", "silu")
    for key in ("attention_bias", "tie_word_embeddings"):
        keys.only(key, False)
    keys.only("mla_use_nope", True)
    keys.only("num_nextn_predict_layers", 0)
    keys.only("moe_router_activation_func", "sigmoid")
    keys.only("moe_layer_freq", 1)
    n_layers = keys.whole("num_hidden_layers", most=spec.MAX_LAYERS)
    latent = _latent(keys)
    attention = _attention_layers(keys, n_layers)
    return spec.build(
        arch=ARCH,
        layers=[Layers(ids=attention, rope=None, latent_rank=latent.rank)],
        n_kv_heads=1,
        head_dim=latent.rank + latent.n_rope,
        scale=(latent.n_nope + latent.n_rope) ** -0.5,
        n_vocab=keys.whole("vocab_size"),
        n_embd=keys.whole("hidden_size"),
        n_ff=keys.whole("intermediate_size", 9216),
        n_heads=keys.whole("num_attention_heads"),
        norm_eps=keys.number("rms_norm_eps", 1e-5),
        n_ctx_train=keys.whole("model_max_length", 1048576),
        tied=False,
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        qk_norm=False,
        latent=latent,
        experts=_experts(keys, _expert_layers(keys, n_layers)),
        ssm=_delta(keys, tuple(i for i in range(n_layers) if i not in attention)),
    )


def _latent(keys: Header) -> Latent:
    most = spec.MAX_HEAD_DIM
    return Latent(
        rank=keys.whole("kv_lora_rank", 512, most=most),
        n_rope=keys.whole("qk_rope_head_dim", 64, most=most),
        n_nope=keys.whole("qk_nope_head_dim", 128, most=most),
        n_value=keys.whole("v_head_dim", 128, most=most),
        q_rank=keys.whole("q_lora_rank", 0, least=0, most=_MAX_SIZE),
    )


def _attention_layers(keys: Header, n_layers: int) -> tuple[int, ...]:
    """Layers with attention: by kinds, or as published by numbers that begin with 1."""
    kinds = _kinds(keys, "layer_types", n_layers, (_DELTA, FULL))
    if kinds is not None:
        return tuple(i for i, kind in enumerate(kinds) if kind == FULL)
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


def _expert_layers(keys: Header, n_layers: int) -> tuple[int, ...]:
    kinds = _kinds(keys, "mlp_layer_types", n_layers, (_DENSE, _SPARSE))
    if kinds is not None:
        return tuple(i for i, kind in enumerate(kinds) if kind == _SPARSE)
    return tuple(range(keys.whole("first_k_dense_replace", 1, least=0), n_layers))


def _kinds(keys: Header, key: str, n: int, known: tuple[str, ...]) -> list[str] | None:
    """A list of a kind for each layer, or None where the file has none."""
    kinds = keys.values.get(key)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != n:
        raise bad_list(key, kinds, f"a list of {n} names")
    for kind in kinds:
        if kind not in known:
            raise UnsupportedModel(
                f"{key!r} with {brief(kind)} is not supported in {ARCH}; only {' and '.join(known)}"
            )
    return kinds


def _experts(keys: Header, layers: tuple[int, ...]) -> Experts | None:
    """Sigmoids with biases choose among the best groups; None where no layer has experts."""
    if not layers:
        return None
    n = keys.whole("num_experts", 256, most=spec.MAX_EXPERTS)
    n_used = keys.whole("num_experts_per_token", 8, most=n)
    n_ff = keys.whole("moe_intermediate_size", 1024)
    n_groups = keys.whole("num_expert_group", 1, most=n)
    n_open = keys.whole("topk_group", 1, most=n_groups)
    spec.check_expert_groups(n, n_groups, n_open, n_used, 2)
    return Experts(
        layers=layers,
        n_experts=n,
        n_used=n_used,
        n_ff=n_ff,
        scoring="sigmoid_share" if keys.flag("moe_renormalize", True) else "sigmoid_each",
        n_ff_shared=n_ff * keys.whole("num_shared_experts", 1, least=0),
        scale=keys.number("routed_scaling_factor", 2.446),
        n_groups=n_groups,
        n_groups_used=n_open,
        choice_bias=True,
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
