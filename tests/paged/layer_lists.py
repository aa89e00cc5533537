"""Layers of small and of well-known models, as the paged mode sees them."""

from kvrt.paged.layout.groups import LayerCache
from kvrt.state_arrays import StateArray

# A layer's block of the oracle's lists: 16 tokens, K and V of 4 heads of 64, two bytes each.
U = 16 * 2 * 64 * 4 * 2


def attention(layer: int, kind: str = "full", size: int = 0, **changed) -> LayerCache:
    sizes = dict(n_kv_heads=4, head_dim=64, type_k="bf16", type_v="bf16") | changed
    return LayerCache(layer=layer, kind=kind, size=size, **sizes)


def fulls_and_windows(n_full: int, n_window: int, size: int = 32, **changed) -> list[LayerCache]:
    full = [attention(i, **changed) for i in range(n_full)]
    windows = range(n_full, n_full + n_window)
    return full + [attention(i, "window", size, **changed) for i in windows]


def interleaved(n_layers: int, every: int, size: int, **changed) -> list[LayerCache]:
    """Of each `every` layers the last one is full, as in Gemma 3."""
    return [
        attention(i, **changed) if (i + 1) % every == 0 else attention(i, "window", size, **changed)
        for i in range(n_layers)
    ]


def state(layer: int, *shapes: tuple[int, ...], block_size: int = 16) -> LayerCache:
    return LayerCache(
        layer=layer,
        kind="recurrent",
        block_size=block_size,
        state=tuple(StateArray(shape=x) for x in shapes),
    )
