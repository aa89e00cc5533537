"""Which layers can share keys and values, keep them as one latent, or choose what they read."""

from collections.abc import Sequence
from typing import Any

from kvrt.errors import BadConfig


def check_shared(layers: Sequence[int], kv_of: Sequence[tuple[int, int]]) -> None:
    """Refuses layers that read what is not there when they run.

    Raises:
      BadConfig: out of order, or a layer that reads a later one or one that keeps nothing.
    """
    readers = [i for i, _ in kv_of]
    _check(readers == sorted(set(readers)), f"kv_of {kv_of} must ascend, each layer once")
    own = ", ".join(map(str, layers))
    for layer, read in kv_of:
        says = f"layer {layer} reads the keys and values of layer {read}"
        _check(layer not in layers, f"{says} and keeps its own; name it in one place")
        _check(read < layer, f"{says}, which runs later; name a layer before it")
        _check(
            read in layers,
            f"{says}, which keeps none in this group; name one of its layers that keep them: {own}",
        )


def check_latent(rank: int, head_dim: int, n_kv_heads: int, scale: float | None) -> None:
    """Refuses sizes that no latent has; `rank` 0 is none.

    Raises:
      BadConfig: no room for what is rotated, more than one head, or no scale.
    """
    _check(rank >= 0, f"latent_rank is {rank}; it must not be negative")
    if not rank:
        return
    _check(
        rank < head_dim,
        f"latent_rank {rank} leaves no channel of head_dim {head_dim} for the rotated part of the "
        "keys; head_dim is the sum of both",
    )
    _check(
        n_kv_heads == 1,
        f"latent_rank {rank} with {n_kv_heads} kv heads; all query heads read one latent, so "
        "n_kv_heads is 1",
    )
    _check(
        scale is not None,
        f"latent_rank {rank} without a scale; it comes from the heads that the latent stands for, "
        "1 / sqrt(d_nope + d_rope), and not from head_dim",
    )


def check_indexed(group: Any) -> None:
    """Refuses layers whose queries cannot choose what they read by an indexer.

    Raises:
      BadConfig: they keep no latent, see less than all, share keys, or have other index keys.
    """
    if group.indexed is None:
        return
    own = [layer for layer, _ in group.indexed.keys_of]
    _check(
        own == list(group.layers) and not group.kv_of,
        f"indexed names index keys of layers {own}, the group has {list(group.all_layers)}; each "
        "of them keeps its own latents and has index keys",
    )
    _check(
        group.latent_rank > 0 and group.mask.kind == "full",
        "an indexer chooses one set of cells for all heads of layers that keep a latent and see "
        "every position; leave indexed out",
    )


def check_index_keys(groups: Sequence[Any]) -> None:
    """Refuses index keys that no group keeps, or not as an indexer reads them.

    Raises:
      BadConfig: their layers are in no group of their own with a latent, in full view.
    """
    for group in groups:
        if group.indexed is None:
            continue
        wanted = [keys for _, keys in group.indexed.keys_of]
        (found, *_) = [*(g for g in groups if list(g.layers) == wanted), None]
        _check(
            found is not None and found.latent_rank > 0 and found.mask.kind == "full",
            f"layers {wanted} keep index keys: they must be all layers of one group that sees "
            "every position, what RoPE leaves alone as its latent (latent_rank)",
        )


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise BadConfig(message)
