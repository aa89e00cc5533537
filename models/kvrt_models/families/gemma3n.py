"""Gemma 3n's text model: streams beside each other, and layers that read the keys of others."""

import statistics
from typing import Any

from kvrt.errors import BadModelFile
from kvrt_models.families.gemma import ACTIVATION, gemma3_ropes
from kvrt_models.families.gemma4 import USUAL, own_layers
from kvrt_models.families.shared.family import Family
from kvrt_models.families.shared.kinds import FULL, WINDOWED, windows
from kvrt_models.header import REMEDY, Header, brief
from kvrt_models.spec import AltUp, LayerInputs, Layers, gemma

_MAX_STREAMS = 64
# Layers that set most of their gates to zero, and how many of each of them, where a file is silent.
_SPARSE, _SPARSITY = 10, 0.95


def _gemma3n(keys: Header, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Streams beside each other, windowed and full layers, of which the last read others' keys.

    Raises:
      BadModelFile: sizes contradict each other.
    """
    *kinds, window = windows(keys, n_layers, 5)
    n_own = n_layers - keys.whole("num_kv_shared_layers", 15, least=0, most=n_layers)
    windowed, full = (
        own_layers(ids, kind, n_own) for ids, kind in zip(kinds, (WINDOWED, FULL), strict=True)
    )
    near, far = gemma3_ropes(keys, head_dim)
    return dict(
        layers=[
            Layers(layers=windowed[0], kv_of=windowed[1], rope=near, window=window),
            Layers(layers=full[0], kv_of=full[1], rope=far),
        ],
        scale=1.0,
        unit_v_norm=True,
        layer_inputs=LayerInputs(
            width=keys.whole("hidden_size_per_layer_input", 256),
            n_vocab=keys.whole("vocab_size_per_layer_input", 262144),
        ),
        altup=_altup(keys),
        laurel_rank=keys.whole("laurel_rank", 64),
        ffn_cutoffs=_cutoffs(keys, n_layers),
        **gemma(keys.whole("hidden_size"), keys.number("final_logit_softcapping", 30.0, zero=True)),
    )


def _altup(keys: Header) -> AltUp:
    n = keys.whole("altup_num_inputs", 4, most=_MAX_STREAMS)
    return AltUp(
        n_streams=n,
        active=keys.whole("altup_active_idx", 0, least=0, most=n - 1),
        scaled=keys.flag("altup_correct_scale", True),
    )


def _cutoffs(keys: Header, n_layers: int) -> tuple[float | None, ...]:
    """By layer, deviations above the mean below which gates are zero; None keeps all.

    Raises:
      BadModelFile: they are no list of shares, one for each layer.
    """
    found = keys.values.get("activation_sparsity_pattern")
    if found is None:
        n = _SPARSE if n_layers > _SPARSE else 0
        found = [_SPARSITY] * n + [0.0] * (n_layers - n)
    found = [found] * n_layers if isinstance(found, float | int) else found
    if not isinstance(found, list) or len(found) != n_layers:
        raise keys.bad("activation_sparsity_pattern", found, f"a list of {n_layers} shares")
    if any(type(x) not in (int, float) or not 0 <= x < 1 for x in found):
        raise BadModelFile(
            f"'activation_sparsity_pattern' is {brief(found)}; shares of gates that are zero are "
            f"numbers from 0 to below 1; {REMEDY}"
        )
    normal = statistics.NormalDist()
    return tuple(normal.inv_cdf(x) if x > 0 else None for x in found)


FAMILIES = (
    Family(
        read=_gemma3n,
        hf="gemma3n_text",
        pictures="gemma3n",
        usual=USUAL,
        activation=ACTIVATION,
        bias="none",
        qk_norm=True,
    ),
)
