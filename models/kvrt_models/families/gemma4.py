"""Gemma 4's text model: layers of two sizes of heads, and the last ones read keys of others."""

import math
from collections.abc import Sequence
from typing import Any

from kvrt.config import RopeSpec
from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models.families.gemma import ACTIVATION
from kvrt_models.families.shared.family import MAX_HEAD_DIM, Family, experts_of
from kvrt_models.families.shared.kinds import FULL, WINDOWED, windows
from kvrt_models.families.shared.rope import make_rope, rope_kind
from kvrt_models.header import REMEDY, Header, brief
from kvrt_models.spec import LayerInputs, Layers, gemma

USUAL = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 512}
# A divisor of frequencies by which nothing rotates, as llama.cpp's files of Gemma 4 have it.
_STILL = 1e30


def _gemma4(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Windowed and full layers of different heads; the last ones read keys and values of others.

    Raises:
      UnsupportedModel: attention in both directions, or RoPE of another kind.
      BadModelFile: sizes contradict each other.
    """
    # Of pictures only: a text alone is read in one direction.
    keys.only("use_bidirectional_attention", "vision")
    *kinds, window = windows(keys, n_layers, 6)
    # As transformers does, whatever the file says.
    kinds = [[i for i in kinds[0] if i < n_layers - 1], sorted({*kinds[1], n_layers - 1})]
    n_own = n_layers - keys.whole("num_kv_shared_layers", 0, least=0, most=n_layers)
    windowed, full = (
        own_layers(ids, kind, n_own) for ids, kind in zip(kinds, (WINDOWED, FULL), strict=True)
    )
    wide, n_wide = _full_sizes(keys)
    ropes, n_ff = keys.inner("rope_parameters"), keys.whole("intermediate_size")
    mixtures = keys.flag("enable_moe_block", False)
    return dict(
        layers=[
            Layers(
                layers=windowed[0],
                kv_of=windowed[1],
                rope=_near_rope(ropes.inner(WINDOWED), head_dim, keys.arch),
                window=window,
            ),
            Layers(
                layers=full[0],
                kv_of=full[1],
                rope=_far_rope(ropes.inner(FULL), wide, keys.arch),
                head_dim=wide,
                n_kv_heads=n_wide,
            ),
        ],
        scale=1.0,
        unit_v_norm=True,
        v_of_k=full[0] if keys.flag("attention_k_eq_v", False) else (),
        layer_scale=True,
        layer_inputs=_layer_inputs(keys),
        experts=experts_of(keys, range(n_layers if mixtures else 0), "softmax", beside=True),
        n_ff_readers=2 * n_ff if keys.flag("use_double_wide_mlp", False) else 0,
        **gemma(keys.whole("hidden_size"), keys.number("final_logit_softcapping", 0.0, zero=True)),
    )


def _layer_inputs(keys: Header) -> LayerInputs | None:
    width = keys.whole("hidden_size_per_layer_input", 256, least=0)
    n_vocab = keys.whole("vocab_size_per_layer_input", 262144)
    if width and n_vocab < keys.whole("vocab_size"):
        raise BadModelFile(
            f"the model's header names {keys.whole('vocab_size')} tokens and inputs of layers for "
            f"{n_vocab} of them; every token has some; {REMEDY}"
        )
    return LayerInputs(width=width, n_vocab=n_vocab) if width else None


def own_layers(
    layers: Sequence[int], kind: str, n_own: int
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Layers of a kind that keep keys and values, and those behind them, which read the last's."""
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
        return keys.whole("head_dim", 512, most=MAX_HEAD_DIM), n_kv_heads
    n_kv_heads = keys.whole("num_global_key_value_heads", 0, least=0)
    wide = keys.whole("global_head_dim", 512, most=MAX_HEAD_DIM)
    return wide, n_kv_heads if keys.flag("attention_k_eq_v", False) else 0


def _near_rope(rules: Header, head_dim: int, arch: str) -> RopeSpec:
    rope_kind(rules, arch, ("default",))
    return make_rope(n_rot=head_dim, base=rules.number("rope_theta", 1e4))


def _far_rope(rules: Header, head_dim: int, arch: str) -> RopeSpec:
    """The first pairs of a head rotate, by frequencies of the whole of it."""
    kind = rope_kind(rules, arch, ("proportional", "default"))
    part = rules.number("partial_rotary_factor", 1.0 if rules.values else 0.25)
    base = rules.number("rope_theta", 1e6)
    n_pairs, n_still = head_dim // 2, 0
    if kind == "proportional":
        n_still = n_pairs - math.floor(part * head_dim / 2)
    factor = rules.number("factor", 1.0)
    if n_still < 0:
        raise BadModelFile(f"partial_rotary_factor is {part}; at most 1 is wanted; {REMEDY}")
    if not n_still and factor == 1.0:
        return make_rope(n_rot=head_dim, base=base)
    factors = (factor,) * (n_pairs - n_still) + (_STILL,) * n_still
    return make_rope(n_rot=head_dim, base=base, freq_factors=factors)


FAMILIES = (
    Family(
        read=_gemma4,
        hf="gemma4_text",
        pictures="gemma4",
        keys={"num_experts_per_tok": "top_k_experts"},
        usual=USUAL,
        activation=ACTIVATION,
        bias="none",
        qk_norm=True,
        names={
            "ffn_gate_inp": "router.proj",
            "ffn_gate_exps": "experts.gate_up_proj",
            "ffn_up_exps": "experts.gate_up_proj",
            "ffn_down_exps": "experts.down_proj",
        },
        gate_up="rows",
    ),
)
