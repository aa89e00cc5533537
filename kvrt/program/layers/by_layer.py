"""A step as several programs: `embed_step`, runs of layers (`runs.py`), `finish_step`, a head.

Each run attends to old cells and to the step's own tokens and then writes its arrays, which it is
given by donation. Cells change before the first run (those of blocks that are given out anew) and
after the last. Where tokens may be refused runs write nothing: they give what they keep, and others
write of it what stays.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvrt.arrays import Array, Float, Int32, state
from kvrt.attention.contract import Attend
from kvrt.attention.scored.step import ScoredStep
from kvrt.attention.scored.tapped import TappedAttend
from kvrt.attention.step_attention import StepAttention
from kvrt.cells import Cells
from kvrt.errors import BadConfig
from kvrt.program import step
from kvrt.program.batch import Batch, without_fresh
from kvrt.program.layers.runs import LayerRun, LayersPart, layer_runs, layers_part, split_runs
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
      seen: by layer, what `TracedLayers.look` gives; a program counts from its first layer.
    """

    x: Any
    own: dict[int, Any]
    late: dict[int, Any]
    seen: dict[int, Any] = dataclasses.field(default_factory=dict)


@state
class Unwritten:
    """What layers keep of a step's tokens, by layer, before it is written.

    Attributes:
      k: keys, as they are stored but for the KV dtype.
      v: values, likewise.
      states: of recurrent layers, after each token.
      n_nan: scores that were NaN, by token.
      stays: the tokens that stay; None is all.
    """

    k: dict[int, Any]
    v: dict[int, Any]
    states: dict[int, Any] = dataclasses.field(default_factory=dict)
    n_nan: dict[int, Any] = dataclasses.field(default_factory=dict)
    stays: Any = None


class Fixed(NamedTuple):
    """Arrays that a run only reads: its weights, those of earlier layers, and cells by store."""

    params: tuple
    lent: tuple[KVStore, ...]
    labels: tuple
    cells: tuple[Cells, ...]


class TracedLayers(NamedTuple):
    """Layers [first, last) of a program, and whether they run over `batch.out_ids` alone.

    `look` is what is wanted of them besides, see `layers` and `tapped_layers`.
    """

    first: int
    last: int
    is_narrow: bool
    look: Callable | None = None


class Passed(NamedTuple):
    """The stream behind some runs, whether it is narrow, and what `unwritten_layers` gave."""

    stream: Stream
    is_narrow: bool
    kept: list[Unwritten]


class StepByLayer:
    """The programs of a step, and how they follow one another.

    `kind` is that of the model, `exit` the first layer from which on none keeps anything.
    """

    def __init__(self, programs: Programs | TracedParams, n_each: int | None = None):
        """Divides the layers into runs, see `layer_runs`; compiles nothing.

        Raises:
          BadConfig: the model tells of more or fewer layers than its groups have.
        """
        self._programs, self.kind, params = programs, programs.kind, programs.kind.layers
        assert params is not None, "the model does not tell its layers apart"
        layout, select = programs.spec.layout, programs.spec.config.select
        if len(params.kinds) != layout.n_layers:
            raise BadConfig(
                f"layer_kinds() has {len(params.kinds)} layers, and groups and recurrent have "
                f"{layout.n_layers}; name each layer once, or run it with programs='whole'"
            )
        self.runs, self.exit = layer_runs(layout, params.kinds, select, n_each), layout.exit_layer
        self._layout, self._kinds, self._select = layout, params.kinds, select
        self._split: dict[int, tuple[tuple[LayerRun, ...], tuple[LayerRun, ...]]] = {}
        late = [x for run in self.runs for x in run.part.late]
        self._late = {x: layers_part(layout, x, x + 1) for x in late}

    @property
    def rest(self) -> tuple:
        """Parameters of no layer."""
        return self._programs.rest

    def split(self, at: int) -> tuple[tuple[LayerRun, ...], tuple[LayerRun, ...]]:
        """The runs of the layers before one, and of the others."""
        if at not in self._split:
            found = split_runs(self.runs, at, self._layout, self._kinds, self._select)
            self._split[at] = found
        return self._split[at]

    def rows(self, arrays: "Arrays", batch: Batch) -> Any:
        """Runs the layers over a batch.

        Args:
          arrays: of the cache, which get the step's tokens; or shapes.
          batch: the step's tokens.

        Returns:
          The residual stream of `batch.out_ids`, or its shape. `[R, E]`
        """
        x, batch = self.embed(arrays, batch)
        return self.finish(arrays, batch, self.run(arrays, batch, x, self.runs))

    def embed(self, arrays: "Arrays", batch: Batch) -> tuple[Any, Batch]:
        """The residual stream before the first layer, and the batch for what follows."""
        args = arrays.cells, self.rest, batch
        wanted = Program(embed_step, (self.kind,), args, donate=(0,), n_known=2)
        x, arrays.cells, batch = arrays.call(wanted)
        return x, batch

    def finish(self, arrays: "Arrays", batch: Batch, passed: Passed) -> Any:
        """The stream of `batch.out_ids` behind the last layer; cells get the step's tokens."""
        static, args = (self.kind, passed.is_narrow), (arrays.cells, batch, passed.stream.x)
        wanted = Program(finish_step, static, args, donate=(0,), n_known=1)
        rows, arrays.cells = arrays.call(wanted)
        return rows

    def run(
        self,
        arrays: "Arrays",
        batch: Batch,
        x: Any,
        runs: Sequence[LayerRun],
        program: Callable | None = None,
        look: Callable | None = None,
    ) -> Passed:
        """Runs some layers over a stream, those that keep nothing over `batch.out_ids` alone.

        Args:
          arrays: of the cache; or shapes.
          batch: the step's tokens.
          x: the stream before these layers.
          runs: of consecutive layers.
          program: `unwritten_layers` or `tapped_layers`; None is `layers`, which write.
          look: what is wanted besides: of `tapped_layers` each, of others the last one alone.
        """
        stream, kept, n_rows = Stream(x=x, own={}, late={}), list[Unwritten](), batch.out_ids.size
        # All go on where the logits of all are wanted, or all layers keep something.
        narrows = self.exit < runs[-1].last and n_rows < batch.tokens.size
        for run in runs:
            is_narrow = narrows and run.first >= self.exit
            if is_narrow and n_rows == 0:
                break
            if is_narrow and run.first == self.exit:
                x = arrays.call(Program(take_rows, (), (stream.x, batch.out_ids)))
                stream = dataclasses.replace(stream, x=x)
            looks = program is tapped_layers or run is runs[-1]
            traced = TracedLayers(*run.traced, is_narrow, look if looks else None)
            stream, given = self._layers(arrays, batch, run, stream, (program or layers, traced))
            if program is None:
                arrays.put(run.part, given)
            else:
                kept.append(given)
        for layer, (k, v) in stream.late.items():
            new = Unwritten(k={layer: k}, v={layer: v})
            self._write(arrays, batch, self._late[layer], (layer, layer + 1), new)
        return Passed(stream, narrows, kept)

    def write(
        self,
        arrays: "Arrays",
        batch: Batch,
        runs: Sequence[LayerRun],
        kept: Sequence[Unwritten],
        stays: Any,
    ) -> None:
        """Writes what `unwritten_layers` gave of the tokens that stay."""
        for run, new in zip(runs, kept, strict=False):
            if run.first < self.exit:
                of_those = dataclasses.replace(new, stays=stays)
                self._write(arrays, batch, run.part, run.traced, of_those)

    def _write(
        self,
        arrays: "Arrays",
        batch: Batch,
        part: LayersPart,
        traced: tuple[int, int],
        new: Unwritten,
    ) -> None:
        args = *arrays.of(part, ()), _places(batch, part), new
        wanted = Program(write_layers, (self.kind, traced), args, donate=(0,), n_known=2)
        arrays.put(part, arrays.call(wanted))

    def _layers(
        self,
        arrays: "Arrays",
        batch: Batch,
        run: LayerRun,
        stream: Stream,
        how: tuple[Callable, TracedLayers],
    ) -> tuple[Stream, Any]:
        """Runs some layers over a stream, which may be narrowed to the wanted tokens."""
        part, (program, traced) = run.part, how
        params = self._programs.params_of(run.first, run.last)
        mine = Stream(x=stream.x, own={i: stream.own[i] for i in part.reads}, late={})
        mine_of = _places(batch, part, batch.out_ids if traced.is_narrow else None)
        args, donate = (*arrays.of(part, params), mine_of, mine), (0,) * (program is layers)
        n_known = 0 if arrays.by_token else 2
        given, result = arrays.call(Program(program, (self.kind, traced), args, donate, n_known))
        # Named by the layers that the program is traced for.
        own = dict(zip(part.late, given.own.values(), strict=True))
        late = dict(zip(part.late, given.late.values(), strict=False))
        return Stream(
            x=given.x,
            own=stream.own | own,
            late=stream.late | late,
            seen=stream.seen | {run.first + i: x for i, x in given.seen.items()},
        ), result


class Arrays:
    """A cache's arrays during a step; results of a program replace the arrays that it was given.

    `call` runs the programs of the step, or begins them. `states` has tables by recurrent layer,
    with a state for each token of a step where they are `by_token`.
    """

    by_token = False

    def __init__(self, cache: Cache, call: Call):
        """Takes a cache apart."""
        self._cache, self.cells, self.call = cache, cache.cells, call
        self._k = [list(x.k) for x in cache.stores]
        self._v = [list(x.v) for x in cache.stores]
        self._labels = [list(x) for x in cache.labels or ()]
        self.states = list(cache.states.tables) if cache.states else []
        self.nan_scores = cache.nan_scores

    def of(self, part: LayersPart, params: tuple) -> tuple[Cache, Fixed]:
        """Arrays that some layers write, and arrays that they only read."""
        own = list(zip(part.stores, part.own, strict=True))
        lent = list(zip(part.stores, part.lent, strict=True))
        has_labels, has_states = self._cache.labels is not None, self._cache.states is not None
        held = Cache(
            stores=self._stores(own),
            cells=(),
            states=StateStore(tables=_of(self.states, part.states)) if has_states else None,
            labels=self._labels_of(own) if has_labels else None,
            nan_scores=self.nan_scores if part.layout.scored else None,
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
            _set(self.states, part.states, new.states.tables)
        if new.nan_scores is not None:
            self.nan_scores = new.nan_scores

    def cache(self) -> Cache:
        """The cache as it is."""
        pairs = zip(self._k, self._v, strict=True)
        states = StateStore(tables=tuple(self.states)) if self._cache.states else None
        labels = tuple(map(tuple, self._labels)) if self._cache.labels is not None else None
        return Cache(
            stores=tuple(KVStore(k=tuple(k), v=tuple(v)) for k, v in pairs),
            cells=self.cells,
            states=states,
            labels=labels,
            nan_scores=self.nan_scores,
        )

    def _stores(self, which: Sequence[tuple[int, Sequence[int]]]) -> tuple[KVStore, ...]:
        return tuple(KVStore(k=_of(self._k[i], x), v=_of(self._v[i], x)) for i, x in which)

    def _labels_of(self, which: Sequence[tuple[int, Sequence[int]]]) -> tuple:
        return tuple(_of(self._labels[i], x) for i, x in which)


def _places(batch: Batch, part: LayersPart, out_ids: Any = None) -> Batch:
    """A batch as some groups see it; outputs are wanted of few layers."""
    return dataclasses.replace(batch, places=_of(batch.places, part.groups), out_ids=out_ids)


def _of(values: Sequence, which: Sequence[int]) -> tuple:
    return tuple([values[i] for i in which])


def _set(values: list, which: Sequence[int], new: Sequence) -> None:
    for i, x in zip(which, new, strict=True):
        values[i] = x


def call_traced(program: Program) -> Any:
    """The results of a program within one that is traced: equal ones are traced and lowered once.

    XLA inlines them.
    """
    return _jitted(program.run, len(program.static))(*program.static, *program.args)


@functools.cache
def _jitted(run: Callable, n_static: int) -> jax.stages.Wrapped:
    return jax.jit(run, static_argnums=tuple(range(n_static)))


# --- programs ----------------------------------------------------------------------------------


def embed_step(
    kind: ModelKind, cells: tuple[Cells, ...], rest: tuple, batch: Batch
) -> tuple[Float[Array, "T E"], tuple[Cells, ...], Batch]:
    """The residual stream before the first layer; cells and batch for what follows."""
    x = kind.outer(rest).embed(step.step_tokens(batch, kind.spec))
    return x, step.vacated(cells, batch, kind.spec), without_fresh(batch)


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
      how: which layers; its `look` is called with their attention, the last layer, the batch and
        the spec of these layers, when they have run.
      held: arrays that they write; donated.
      fixed: what they read.
      batch: the step's tokens, with places of the groups that the layers are of.
      stream: from the layers before them.

    Returns:
      What these layers give others, and their arrays.
    """
    part, spec, cache = _some_layers(kind, how, held, fixed)
    attention = _opened(cache, batch, spec, stream)
    x = _passed(kind, how, fixed, batch, stream.x, attention)
    last = how.last - 1
    seen, done = {}, x
    if how.look:
        seen = {last - how.first: how.look(attention, last, batch, spec)}
        # What is looked at is read before it is written, or XLA copies the layer.
        done = sum(map(jnp.sum, jax.tree.leaves(seen)), x.astype(jnp.float32))
    late = {i: (attention.k_new.pop(i), attention.v_new.pop(i)) for i in part.late}
    own = {i: attention.own[i] for i in part.late}
    written = _written(cache, attention, batch, spec, done)
    return Stream(x=x, own=own, late=late, seen=seen), _parted(written, part)


def unwritten_layers(
    kind: ModelKind,
    how: TracedLayers,
    held: Cache,
    fixed: Fixed,
    batch: Batch,
    stream: Stream,
) -> tuple[Stream, Unwritten]:
    """As `layers`, of tokens that may be refused: what they keep is for `write_layers`."""
    part, spec, cache = _some_layers(kind, how, held, fixed)
    attention = _opened(cache, batch, spec, stream)
    attention.one_by_one()
    x = _passed(kind, how, fixed, batch, stream.x, attention)
    own = {i: attention.own[i] for i in part.late}
    n_nan = attention.n_nan if isinstance(attention, ScoredStep) else {}
    k, v, states = attention.k_new, attention.v_new, attention.apart or {}
    return Stream(x=x, own=own, late={}), Unwritten(k=k, v=v, states=states, n_nan=n_nan)


def tapped_layers(
    kind: ModelKind,
    how: TracedLayers,
    held: Cache,
    fixed: Fixed,
    batch: Batch,
    stream: Stream,
) -> tuple[Stream, None]:
    """As `layers`, of which nothing is written: `how.look` sees what each layer compares."""
    part, spec, cache = _some_layers(kind, how, held, fixed)
    cells = step.emptied(cache.cells, batch, spec)
    attention = _opened(dataclasses.replace(cache, cells=cells), batch, spec, stream)
    assert how.look is not None, "who taps layers says what for"
    tapped = TappedAttend(attention, how.look)
    x = _passed(kind, how, fixed, batch, stream.x, tapped)
    own = {i: attention.own[i] for i in part.late}
    seen = {i - how.first: x for i, x in tapped.seen.items()}
    return Stream(x=x, own=own, late={}, seen=seen), None


def write_layers(
    kind: ModelKind,
    traced: tuple[int, int],
    held: Cache,
    fixed: Fixed,
    batch: Batch,
    new: Unwritten,
) -> Cache:
    """The arrays of some layers, donated, with what they keep of tokens that stay."""
    part, spec, cache = _some_layers(kind, TracedLayers(*traced, False), held, fixed)
    attention = step.opened(cache, batch, spec)
    attention.k_new, attention.v_new, attention.apart = new.k, new.v, new.states
    if isinstance(attention, ScoredStep):
        attention.n_nan = new.n_nan
    if new.stays is not None:
        attention.keep(new.stays)
    # Nothing here reads what is written.
    return _parted(_written(cache, attention, batch, spec, jnp.zeros(())), part)


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


def _some_layers(
    kind: ModelKind, how: TracedLayers, held: Cache, fixed: Fixed
) -> tuple[LayersPart, StepSpec, Cache]:
    """Where some layers find their arrays; spec and cache of these layers."""
    part = layers_part(kind.spec.layout, how.first, how.last)
    return part, dataclasses.replace(kind.spec, layout=part.layout), _joined(held, fixed)


def _opened(cache: Cache, batch: Batch, spec: StepSpec, stream: Stream) -> StepAttention:
    """The attention of some layers, behind those that gave a stream."""
    attention = step.opened(cache, batch, spec)
    attention.own.update(stream.own)
    return attention


def _passed(
    kind: ModelKind, how: TracedLayers, fixed: Fixed, batch: Batch, x: Array, attend: Attend
) -> Float[Array, "N E"]:
    """A stream behind some layers."""
    attend = attend.for_tokens(jnp.asarray(batch.out_ids)) if how.is_narrow else attend
    model = kind.inner(fixed.params, range(how.first, how.last))
    return model.layers(x, attend, how.first, how.last)


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
    if spec.config.select:
        cells = step.place_step(cache.cells, batch, spec, attention.kept)
        cache = dataclasses.replace(cache, cells=cells)
    return step.write_step(cache, attention, batch, spec, done.astype(jnp.float32))
