"""A step as several programs: `embed_step`, runs of layers (`runs.py`), `finish_step`, a head.

Each run attends to old cells and to the step's own tokens and then writes its arrays, which it is
given by donation. Cells change before the first run (those of blocks that are given out anew) and
after the last.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from kvrt.arrays import Array, Float, Int32, state
from kvrt.cells import Cells
from kvrt.errors import BadConfig
from kvrt.program import step
from kvrt.program.batch import Batch
from kvrt.program.layers.runs import LayerRun, LayersPart, layer_runs, layers_part
from kvrt.program.programs import ModelKind, Program, Programs, TracedParams
from kvrt.program.step import Cache, StepSpec
from kvrt.store import kv as kv_store
from kvrt.store.kv import KVStore
from kvrt.store.recurrent import StateStore

# Begins a program or runs it: its results, or their shapes.
Call = Callable[[Program], Any]


@state
class Stream:
    """What goes from one run of layers to the next.

    Attributes:
      x: the residual stream, of some tokens behind the last layer that keeps something; as what
        follows an array, or its shape.
      own: by layer what later layers read of its keys and values of the step, before their
        rotation.
      late: keys and values that are written when no later layer reads their arrays any more.
    """

    x: Any
    own: dict[int, Any]
    late: dict[int, Any]


class Fixed(NamedTuple):
    """Arrays that a run only reads: its weights, those of earlier layers, and cells by store."""

    params: tuple
    lent: tuple[KVStore, ...]
    labels: tuple
    cells: tuple[Cells, ...]


class TracedLayers(NamedTuple):
    """Layers [first, last) of a program, and whether they run over `batch.out_ids` alone."""

    first: int
    last: int
    is_narrow: bool


class StepByLayer:
    """The programs of a step, and how they follow one another."""

    def __init__(self, programs: Programs | TracedParams, n_each: int | None = None):
        """Divides the layers into runs, see `layer_runs`; compiles nothing.

        Raises:
          BadConfig: the model tells of more or fewer layers than its groups have.
        """
        self._programs, params = programs, programs.kind.layers
        assert params is not None, "the model does not tell its layers apart"
        layout, select = programs.spec.layout, programs.spec.config.select
        if len(params.kinds) != layout.n_layers:
            raise BadConfig(
                f"layer_kinds() has {len(params.kinds)} layers, and groups and recurrent have "
                f"{layout.n_layers}; name each layer once, or run it with programs='whole'"
            )
        self.runs = layer_runs(layout, params.kinds, select, n_each)
        self._exit = layout.exit_layer
        late = [x for run in self.runs for x in run.part.late]
        self._late = [(x, layers_part(layout, x, x + 1)) for x in late]

    def rows(self, call: Call, arrays: "Arrays", batch: Batch) -> Any:
        """Runs the layers over a batch.

        Args:
          call: what runs a program, or begins it.
          arrays: of the cache, which get the step's tokens; or shapes.
          batch: the step's tokens.

        Returns:
          The residual stream of `batch.out_ids`, or its shape. `[R, E]`
        """
        kind, rest = self._programs.kind, self._programs.rest
        args = arrays.cells, rest, batch
        x, arrays.cells, batch = call(Program(embed_step, (kind,), args, donate=(0,), n_known=2))
        stream, n_rows = Stream(x=x, own={}, late={}), batch.out_ids.shape[0]
        # All go on where the logits of all are wanted, or all layers keep something.
        narrows = self._exit < self.runs[-1].last and n_rows < batch.tokens.shape[0]
        for run in self.runs:
            is_narrow = narrows and run.first >= self._exit
            if is_narrow and n_rows == 0:
                break
            if is_narrow and run.first == self._exit:
                x = call(Program(take_rows, (), (stream.x, batch.out_ids)))
                stream = dataclasses.replace(stream, x=x)
            stream = self._layers(call, arrays, batch, run, stream, is_narrow=is_narrow)
        for layer, part in self._late:
            args = *arrays.of(part, ()), _places(batch, part), stream.late[layer]
            arrays.put(part, call(Program(write_late, (kind, layer), args, donate=(0,), n_known=2)))
        args = arrays.cells, batch, stream.x
        wanted = Program(finish_step, (kind, narrows), args, donate=(0,), n_known=1)
        rows, arrays.cells = call(wanted)
        return rows

    def _layers(
        self,
        call: Call,
        arrays: "Arrays",
        batch: Batch,
        run: LayerRun,
        stream: Stream,
        *,
        is_narrow: bool,
    ) -> Stream:
        """Runs some layers over a stream, which may be narrowed to the wanted tokens."""
        part = run.part
        params = self._programs.params_of(run.first, run.last)
        mine = Stream(x=stream.x, own={i: stream.own[i] for i in part.reads}, late={})
        args = *arrays.of(part, params), _places(batch, part), mine
        how = TracedLayers(*run.traced, is_narrow)
        wanted = Program(layers, (self._programs.kind, how), args, donate=(0,), n_known=2)
        given, written = call(wanted)
        arrays.put(part, written)
        # Named by the layers that the program is traced for.
        own, late = (dict(zip(part.late, x.values(), strict=True)) for x in (given.own, given.late))
        return Stream(x=given.x, own=stream.own | own, late=stream.late | late)


class Arrays:
    """A cache's arrays during a step; results of a program replace the arrays that it was given."""

    def __init__(self, cache: Cache):
        """Takes a cache apart."""
        self._cache, self.cells = cache, cache.cells
        self._k = [list(x.k) for x in cache.stores]
        self._v = [list(x.v) for x in cache.stores]
        self._labels = [list(x) for x in cache.labels or ()]
        self._states = list(cache.states.tables) if cache.states else []
        self._nan_scores = cache.nan_scores

    def of(self, part: LayersPart, params: tuple) -> tuple[Cache, Fixed]:
        """Arrays that some layers write, and arrays that they only read."""
        own = list(zip(part.stores, part.own, strict=True))
        lent = list(zip(part.stores, part.lent, strict=True))
        has_labels, has_states = self._cache.labels is not None, self._cache.states is not None
        held = Cache(
            stores=self._stores(own),
            cells=(),
            states=StateStore(tables=_of(self._states, part.states)) if has_states else None,
            labels=self._labels_of(own) if has_labels else None,
            nan_scores=self._nan_scores if part.layout.scored else None,
        )
        labels = self._labels_of(lent) if has_labels else ()
        cells = _of(self.cells, part.stores)
        return held, Fixed(params=params, lent=self._stores(lent), labels=labels, cells=cells)

    def put(self, part: LayersPart, new: Cache) -> None:
        """Takes what some layers wrote."""
        for i, mine, store in zip(part.stores, part.own, new.stores, strict=True):
            _set(self._k[i], mine, store.k)
            _set(self._v[i], mine, store.v)
        for i, mine, of_store in zip(part.stores, part.own, new.labels or (), strict=False):
            _set(self._labels[i], mine, of_store)
        if new.states is not None:
            _set(self._states, part.states, new.states.tables)
        if new.nan_scores is not None:
            self._nan_scores = new.nan_scores

    def cache(self) -> Cache:
        """The cache as it is."""
        pairs = zip(self._k, self._v, strict=True)
        states = StateStore(tables=tuple(self._states)) if self._cache.states else None
        labels = tuple(map(tuple, self._labels)) if self._cache.labels is not None else None
        return Cache(
            stores=tuple(KVStore(k=tuple(k), v=tuple(v)) for k, v in pairs),
            cells=self.cells,
            states=states,
            labels=labels,
            nan_scores=self._nan_scores,
        )

    def _stores(self, which: Sequence[tuple[int, Sequence[int]]]) -> tuple[KVStore, ...]:
        return tuple(KVStore(k=_of(self._k[i], x), v=_of(self._v[i], x)) for i, x in which)

    def _labels_of(self, which: Sequence[tuple[int, Sequence[int]]]) -> tuple:
        return tuple(_of(self._labels[i], x) for i, x in which)


def _places(batch: Batch, part: LayersPart) -> Batch:
    """A batch as some groups see it."""
    return dataclasses.replace(batch, places=_of(batch.places, part.groups))


def _of(values: Sequence, which: Sequence[int]) -> tuple:
    return tuple([values[i] for i in which])


def _set(values: list, which: Sequence[int], new: Sequence) -> None:
    for i, x in zip(which, new, strict=True):
        values[i] = x


# --- programs ----------------------------------------------------------------------------------


def embed_step(
    kind: ModelKind, cells: tuple[Cells, ...], rest: tuple, batch: Batch
) -> tuple[Float[Array, "T E"], tuple[Cells, ...], Batch]:
    """The residual stream before the first layer; cells and batch for what follows."""
    x = kind.outer(rest).embed(step.step_tokens(batch, kind.spec))
    return x, step.vacated(cells, batch, kind.spec), batch


def layers(
    kind: ModelKind,
    how: TracedLayers,
    held: Cache,
    fixed: Fixed,
    batch: Batch,
    stream: Stream,
) -> tuple[Stream, Cache]:
    """Layers [first, last) over a stream, which then write; cells stay as they are.

    Args:
      kind: of the model and the cache.
      how: which layers.
      held: arrays that they write; donated.
      fixed: what they read.
      batch: the step's tokens, with places of the groups that the layers are of.
      stream: from the layers before them.

    Returns:
      What these layers give others, and their arrays.
    """
    part = layers_part(kind.spec.layout, how.first, how.last)
    spec = dataclasses.replace(kind.spec, layout=part.layout)
    cache = _joined(held, fixed)
    attention = step.opened(cache, batch, spec)
    attention.own.update(stream.own)
    attend = attention.for_tokens(jnp.asarray(batch.out_ids)) if how.is_narrow else attention
    model = kind.inner(fixed.params, range(how.first, how.last))
    x = model.layers(stream.x, attend, how.first, how.last)
    late = {i: (attention.k_new.pop(i), attention.v_new.pop(i)) for i in part.late}
    own = {i: attention.own[i] for i in part.late}
    written = _written(cache, attention, batch, spec, x)
    return Stream(x=x, own=own, late=late), _parted(written, part)


def write_late(
    kind: ModelKind,
    layer: int,
    held: Cache,
    fixed: Fixed,
    batch: Batch,
    new: tuple[Array, Array],
) -> Cache:
    """The arrays of a layer with its keys and values of the step's tokens; they are donated."""
    part = layers_part(kind.spec.layout, layer, layer + 1)
    spec = dataclasses.replace(kind.spec, layout=part.layout)
    cache = _joined(held, fixed)
    attention = step.opened(cache, batch, spec)
    attention.k_new[layer], attention.v_new[layer] = new
    return _parted(_written(cache, attention, batch, spec, new[0]), part)


def take_rows(x: Float[Array, "T E"], ids: Int32[Array, " R"]) -> Float[Array, "R E"]:
    """Some tokens of a stream."""
    return x[ids]


def finish_step(
    kind: ModelKind,
    is_done: bool,
    cells: tuple[Cells, ...],
    batch: Batch,
    x: Float[Array, "N E"],
) -> tuple[Float[Array, "R E"], tuple[Cells, ...]]:
    """The rows of a stream whose logits are wanted, and cells with the step's tokens."""
    ids: Int32[Array, " R"] = jnp.asarray(batch.out_ids)
    if ids.shape[0] == 0:
        x = x[:0]
    elif not is_done:
        x = x[ids]
    return x, step.place_step(cells, batch, kind.spec)


def _joined(held: Cache, fixed: Fixed) -> Cache:
    """The cache of some layers."""
    stores = (
        KVStore(k=own.k + lent.k, v=own.v + lent.v)
        for own, lent in zip(held.stores, fixed.lent, strict=True)
    )
    labels = held.labels
    if labels is not None:
        labels = tuple(own + lent for own, lent in zip(labels, fixed.labels, strict=True))
    return dataclasses.replace(held, stores=tuple(stores), cells=fixed.cells, labels=labels)


def _parted(cache: Cache, part: LayersPart) -> Cache:
    """What of such a cache the layers write."""
    stores = (
        kv_store.part(store, range(len(own)))
        for store, own in zip(cache.stores, part.own, strict=True)
    )
    labels = cache.labels
    if labels is not None:
        labels = tuple(of[: len(own)] for of, own in zip(labels, part.own, strict=True))
    return dataclasses.replace(cache, stores=tuple(stores), cells=(), labels=labels)


def _written(cache: Cache, attention: Any, batch: Batch, spec: StepSpec, done: Array) -> Cache:
    """The arrays with what the layers keep; labels follow from cells as the step leaves them."""
    cells = step.place_step(cache.cells, batch, spec) if spec.config.select else cache.cells
    cache = dataclasses.replace(cache, cells=cells)
    return step.write_step(cache, attention, batch, spec, done.astype(jnp.float32))
