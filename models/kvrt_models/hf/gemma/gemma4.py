"""Gemma 4's text model from a Hugging Face config.json, as transformers reads it."""

import math
from collections.abc import Sequence
from typing import Any

from kvrt.config import RopeSpec
from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models import spec
from kvrt_models.header import REMEDY, Header, brief
from kvrt_models.hf.hybrid import FULL, WINDOWED, layer_kinds, periodic, window_of
from kvrt_models.hf.hybrid import windowed_and_full as by_kind
from kvrt_models.layers.gemma.sizes import LayerInputs
from kvrt_models.spec import Experts, Layers

ARCH = "gemma4_text"
# A divisor of frequencies by which nothing rotates, as llama.cpp's files of Gemma 4 have it.
_STILL = 1e30


def gemma4(keys: Header, arch: str, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Windowed and full layers of different heads; the last ones read keys and values of others.

    Raises:
      UnsupportedModel: attention in both directions, or RoPE of another kind.
      BadModelFile: sizes contradict each other.
    """
    _refuse(keys)
    kinds = [*layer_kinds(keys, arch, periodic(6, n_layers))]
    # As transformers does, whatever the file says.
    kinds[-1] = FULL
    n_shared = keys.whole("num_kv_shared_layers", 0, least=0, most=n_layers)
    windowed, full = (own_layers(kinds, kind, n_layers - n_shared) for kind in (WINDOWED, FULL))
    wide, n_wide = _full_sizes(keys)
    ropes = keys.inner("rope_parameters")
    return dict(
        layers=[
            Layers(
                ids=windowed[0],
                kv_of=windowed[1],
                rope=_near_rope(ropes.inner(WINDOWED), head_dim),
                window=window_of(keys, windowed[0], 512),
            ),
            Layers(
                ids=full[0],
                kv_of=full[1],
                rope=_far_rope(ropes.inner(FULL), wide),
                head_dim=wide,
                n_kv_heads=n_wide,
            ),
        ],
        scale=1.0,
        qk_norm=True,
        unit_v_norm=True,
        v_of_k=full[0] if keys.flag("attention_k_eq_v", False) else (),
        layer_scale=True,
        layer_inputs=_layer_inputs(keys),
        experts=_experts(keys, n_layers),
        n_ff_readers=2 * keys.whole("intermediate_size") if _double(keys) else 0,
        tied=keys.flag("tie_word_embeddings", True),
        **spec.gemma(
            keys.whole("hidden_size"), keys.number("final_logit_softcapping", 0.0, zero=True)
        ),
    )


def _refuse(keys: Header) -> None:
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    # Of pictures only: a text alone is read in one direction.
    keys.only("use_bidirectional_attention", "vision")
    keys.only("attention_bias", False)


def _layer_inputs(keys: Header) -> LayerInputs | None:
    width = keys.whole("hidden_size_per_layer_input", 256, least=0)
    n_vocab = keys.whole("vocab_size_per_layer_input", 262144)
    if width and n_vocab < keys.whole("vocab_size"):
        raise BadModelFile(
            f"the model's header names {keys.whole('vocab_size')} tokens and inputs of layers for "
            f"{n_vocab} of them; every token has some; {REMEDY}"
        )
    return LayerInputs(width=width, n_vocab=n_vocab) if width else None


def _experts(keys: Header, n_layers: int) -> Experts | None:
    """Experts beside the dense networks of all layers, where the model has any."""
    if not keys.flag("enable_moe_block", False):
        return None
    n_experts = keys.whole("num_experts", most=spec.MAX_EXPERTS)
    return Experts(
        layers=tuple(range(n_layers)),
        n_experts=n_experts,
        n_used=keys.whole("top_k_experts", most=n_experts),
        n_ff=keys.whole("moe_intermediate_size"),
        scoring="softmax",
        beside=True,
    )


def _double(keys: Header) -> bool:
    return keys.flag("use_double_wide_mlp", False)


def own_layers(
    kinds: Sequence[str], kind: str, n_own: int
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Layers of a kind that keep keys and values, and those behind them, which read the last's."""
    windowed, full = by_kind(kinds)
    layers = windowed if kind == WINDOWED else full
    own = tuple(i for i in layers if i < n_own)
    if layers and not own:
        raise BadModelFile(
            f"the model's header has layers of kind {kind} from layer {n_own} on, which read keys "
            f"and values of such layers before it, and there are none; {REMEDY}"
        )
    return own, tuple((i, own[-1]) for i in layers if i >= n_own)


def _full_sizes(keys: Header) -> tuple[int, int]:
    """Channels and kv heads of full layers; 0 kv heads are as many as in the others."""
    by_layer = keys.inner("per_layer_config").values
    if by_layer:
        kinds = {tuple(sorted(x.items())) for x in by_layer.values() if isinstance(x, dict)}
        if len(kinds) != 1 or len(kinds) != len({repr(x) for x in by_layer.values()}):
            raise UnsupportedModel(
                f"'per_layer_config' {brief(by_layer)} is not supported; all full layers of Gemma "
                "4 have the same sizes"
            )
        keys = Header(dict(kinds.pop()))
        n_kv_heads = keys.whole("num_key_value_heads", 0, least=0)
        return keys.whole("head_dim", 512, most=spec.MAX_HEAD_DIM), n_kv_heads
    n_kv_heads = keys.whole("num_global_key_value_heads", 0, least=0)
    wide = keys.whole("global_head_dim", 512, most=spec.MAX_HEAD_DIM)
    return wide, n_kv_heads if keys.flag("attention_k_eq_v", False) else 0


def _near_rope(rules: Header, head_dim: int) -> RopeSpec:
    _check_kind(rules, "default")
    return spec.make_rope(n_rot=head_dim, base=rules.number("rope_theta", 1e4))


def _far_rope(rules: Header, head_dim: int) -> RopeSpec:
    """The first pairs of a head rotate, by frequencies of the whole of it."""
    kind = _check_kind(rules, "proportional", "default")
    part = rules.number("partial_rotary_factor", 1.0 if rules.values else 0.25)
    base = rules.number("rope_theta", 1e6)
    n_pairs, n_still = head_dim // 2, 0
    if kind == "proportional":
        n_still = n_pairs - math.floor(part * head_dim / 2)
    factor = rules.number("factor", 1.0)
    if n_still < 0:
        raise BadModelFile(f"partial_rotary_factor is {part}; at most 1 is wanted; {REMEDY}")
    if not n_still and factor == 1.0:
        return spec.make_rope(n_rot=head_dim, base=base)
    factors = (factor,) * (n_pairs - n_still) + (_STILL,) * n_still
    return spec.make_rope(n_rot=head_dim, base=base, freq_factors=factors)


def _check_kind(rules: Header, *known: str) -> str:
    kind = rules.text("rope_type", known[0])
    if kind not in known:
        raise UnsupportedModel(
            f"RoPE scaling {brief(kind)} of {ARCH} is not supported; one of {', '.join(known)}"
        )
    return kind
