"""Which arrays of a layout have labels, and what of a model cannot have them."""

from kvrt.attention.select.labels import LabelPlan
from kvrt.cells.slots import Places
from kvrt.config import GroupSpec
from kvrt.errors import BadConfig
from kvrt.options.cache import CacheConfig
from kvrt.options.select import DoubleSparsity
from kvrt.program.layout import Layout
from kvrt.store.shards import Shards


def label_plan(layout: Layout, config: CacheConfig) -> LabelPlan | None:
    """The arrays that decode reads sparsely; None where it does not.

    They are those of layers with full attention, but for the first `Select.n_dense` layers. Layers
    with windows read few cells already, and recurrent ones none.
    """
    select = config.select
    if select is None:
        return None
    layers: list[list[int | None]] = [[None] * s.n_buffers for s in layout.stores]
    for group, i, buffers in zip(layout.groups, layout.store_of, layout.buffers, strict=True):
        if group.mask.kind != "full":
            continue
        for layer, b in zip(group.layers, buffers, strict=True):
            layers[i][b] = layer if layer >= select.n_dense else None
    return LabelPlan(select=select, layers=tuple(map(tuple, layers)))


def check_labels(layout: Layout, config: CacheConfig, shards: Shards | None) -> None:
    """Refuses what cannot be read sparsely.

    Raises:
      BadConfig: latents, layers that share arrays of blocks, a mesh, no layer that sees all, or
        channels of another model.
    """
    select = config.select
    if select is None:
        return
    full = [g for g in layout.groups if g.mask.kind == "full"]
    plan = label_plan(layout, config)
    _check(
        plan is not None and any(x is not None for of in plan.layers for x in of),
        "select reads some cells of layers that see all of them, and this model has none beyond "
        f"its first {select.n_dense} layers; leave select out",
    )
    _check(
        not any(g.latent_rank for g in full),
        "select chooses cells for each kv head, and a latent is one key for all heads, which is "
        "read once anyway; leave select out",
    )
    _check(shards is None, "select needs labels of all cells on one device; leave mesh out")
    shared = {(i, b) for i, b in _places(layout)}
    _check(
        len(shared) == sum(map(len, layout.buffers)),
        "select labels the keys of a layer, and in blocks this model's layers share arrays; use "
        "cells",
    )
    if isinstance(select, DoubleSparsity):
        for group in full:
            _check_channels(select, group)


def _places(layout: Layout) -> list[tuple[int, int]]:
    return [(i, b) for i, of in zip(layout.store_of, layout.buffers, strict=True) for b in of]


def _check_channels(select: DoubleSparsity, group: GroupSpec) -> None:
    """Refuses channels that the layers of a group do not have."""
    for layer in group.layers:
        if layer < select.n_dense:
            continue
        n = len(select.channels)
        _check(layer < n, f"select has channels of {n} layers, and none of layer {layer}")
        heads = select.channels[layer]
        _check(
            len(heads) == group.n_kv_heads,
            f"select has channels of {len(heads)} kv heads in layer {layer}, which has "
            f"{group.n_kv_heads}; find them with this model",
        )
        most = max(map(max, heads))
        _check(
            most < group.head_dim,
            f"select has channel {most} in layer {layer}, whose heads have {group.head_dim}; find "
            "them with this model",
        )


def check_weights(select: object, digest: str) -> None:
    """Refuses channels that were found with other weights.

    Raises:
      BadConfig: they were.
    """
    if isinstance(select, DoubleSparsity):
        _check(
            select.weights in ("", digest),
            f"the channels of select were found with weights {select.weights[:12]}, these are "
            f"{digest[:12]}; find them with this model",
        )


def n_labelled(places: Places) -> int:
    """The first so many tokens of a step label what they write: the only ones of a sequence."""
    if places.seq_blocks is not None:
        return places.seq_blocks.tables.shape[0]
    return int(places.slots.shape[-1] == 1)


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise BadConfig(message)
