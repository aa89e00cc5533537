"""A model's layers as runs of consecutive ones, of which those of equal kinds have one program.

A program is traced for the first run of its kind, and is called with the weights and the stored
arrays of each. How long a run is weighs the layers that are compiled against the dispatches of a
step.
"""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from kvrt.attention.scored.layers import ScoredGroup
from kvrt.config import GroupSpec, RecurrentSpec
from kvrt.options.select import DoubleSparsity, Select
from kvrt.program.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersPart:
    """Some consecutive layers of a layout, and where they find what they read and write.

    Attributes:
      layout: of these layers and of earlier ones whose keys and values they read; its stores and
        groups are those of `stores` and `groups`, and its arrays `own` and then `lent`.
      groups: indices of groups.
      stores: indices of stores.
      own: by store, arrays that the layers write.
      lent: by store, further arrays that they read.
      states: indices of recurrent layers' tables.
      reads: earlier layers whose keys and values they read.
      late: layers that later ones read, which write after the last of those.
    """

    layout: Layout
    groups: tuple[int, ...]
    stores: tuple[int, ...]
    own: tuple[tuple[int, ...], ...]
    lent: tuple[tuple[int, ...], ...]
    states: tuple[int, ...]
    reads: tuple[int, ...]
    late: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Layers [first, last), which are of the kinds of layers [like, like + last - first)."""

    first: int
    last: int
    like: int
    part: LayersPart

    @property
    def traced(self) -> tuple[int, int]:
        """The layers that its program is traced for."""
        return self.like, self.like + self.last - self.first


def layers_part(layout: Layout, first: int, last: int) -> LayersPart:
    """Layers [first, last) of a layout."""
    found = [_group_part(g, layout, first, last) for g in range(len(layout.groups))]
    kept = [(g, *x) for g, x in enumerate(found) if x is not None]
    stores = tuple(dict.fromkeys(layout.store_of[g] for g, _, _ in kept))
    own: dict[int, list[int]] = {i: [] for i in stores}
    lent: dict[int, list[int]] = {i: [] for i in stores}
    for g, group, mine in kept:
        for layer in group.layers:
            of = own if layer in mine else lent
            of[layout.store_of[g]].append(_buffer(layout, g, layer))
    own = {i: list(dict.fromkeys(x)) for i, x in own.items()}
    lent = {i: [b for b in dict.fromkeys(x) if b not in own[i]] for i, x in lent.items()}
    order = {i: [*own[i], *lent[i]] for i in stores}
    states = _states(layout, first, last)
    inside = Layout(
        groups=tuple(group for _, group, _ in kept),
        stores=tuple(
            dataclasses.replace(layout.stores[i], n_buffers=len(order[i])) for i in stores
        ),
        store_of=tuple(stores.index(layout.store_of[g]) for g, _, _ in kept),
        buffers=tuple(
            tuple(order[layout.store_of[g]].index(_buffer(layout, g, x)) for x in group.layers)
            for g, group, _ in kept
        ),
        recurrent=_recurrent(layout.recurrent, states),
        n_states=layout.n_states,
        scored=tuple(x for x in (_scored(s, first, last) for s in layout.scored) if x),
    )
    pairs = [pair for g in layout.groups for pair in g.kv_of]
    reads = {read for x, read in pairs if first <= x < last and read < first}
    read_later = {read for x, read in pairs if x >= last}
    return LayersPart(
        layout=inside,
        groups=tuple(g for g, _, _ in kept),
        stores=stores,
        own=tuple(tuple(own[i]) for i in stores),
        lent=tuple(tuple(lent[i]) for i in stores),
        states=states,
        reads=tuple(sorted(reads)),
        late=tuple(sorted(x for _, _, mine in kept for x in mine if x in read_later)),
    )


def _group_part(
    g: int, layout: Layout, first: int, last: int
) -> tuple[GroupSpec, tuple[int, ...]] | None:
    """A group of some of its layers and those that they read; and which write themselves."""
    group = layout.groups[g]
    indexers = [of.indexed for of in layout.groups if of.indexed]
    keys = {index for of in indexers for x, index in of.keys_of if first <= x < last}
    mine = tuple(x for x in group.layers if first <= x < last or x in keys)
    readers = tuple((x, read) for x, read in group.kv_of if first <= x < last)
    layers = tuple(sorted({*mine, *(read for _, read in readers)}))
    if not layers:
        return None
    indexed = group.indexed
    if indexed is not None:
        pairs = tuple((x, key) for x, key in indexed.keys_of if first <= x < last)
        indexed = dataclasses.replace(indexed, keys_of=pairs)
    return dataclasses.replace(group, layers=layers, kv_of=readers, indexed=indexed), mine


def _buffer(layout: Layout, g: int, layer: int) -> int:
    return layout.buffers[g][layout.groups[g].layers.index(layer)]


def _states(layout: Layout, first: int, last: int) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(layout.recurrent_layers) if first <= x < last)


def _recurrent(spec: RecurrentSpec | None, states: tuple[int, ...]) -> RecurrentSpec | None:
    if spec is None or not states:
        return None
    layers = tuple(spec.layers[i] for i in states)
    by_layer = tuple(spec.by_layer[i] for i in states) if spec.by_layer else ()
    return dataclasses.replace(spec, layers=layers, by_layer=by_layer)


def _scored(of: ScoredGroup, first: int, last: int) -> ScoredGroup | None:
    pairs = zip(of.group.layers, of.slots, strict=True)
    kept = [(x, slots) for x, slots in pairs if first <= x < last]
    if not kept:
        return None
    layers, slots = zip(*kept, strict=True)
    return ScoredGroup(group=dataclasses.replace(of.group, layers=layers), slots=slots)


def layer_runs(
    layout: Layout, kinds: Sequence[Hashable], select: Select | None, n_each: int | None = None
) -> tuple[LayerRun, ...]:
    """The runs of a model's layers, none of which goes beyond the last layer that keeps something.

    Args:
      layout: of the cache.
      kinds: by layer, what the model says of it and of its parameters.
      select: how decode reads sparsely.
      n_each: layers of a run; None is what makes the sum of compiled layers and of runs least.
    """
    end = layout.exit_layer

    def made(n: int) -> tuple[LayerRun, ...]:
        cuts = [*range(0, end, n), *range(end, len(kinds), n), len(kinds)]
        return _made(cuts, layout, kinds, select, {})

    def cost(runs: tuple[LayerRun, ...]) -> int:
        return len(runs) + sum(x.last - x.first for x in runs if x.like == x.first)

    if n_each is not None:
        return made(n_each)
    return min((made(n) for n in _lengths(len(kinds))), key=cost)


def split_runs(
    runs: Sequence[LayerRun],
    at: int,
    layout: Layout,
    kinds: Sequence[Hashable],
    select: Select | None,
) -> tuple[tuple[LayerRun, ...], tuple[LayerRun, ...]]:
    """Runs before a layer, and from it on; all but the one that is cut have the programs of `runs`.

    Args:
      runs: of all layers.
      at: the layer.
      layout: as in `layer_runs`.
      kinds: likewise.
      select: likewise.
    """
    likes: dict[Hashable, int] = {
        _kind(x.part, kinds[x.first : x.last], x.first, select): x.like for x in runs
    }
    cuts = sorted({at, *(x.first for x in runs), len(kinds)})
    found = _made(cuts, layout, kinds, select, likes)
    return tuple(x for x in found if x.last <= at), tuple(x for x in found if x.first >= at)


def _made(
    cuts: Sequence[int],
    layout: Layout,
    kinds: Sequence[Hashable],
    select: Select | None,
    likes: dict[Hashable, int],
) -> tuple[LayerRun, ...]:
    """Runs between some layers; `likes` has and gets by kind the first layer that is traced."""
    runs: list[LayerRun] = []
    for first, last in itertools.pairwise(cuts):
        part = layers_part(layout, first, last)
        like = likes.setdefault(_kind(part, kinds[first:last], first, select), first)
        runs.append(LayerRun(first=first, last=last, like=like, part=part))
    return tuple(runs)


def _lengths(n_layers: int) -> Iterable[int]:
    """Lengths of runs worth a look: beyond three roots of the layers more is compiled anyway."""
    return range(1, min(n_layers, 3 * math.isqrt(n_layers) + 1) + 1)


def _kind(
    part: LayersPart, kinds: Sequence[Hashable], first: int, select: Select | None
) -> tuple[Any, ...]:
    """What a run's program follows from, with layers counted from its first."""
    last = first + len(kinds)
    index = {key: x for g in part.layout.groups if g.indexed for x, key in g.indexed.keys_of}

    def named(layer: int) -> tuple[str, int]:
        if layer in index:
            return "keys of", index[layer] - first
        return ("own", layer - first) if first <= layer < last else ("lent", layer)

    groups = [
        (
            tuple(map(named, g.layers)),
            tuple((named(x), named(read)) for x, read in g.kv_of),
            buffers,
        )
        for g, buffers in zip(part.layout.groups, part.layout.buffers, strict=True)
    ]
    recurrent = part.layout.recurrent
    states = recurrent and tuple(zip(map(named, recurrent.layers), recurrent.arrays, strict=True))
    scored = [(tuple(map(named, x.group.layers)), x.slots) for x in part.layout.scored]
    of_layers = first if isinstance(select, DoubleSparsity) else _labelled(part, select)
    late = tuple(map(named, part.late))
    shapes = part.groups, part.stores, tuple(map(len, part.own)), tuple(map(len, part.lent))
    return (*shapes, tuple(kinds), tuple(groups), states, tuple(scored), of_layers, late)


def _labelled(part: LayersPart, select: Select | None) -> Hashable:
    """Which arrays have labels."""
    if select is None:
        return None
    found = (
        (group.mask.kind == "full" and x >= select.n_dense)
        for group in part.layout.groups
        for x in group.layers
    )
    return tuple(found)
