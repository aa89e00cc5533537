"""YOCO from a config.json: layers with windows or states, then layers that all read one's keys.

No published folder has this form; its names are those of llama's, with `self_attn.k_proj` and
`v_proj` of the second half replaced by `model.kv_layer_norm`, `model.k_proj` and `model.v_proj`,
and `self_attn.g_proj` and `gt_proj` beside those of the first half where that has gated retention.
"""

from typing import Any

from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models.families.shared.family import Family
from kvrt_models.families.shared.rope import make_rope
from kvrt_models.header import REMEDY, Header, brief
from kvrt_models.spec import Layers, SsmSpec

_WINDOWED, _RETENTION = "sliding_window", "gated_retention"


def _yoco(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """The first half sees a window, the second what a layer between them keeps of all tokens.

    With `self_decoder` "gated_retention" the first half keeps states instead.

    Raises:
      BadModelFile: layers have no two halves, or heads an odd number of channels to rotate.
      UnsupportedModel: the first half is of another kind.

    Source: arXiv:2405.05254, sec. 2.
    """
    if n_layers % 2:
        raise BadModelFile(
            f"the model's header names {n_layers} layers of {keys.arch}, of which one half reads "
            f"what the other makes; their number must be even; {REMEDY}"
        )
    half, self_decoder = n_layers // 2, keys.text("self_decoder", _WINDOWED)
    if self_decoder not in (_WINDOWED, _RETENTION):
        raise UnsupportedModel(
            f"self_decoder {brief(self_decoder)} is not supported in {keys.arch}; only {_WINDOWED} "
            f"and {_RETENTION}"
        )
    rope = make_rope(n_rot=head_dim, base=_rope_base(keys, head_dim), layout="norm")
    first, readers = tuple(range(half)), tuple((i, half) for i in range(half + 1, n_layers + 1))
    layers, ssm = [Layers(layers=(half,), kv_of=readers, rope=rope)], None
    if self_decoder == _RETENTION:
        ssm = _retention(keys, first, head_dim)
    else:
        layers = [Layers(layers=first, rope=rope, window=keys.whole("sliding_window")), *layers]
    return dict(
        layers=layers,
        ssm=ssm,
        producers=(half,),
        embed_scale=keys.whole("hidden_size") ** 0.5,
    )


def _retention(keys: Header, layers: tuple[int, ...], head_dim: int) -> SsmSpec:
    """Layers of gated retention, with as many heads as those with attention."""
    n_heads = keys.whole("num_attention_heads")
    return SsmSpec(
        kind="retention",
        layers=layers,
        d_inner=n_heads * head_dim,
        d_state=head_dim,
        d_conv=0,
        n_heads=n_heads,
        rope_base=_rope_base(keys, head_dim),
    )


def _rope_base(keys: Header, head_dim: int) -> float:
    """The base whose slowest pair of channels turns by 1 / rope_theta, as in the published code.

    There pair i of n turns by rope_theta ** (-i / (n - 1)), elsewhere by base ** (-i / n).
    """
    n = head_dim // 2
    return keys.number("rope_theta", 1e4) ** (n / max(n - 1, 1))


FAMILIES = (Family(read=_yoco, hf="yoco"),)
