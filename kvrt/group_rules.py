"""Which layers can share keys and values, or keep them as one latent; `GroupSpec` asks."""

from collections.abc import Sequence

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


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise BadConfig(message)
