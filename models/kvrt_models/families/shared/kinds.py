"""Kinds of layers that a header names: windows in some of them, recurrences in others."""

from collections.abc import Sequence

import numpy as np

from kvrt_models.header import Header

WINDOWED, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def of_kind(kinds: Sequence[str], kind: str) -> tuple[int, ...]:
    """Indices of the layers of a kind."""
    return tuple(i for i, found in enumerate(kinds) if found == kind)


def periodic(period: int, n_layers: int, local: str = WINDOWED) -> list[str]:
    """Every `period`-th layer full, the others of another kind."""
    return [local if (i + 1) % period else FULL for i in range(n_layers)]


def sparse_layers(keys: Header, n_layers: int) -> tuple[int, ...]:
    """Layers with experts: as a list says, or all behind the first few."""
    n_dense = keys.whole("first_k_dense_replace", least=0)
    usual = ["dense" if i < n_dense else "sparse" for i in range(n_layers)]
    return of_kind(keys.kinds("mlp_layer_types", usual, "dense", "sparse"), "sparse")


def windows(
    keys: Header, n_layers: int, period: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Windowed layers, full ones, and the tokens that windowed ones see.

    Args:
      keys: of the model.
      n_layers: layers of it.
      period: of full layers, where the header names none.

    Raises:
      UnsupportedModel: layers of another kind.
      BadModelFile: a list of another form, or no size for windowed layers.
    """
    if keys.tensors is not None:
        return _gguf_windows(keys, n_layers, period)
    kinds = keys.kinds("layer_types", periodic(period, n_layers), WINDOWED, FULL)
    windowed, full = (of_kind(kinds, kind) for kind in (WINDOWED, FULL))
    if not windowed or keys.called("sliding_window") not in keys.values:
        return windowed, full, keys.usual["sliding_window"]
    return windowed, full, Header(keys.values).whole("sliding_window")


def _gguf_windows(
    keys: Header, n_layers: int, period: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The same of a GGUF, as a list says, or one full in every period; a period of 0 has none."""
    key, ids = "attention.sliding_window_pattern", range(n_layers)
    least = int(keys.usual.get("sliding_window") != 0)
    window = keys.whole("sliding_window", least=least)
    if isinstance(keys.values.get(keys.called(key)), (list, np.ndarray)):
        has_window = list(map(bool, keys.by_layer(key, n_layers, least=0)))
    else:
        period = keys.whole(key, period, least=0)
        has_window = [period == 0 or (i + 1) % period > 0 for i in ids]
    windowed = tuple(i for i in ids if window > 0 and has_window[i])
    return windowed, tuple(i for i in ids if i not in windowed), window
