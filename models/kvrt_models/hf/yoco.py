"""YOCO from a config.json: windowed layers, then layers that all read one layer's keys and values.

No published folder has this form; its names are those of llama's, with `self_attn.k_proj` and
`v_proj` of the second half replaced by `model.kv_layer_norm`, `model.k_proj` and `model.v_proj`.
"""

from typing import Any

from kvrt.errors import BadModelFile
from kvrt_models import spec
from kvrt_models.header import REMEDY, Header
from kvrt_models.spec import Layers

ARCH = "yoco"


def yoco(keys: Header, arch: str, n_layers: int, head_dim: int) -> dict[str, Any]:
    """The first half sees a window, the second what a layer between them keeps of all tokens.

    Raises:
      BadModelFile: layers have no two halves.

    Source: arXiv:2405.05254, sec. 2.
    """
    keys.only("hidden_act", "silu", "swish")
    if n_layers % 2:
        raise BadModelFile(
            f"the model's header names {n_layers} layers of {arch}, of which one half reads what "
            f"the other makes; their number must be even; {REMEDY}"
        )
    half = n_layers // 2
    rope = spec.make_rope(n_rot=head_dim, base=keys.number("rope_theta", 1e4), layout="norm")
    window = keys.whole("sliding_window")
    readers = tuple((i, half) for i in range(half + 1, n_layers + 1))
    return dict(
        layers=[
            Layers(ids=tuple(range(half)), rope=rope, window=window),
            Layers(ids=(half,), kv_of=readers, rope=rope),
        ],
        producers=(half,),
        embed_scale=keys.whole("hidden_size") ** 0.5,
    )
