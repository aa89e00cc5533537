"""Which arrays of a layout have labels, and what of a model cannot have them."""

from kvrt.attention.select.labels import LabelPlan
from kvrt.cells.slots import Places
from kvrt.config import GroupSpec, RopeSpec
from kvrt.errors import BadConfig
from kvrt.options.cache import CacheConfig
from kvrt.options.compose import check_together
from kvrt.options.select import DoubleSparsity
from kvrt.program.layout import Layout


def label_plan(layout: Layout, config: CacheConfig) -> LabelPlan | None:
    """The arrays that decode reads sparsely; None where it does not.

    They are those of layers with full attention, but for the first `Select.n_dense` layers. Layers
    with windows read few cells already, and recurrent ones none.
    """
    select = config.select
    if select is None:
        return None
    unrotated: list[tuple[int, RopeSpec]] = []
    layers: list[list[int | None]] = [[None] * s.n_buffers for s in layout.stores]
    for group, i, buffers in zip(layout.groups, layout.store_of, layout.buffers, strict=True):
        if group.mask.kind != "full":
            continue
        for layer, b in zip(group.layers, buffers, strict=True):
            layers[i][b] = layer if layer >= select.n_dense else None
            if group.rope and config.rope == "read":
                unrotated.append((layer, group.rope))
    return LabelPlan(select=select, layers=tuple(map(tuple, layers)), unrotated=tuple(unrotated))


def check_labels(layout: Layout, config: CacheConfig) -> None:
    """Refuses layers that share arrays of blocks, and channels of another model: BadConfig."""
    select = config.select
    if select is None:
        return
    arrays = {(i, b) for i, of in zip(layout.store_of, layout.buffers, strict=True) for b in of}
    is_shared = len(arrays) < sum(map(len, layout.buffers))
    check_together(config.traits, {"shared arrays": ""} if is_shared else {})
    for group in layout.groups:
        if isinstance(select, DoubleSparsity) and group.mask.kind == "full":
            _check_channels(select, group)


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
