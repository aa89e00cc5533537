"""The pure step: tokens in, logits out, the cache's keys, values and cells updated.

Nothing here is jitted: `programs.py` compiles it, and a user may call it inside a program of
their own, loops and context shifts included.
"""

import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.arrays import AnyArray, Array, Float, Int32, bytes_of, state
from kvrt.attention import view
from kvrt.attention.registry import check_chosen
from kvrt.attention.scored.step import ScoredStep, scored_step
from kvrt.attention.select import labels as label_arrays
from kvrt.attention.select.labels import LabelArray, LabelPlan, StoreLabels
from kvrt.attention.step_attention import StepAttention, step_attention
from kvrt.cells import Cells, owner_bits, place, vacate
from kvrt.cells import create as create_cells
from kvrt.errors import BadConfig
from kvrt.options.cache import CacheConfig
from kvrt.program.batch import Batch, Places
from kvrt.program.labels.arrays import label_plan, n_labelled
from kvrt.program.layout import Layout
from kvrt.sizes import StoreSpec
from kvrt.store import kv as kv_store
from kvrt.store import recurrent, sharded
from kvrt.store.kv import KVStore
from kvrt.store.shards import Shards

Result = TypeVar("Result")
# Steps whose counts are not read yet, so that none waits for the newest.
_N_PENDING = 64

# How XLA begins the message of a failed allocation.
_NO_MEMORY = "RESOURCE_EXHAUSTED"


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What a step is compiled for beside the shapes of its arguments; hashable, static in jit.

    Attributes:
      config: sizes, how keys are stored, and the implementation of attention, by its name:
        "auto" is chosen before, with a `Runtime` or an `Engine`.
      layout: which arrays each group of layers has.
      shards: the devices that divide the cache, None for one.
    """

    config: CacheConfig
    layout: Layout
    shards: Shards | None = None

    def __post_init__(self) -> None:
        """Refuses an implementation that nobody has chosen."""
        check_chosen(self.config.attention)


@state
class Cache:
    """Keys and values and what their cells mean, by store, on the device; recurrent states.

    `labels` lie beside keys where decode reads sparsely; they follow from the keys. `nan_scores`
    counts scores of a policy that were NaN, where layers keep tokens by score; while layers draft,
    by token as their states are.
    A runtime's has a cell for every slot: those from `Extent.n_cells` on are empty for ever.
    """

    stores: tuple[KVStore, ...]
    cells: tuple[Cells, ...]
    states: recurrent.StateStore | None = None
    labels: tuple[StoreLabels, ...] | None = None
    nan_scores: Int32[AnyArray, "..."] | None = None


class NanScores:
    """The count of scores that were NaN, of any size; any thread may read it."""

    def __init__(self) -> None:
        """Zero."""
        self._n, self._lock = 0, threading.Lock()
        self._pending: deque[AnyArray] = deque()

    @property
    def n(self) -> int:
        """Scores so far; waits for the steps that were counted."""
        return self.add(0)

    def add(self, n: int, *, n_pending: int = 0) -> int:
        """Adds n, and what steps have counted but for the newest `n_pending`; the sum."""
        with self._lock:
            self._n += n
            while len(self._pending) > n_pending:
                self._n += int(np.asarray(self._pending.popleft()))  # sync: mostly of an old step
            return self._n

    def taken_from(self, cache: Cache) -> Cache:
        """The cache with a count of zero, after what it has counted was noted."""
        if cache.nan_scores is None or isinstance(cache.nan_scores, np.ndarray):
            return cache
        self._pending.append(cache.nan_scores)
        self.add(0, n_pending=_N_PENDING)
        return dataclasses.replace(cache, nan_scores=np.zeros((), np.int32))


def allocate(spec: StepSpec, make: Callable[[Callable[[], Cache]], Cache]) -> Cache:
    """An empty cache with a cell for every slot, so that programs are those of other n_ctx.

    Args:
      spec: sizes of the cache.
      make: calls a function that makes arrays, where they are to lie.

    Raises:
      BadConfig: memory is lacking for it.
    """
    try:
        return make(lambda: _created(spec, [x.extent.n_slots for x in spec.layout.stores]))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and _NO_MEMORY not in str(error):
            raise
        n_bytes = bytes_of(lambda: [kv_store.create(s) for s in spec.layout.stores])
        raise BadConfig(
            f"keys and values of n_ctx = {spec.config.n_ctx} cells take {n_bytes / 1e9:.2f} GB, "
            "and memory has no room for them; lower n_ctx, or take KV dtypes of fewer bits"
        ) from error


def create(spec: StepSpec) -> Cache:
    """An empty cache: zeroed keys, values and states, empty cells."""
    return _created(spec, [x.extent.n_cells for x in spec.layout.stores])


def _created(spec: StepSpec, n_cells: Sequence[int]) -> Cache:
    """An empty cache of so many cells by store."""
    return Cache(
        **kept_arrays(spec.layout, spec.config),
        cells=tuple(on_device(create_cells(n, spec.config.n_seq_max)) for n in n_cells),
        nan_scores=jnp.zeros((), jnp.int32) if spec.layout.scored else None,
    )


def kept_arrays(layout: Layout, config: CacheConfig) -> dict[str, Any]:
    """What layers keep, zeroed, by the names of `Cache`: all but positions and owners."""
    plan = label_plan(layout, config)
    return {
        "stores": tuple(kv_store.create(s) for s in layout.stores),
        "states": recurrent.create(layout.recurrent, layout.n_states) if layout.recurrent else None,
        "labels": plan and plan.create(layout.stores),
    }


def forward(
    model: Any, cache: Cache, batch: Batch, spec: StepSpec
) -> tuple[Float[Array, "R V"], Cache]:
    """Runs a batch: attends to old cells and to itself, then writes.

    Args:
      model: a `kvrt.attention.Decoder`.
      cache: donated by jitted callers; no shift may be pending in the blocks that are read.
      batch: tokens and their slots.
      spec: of the cache.

    Returns:
      Logits of batch.out_ids, and the cache with the tokens' keys, values and cells.
    """
    return step(lambda tokens, attend: model(tokens, attend, batch.out_ids), cache, batch, spec)


def step(
    run: Callable[[Array, StepAttention], Result], cache: Cache, batch: Batch, spec: StepSpec
) -> tuple[Result, Cache]:
    """As `forward`, with any function in the model's place; only layers that it calls write."""
    cache = dataclasses.replace(cache, cells=vacated(cache.cells, batch, spec))
    attention = opened(cache, batch, spec)
    result = run(step_tokens(batch, spec), attention)
    cells = place_step(cache.cells, batch, spec, attention.kept)
    done = _last_of(result, attention)
    after = write_step(dataclasses.replace(cache, cells=cells), attention, batch, spec, done)
    return result, after


def in_place(
    run: Callable[[Array, StepAttention], Result], cache: Cache, batch: Batch, spec: StepSpec
) -> tuple[Result, Cache]:
    """As `step`, of tokens whose old entries are in its slots, and are seen by none."""
    cells = emptied(cache.cells, batch, spec)
    return step(run, dataclasses.replace(cache, cells=cells), batch, spec)


def step_tokens(batch: Batch, spec: StepSpec) -> Int32[Array, " T"]:
    """The tokens of a batch, whole on each device of a mesh."""
    tokens = jnp.asarray(batch.tokens)
    return spec.shards.constrain(tokens, None) if spec.shards else tokens


def vacated(cells: Sequence[Cells], batch: Batch, spec: StepSpec) -> tuple[Cells, ...]:
    """Cells without what blocks held that are given to a sequence anew."""
    layout, found = spec.layout, list(cells)
    for i, places in zip(layout.store_of, batch.places, strict=True):
        if places.fresh is not None:
            found[i] = vacate(found[i], places.fresh, layout.stores[i].extent.block_size)
    return tuple(found)


def emptied(cells: Sequence[Cells], batch: Batch, spec: StepSpec) -> tuple[Cells, ...]:
    """Cells without what is in the slots of a batch."""
    found = list(cells)
    for i, places in zip(spec.layout.store_of, batch.places, strict=True):
        found[i] = vacate(found[i], jnp.asarray(places.slots), 1)
    return tuple(found)


def place_step(
    cells: Sequence[Cells], batch: Batch, spec: StepSpec, kept: Callable | None = None
) -> tuple[Cells, ...]:
    """Cells with the tokens of a step; `kept` as in `StepAttention`."""
    found = list(cells)
    for i, places in zip(spec.layout.store_of, batch.places, strict=True):
        slots = places.slots if kept is None else kept(places.slots)
        found[i] = place(found[i], slots, batch.pos, batch.seq_ids)
    return tuple(found)


def opened(cache: Cache, batch: Batch, spec: StepSpec) -> StepAttention:
    """What the layers of a layout call in a step, over cells as they were before it."""
    layout, shards = spec.layout, spec.shards
    groups = list(zip(layout.store_of, layout.buffers, batch.places, strict=True))
    views = [_views(layout.stores[i], cache.cells[i], batch, places) for i, _, places in groups]
    if shards:
        views = [[view.shard_view(shards, x) for x in of_group] for of_group in views]
    tables = cache.states.tables if cache.states else ()
    held = dict(zip(_state_layers(layout), tables, strict=True))
    parts = [kv_store.part(cache.stores[i], buffers) for i, buffers, _ in groups]
    attention = step_attention(parts, views, layout.groups, spec.config, held, batch.states)
    plan = _label_plan(spec)
    if plan is not None:
        attention.read_sparsely(_by_layer(plan, cache.labels or ()), plan.select)
    if layout.scored:
        attention = scored_step(attention, layout.scored, batch.pos, spec.config)
    return attention


def write_step(
    cache: Cache,
    attention: StepAttention,
    batch: Batch,
    spec: StepSpec,
    done: Float[Array, "..."],
) -> Cache:
    """The cache with keys, values and states of the layers that ran.

    Args:
      cache: whose cells have the tokens of the step already.
      attention: what the layers called, over the cells before it.
      batch: the step's tokens.
      spec: of the cache.
      done: a result of the step, which is written after it.
    """
    layout, shards, stores = spec.layout, spec.shards, list(cache.stores)
    groups = zip(layout.groups, layout.store_of, layout.buffers, batch.places, strict=True)
    for group, i, buffers, places in groups:
        slots = places.slots if attention.kept is None else attention.kept(places.slots)
        ran = [x for x in group.layers if x in attention.k_new]
        mine = [b for b, x in zip(buffers, group.layers, strict=True) if x in ran]
        if ran:
            new = ([of[x] for x in ran] for of in (attention.k_new, attention.v_new))
            write = functools.partial(sharded.write_kv, shards) if shards else kv_store.write_kv
            part = write(kv_store.part(stores[i], mine), kv_store.order_after(done, slots), *new)
            stores[i] = kv_store.with_part(stores[i], mine, part)
    advanced = tuple(attention.states[i] for i in _state_layers(layout))
    states = cache.states and recurrent.StateStore(tables=advanced)
    after = dataclasses.replace(cache, stores=tuple(stores), states=states)
    if isinstance(attention, ScoredStep):
        counted, n_nan = jnp.asarray(cache.nan_scores), attention.n_nan_scores
        if counted.ndim and batch.states is not None:
            counted = counted.at[jnp.asarray(batch.states.dst)].add(n_nan, mode="drop")
        else:
            counted += jnp.sum(n_nan)
        after = dataclasses.replace(after, nan_scores=counted)
    plan = _label_plan(spec)
    return after if plan is None else _labelled(plan, after, batch, spec)


def _label_plan(spec: StepSpec) -> LabelPlan | None:
    """Which arrays have labels; a step without any enters nothing of theirs."""
    return label_plan(spec.layout, spec.config) if spec.config.select else None


def _state_layers(layout: Layout) -> tuple[int, ...]:
    # As `Layout.recurrent_layers`, without entering another file while a step is traced.
    return layout.recurrent.layers if layout.recurrent else ()


def _labelled(plan: LabelPlan, cache: Cache, batch: Batch, spec: StepSpec) -> Cache:
    """The cache with labels of what tokens wrote that are the only ones of their sequence."""
    labels = list(cache.labels or ())
    for i, places in zip(spec.layout.store_of, batch.places, strict=True):
        if n := n_labelled(places):
            at = plan, i, labels[i], cache.stores[i], cache.cells[i].pos
            labels[i] = label_arrays.after_write(*at, jnp.asarray(places.slots)[:n])
    return dataclasses.replace(cache, labels=tuple(labels))


def _by_layer(plan: LabelPlan, labels: Sequence[StoreLabels]) -> dict[int, LabelArray]:
    """Labels by the layer whose keys they are beside."""
    pairs = zip(plan.layers, labels, strict=True)
    found = [xy for ids, of_store in pairs for xy in zip(ids, of_store, strict=True)]
    return {i: x for i, x in found if i is not None and x is not None}


def _views(spec: StoreSpec, cells: Cells, batch: Batch, places: Places) -> list[view.AnyView]:
    """What the tokens see of a store: those with block lists of their own first."""
    blocked = view.blocked(cells.pos, cells.seqs, spec.extent.n_blocks, spec.extent.block_size)
    held: dict[str, Any] = dict(zip(("cell_pos", "cell_seqs"), blocked, strict=True))
    pos, bits = jnp.asarray(batch.pos), owner_bits(cells, batch.seq_ids)
    found, n = [], 0
    if places.seq_blocks is not None:
        n = places.seq_blocks.tables.shape[0]
        found.append(
            view.SeqView(
                pos=pos[:n],
                bits=bits[:n],
                blocks=places.seq_blocks.tables,
                n_blocks=places.seq_blocks.n_blocks,
                shared=places.seq_blocks.shared,
                **held,
            )
        )
    if n < pos.shape[0]:
        found.append(
            view.BlockView(
                pos=pos[n:],
                bits=bits[n:],
                blocks=places.blocks,
                n_blocks=places.n_blocks,
                **held,
            )
        )
    return found


def _last_of(result: Any, attention: StepAttention) -> Array:
    """What is known last of a step: logits, or where none are wanted the keys of its last layer."""
    found = jax.tree.leaves(result)[0]
    return found if found.size else attention.k_new[max(attention.k_new)].astype(jnp.float32)


def on_device(cells: Cells) -> Cells:
    """A copy of host cells on the default device."""
    # np.array copies: donating an alias would let a step write into the host's cells. Unlike
    # jnp.array, device_put compiles nothing.
    return jax.device_put(jax.tree.map(np.array, cells))
