"""One page size for all layers, as vLLM has it: for comparison only.

There one untyped pool serves all layers, so each layer's block has to take the same bytes: block
sizes grow, and pages of states are padded. Arrays here are typed and cannot be taken for one
another; `groups.group_layers` gives each storage shape a pool of its own, and this module says what
the other way would cost.

Source: vLLM's hybrid KV cache manager and its design document.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from kvrt.errors import BadConfig
from kvrt.paged.layout.groups import (
    Grouping,
    LayerCache,
    PoolShape,
    buffers_of,
    by,
    checked,
    group_size,
    shared_groups,
    strided,
)
from kvrt.paged.layout.spec import PagedGroup


def unify(layers: Sequence[LayerCache], *, alignment: int | None = None) -> Grouping:
    """Groups of layers in one pool whose pages all have one size.

    Args:
      layers: what each layer keeps.
      alignment: tokens by which attention's block size is raised until a page holds a state, as
        prefix caching needs it; None leaves it.

    Raises:
      BadConfig: pages of which none is a multiple of another, or layers that no plan can hold.
    """
    own = checked(layers)
    if alignment is not None:
        own = _raised(own, alignment)
    if not own:
        return Grouping(groups=(), pools=(PoolShape(page_bytes=()),), buffers={})
    if len({(x.kind, x.size, x.n_sink, x.block_size) for x in own}) == 1:
        # One kind: a buffer a layer, as wide as that layer.
        groups, pages = strided(own, len(own), pool=0), tuple(x.block_bytes for x in own)
    else:
        page = max(x.block_bytes for x in own)
        own = [_paged(x, page) for x in own]
        buckets = by(own, lambda x: (x.kind, x.size, x.n_sink, x.storage))
        size = group_size([len(b) for b in buckets], "reference")
        groups = [g for b in buckets for g in strided(b, size, pool=0)]
        pages = (page,) * size
    return _finished(layers, own, groups, pages)


def aligned_block_size(state_bytes: int, token_bytes: int, alignment: int) -> int:
    """The least multiple of alignment whose tokens take at least the bytes of a state."""
    return alignment * -(-state_bytes // (alignment * token_bytes))


def _raised(layers: list[LayerCache], alignment: int) -> list[LayerCache]:
    """With blocks of attention that are no smaller than a state."""
    states = [x.block_bytes for x in layers if x.kind == "recurrent"]
    kv = [x.token_bytes for x in layers if x.kind != "recurrent"]
    if not states or not kv:
        return layers
    n = aligned_block_size(max(states), max(kv), alignment)
    return [dataclasses.replace(x, block_size=max(n, x.block_size)) for x in layers]


def _paged(x: LayerCache, page: int) -> LayerCache:
    """With a block size at which its block is a page; states are padded instead."""
    if x.kind == "recurrent":
        return x
    if page % x.block_bytes:
        raise BadConfig(
            f"a page of {page} bytes is no multiple of the {x.block_bytes} bytes of layer "
            f"{x.layer}'s blocks, so one size cannot serve both; use a pool for each shape"
        )
    return dataclasses.replace(x, block_size=x.block_size * (page // x.block_bytes))


def _finished(
    layers: Sequence[LayerCache],
    own: Iterable[LayerCache],
    groups: list[PagedGroup],
    pages: tuple[int, ...],
) -> Grouping:
    buffers = buffers_of(layers, groups)
    filling = {x.layer: pages[buffers[x.layer]] - x.block_bytes for x in own}
    return Grouping(
        groups=(*groups, *shared_groups(layers, groups)),
        pools=(PoolShape(page_bytes=pages),),
        buffers=buffers,
        filling={layer: n for layer, n in filling.items() if n},
    )
