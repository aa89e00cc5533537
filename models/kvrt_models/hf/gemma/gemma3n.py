"""Gemma 3n's text model from a Hugging Face config.json, as transformers reads it."""

import statistics
from typing import Any

from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models import spec
from kvrt_models.header import REMEDY, Header, brief
from kvrt_models.hf.gemma.gemma4 import own_layers
from kvrt_models.hf.hybrid import (
    FULL,
    WINDOWED,
    bad_list,
    gemma3_ropes,
    layer_kinds,
    periodic,
    window_of,
)
from kvrt_models.layers.gemma.sizes import AltUp, LayerInputs
from kvrt_models.spec import Layers

ARCH = "gemma3n_text"
_MAX_STREAMS = 64
# Layers that set most of their gates to zero, and how many of each of them, where a file is silent.
_SPARSE, _SPARSITY = 10, 0.95


def gemma3n(keys: Header, arch: str, n_layers: int, head_dim: int) -> dict[str, Any]:
    """Streams beside each other, windowed and full layers, of which the last read others' keys.

    Raises:
      BadModelFile: sizes contradict each other.
    """
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    keys.only("attention_bias", False)
    kinds = layer_kinds(keys, arch, periodic(5, n_layers))
    n_shared = keys.whole("num_kv_shared_layers", 15, least=0, most=n_layers)
    windowed, full = (own_layers(kinds, kind, n_layers - n_shared) for kind in (WINDOWED, FULL))
    near, far = gemma3_ropes(keys, head_dim)
    return dict(
        layers=[
            Layers(
                ids=windowed[0],
                kv_of=windowed[1],
                rope=near,
                window=window_of(keys, windowed[0], 512),
            ),
            Layers(ids=full[0], kv_of=full[1], rope=far),
        ],
        scale=1.0,
        qk_norm=True,
        unit_v_norm=True,
        layer_inputs=LayerInputs(
            width=keys.whole("hidden_size_per_layer_input", 256),
            n_vocab=keys.whole("vocab_size_per_layer_input", 262144),
        ),
        altup=_altup(keys),
        laurel_rank=keys.whole("laurel_rank", 64),
        ffn_cutoffs=_cutoffs(keys, n_layers),
        tied=keys.flag("tie_word_embeddings", True),
        **spec.gemma(
            keys.whole("hidden_size"), keys.number("final_logit_softcapping", 30.0, zero=True)
        ),
    )


def _altup(keys: Header) -> AltUp:
    n = keys.whole("altup_num_inputs", 4, most=_MAX_STREAMS)
    return AltUp(
        n_streams=n,
        active=keys.whole("altup_active_idx", 0, least=0, most=n - 1),
        scaled=keys.flag("altup_correct_scale", True),
    )


def one_width(keys: Header) -> Header:
    """The header with one width of all feed-forward layers, where it has a list.

    Raises:
      UnsupportedModel: they have several.
    """
    found = keys.values.get("intermediate_size")
    if not isinstance(found, list) or not found:
        return keys
    if any(x != found[0] for x in found):
        raise UnsupportedModel(
            f"'intermediate_size' {brief(found)} is not supported; all layers have one width"
        )
    return Header({**keys.values, "intermediate_size": found[0]})


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
        raise bad_list("activation_sparsity_pattern", found, f"a list of {n_layers} shares")
    if any(type(x) not in (int, float) or not 0 <= x < 1 for x in found):
        raise BadModelFile(
            f"'activation_sparsity_pattern' is {brief(found)}; shares of gates that are zero are "
            f"numbers from 0 to below 1; {REMEDY}"
        )
    normal = statistics.NormalDist()
    return tuple(normal.inv_cdf(x) if x > 0 else None for x in found)
