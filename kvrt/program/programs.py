"""Compiled programs of one model and one cache, made on first use, counted and timed.

Compiling ahead of the call keeps compile time apart from run time, and makes a silent recompile
impossible: a compiled program refuses other shapes.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import xxhash
from flax import nnx

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32
from kvrt.cells import Cells
from kvrt.config import CacheConfig
from kvrt.errors import BadConfig
from kvrt.program import decode_loop, sample
from kvrt.program.batch import Batch
from kvrt.program.disk_hits import DiskHits, Progress
from kvrt.program.layout import Layout
from kvrt.program.mesh import Placement
from kvrt.program.step import Cache, forward
from kvrt.program.weights import param_shardings
from kvrt.sizes import StoreSpec
from kvrt.store import kv as kv_store
from kvrt.store import recurrent, sharded
from kvrt.store.codec import AnyKVArray, KVArray
from kvrt.upkeep import shift
from kvrt.upkeep.sharded import apply_shift


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A program to compile.

    Attributes:
      key: its kind and what its shapes follow from.
      run: what it computes.
      donate: arguments that it may overwrite, by number.
      args: arguments; where nothing is computed yet, shapes in their place will do.
    """

    key: tuple
    run: Callable
    donate: tuple[int, ...]
    args: tuple[Any, ...]


class Programs:
    """Programs by kind and bucket.

    `n_compiles` of them were compiled so far, of which `n_from_disk` came from JAX's persistent
    compilation cache; callers waited `compile_s` for them.
    """

    def __init__(
        self,
        model: nnx.Module,
        config: CacheConfig,
        layout: Layout,
        place: Placement | None = None,
    ):
        """Splits the model into its graph and its parameters; compiles nothing yet."""
        self.config, self._place = config, place
        self._shards = place.shards if place else None
        self._graph, params = nnx.split(model)
        self._tree = jax.tree.structure(params)
        # A flat tuple: flattening nnx's nested state anew would cost every step a millisecond.
        self._shardings = param_shardings(model, params, place.shards.mesh) if place else ()
        self.params = self._placed(params)
        self.layout = layout
        self._compiled: dict[tuple, jax.stages.Compiled] = {}
        self._pending: dict[tuple, Future[tuple[jax.stages.Compiled, int]]] = {}
        self.compile_s, self.n_from_disk = 0.0, 0
        self._digest = ""

    @property
    def n_compiles(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def compiled(self) -> dict[tuple, jax.stages.Compiled]:
        """The programs by kind and shape, for whoever inspects memory or cost."""
        return dict(self._compiled)

    def temp_bytes(self, kind: str) -> int:
        """The most memory that a compiled program of this kind takes beside its arguments."""
        found = [p.memory_analysis() for key, p in self._compiled.items() if key[0] == kind]
        return max((a.temp_size_in_bytes for a in found if a is not None), default=0)

    def bind(self, model: nnx.Module) -> None:
        """Takes the parameters of a model of the same structure; compiled programs stay.

        Raises:
          BadConfig: it is another model.
        """
        params = nnx.split(model)[1]
        leaves, tree = jax.tree.flatten(params)
        shapes = [(x.shape, x.dtype) for x in leaves]
        if tree != self._tree or shapes != [(x.shape, x.dtype) for x in self.params]:
            raise BadConfig("the model to bind has other parameters; make a new Runtime for it")
        self.params, self._digest = self._placed(params), ""

    @property
    def weights_digest(self) -> str:
        """xxh3-128 of all parameters, hexadecimal: their order, shapes, types and bytes.

        Raises:
          BadConfig: there are only shapes so far.
        """
        if not self._digest:
            hashed = xxhash.xxh3_128()
            for x in self.params:
                if not isinstance(x, AnyArray):
                    raise BadConfig("the model has only shapes yet; bind its weights first")
                hashed.update(f"{x.dtype}{x.shape}".encode())
                # sync: once a model, and no copy where the host is the device.
                flat = np.ascontiguousarray(self._fetched(x)).reshape(-1)
                hashed.update(flat.view(np.uint8).data)
            self._digest = hashed.hexdigest()
        return self._digest

    def compile_all(
        self, now: Sequence[Wanted], later: Sequence[Wanted], progress: Progress | None = None
    ) -> None:
        """Compiles programs, those for `later` in the background; what calls one waits for it.

        Tracing holds the interpreter and compiling does not, so each is traced while those before
        it are compiled. They follow one another: side by side the first would be late.

        Args:
          now: programs that are there on return.
          later: programs that may come after it.
          progress: called at the beginning and after each of `now`, in this thread.
        """
        awaited = [x.key for x in now if x.key not in self._compiled]
        new = [x for x in (*now, *later) if x.key not in {*self._compiled, *self._pending}]
        start = time.perf_counter()
        if progress:
            progress(0, len(awaited), 0)
        worker = ThreadPoolExecutor(1)
        for x in new:
            self._pending[x.key] = worker.submit(_compiled, self._lowered(x))
        worker.shutdown(wait=False)
        for n, key in enumerate(awaited, 1):
            self._take(key)
            if progress:
                progress(n, len(awaited), self.n_from_disk)
        self.compile_s += time.perf_counter() - start

    def forward(self, cache: Cache, batch: Batch) -> tuple[Array, Cache]:
        """`step.forward`; donates the cache."""
        return self._program(self.want_forward(cache, batch))(self.params, cache, batch)

    def want_forward(self, cache: Cache, batch: Batch) -> Wanted:
        """The program for a batch of this shape; shapes in place of parameters will do."""
        sides = self.config, self.layout, self._shards

        def run(params: tuple, cache: Cache, batch: Batch):
            return forward(self._model(params), cache, batch, *sides)

        key = ("forward", batch.tokens.shape[0], batch.out_ids.shape[0])
        return Wanted(key, run, (1,), (self.params, cache, batch))

    def decode(
        self, cache: Cache, plan: decode_loop.LoopPlan, sampler: sample.Sampler, n_best: int
    ) -> tuple[decode_loop.Sampled, Cache, sample.Sampler]:
        """`loop.decode_many`; donates the cache."""
        return self._run(self.want_decode(cache, plan, sampler, n_best))

    def want_decode(
        self, cache: Cache, plan: decode_loop.LoopPlan, sampler: sample.Sampler, n_best: int
    ) -> Wanted:
        """The program of `decode` for these shapes."""

        def run(params: tuple, cache: Cache, plan: decode_loop.LoopPlan, sampler: sample.Sampler):
            model, sides = self._model(params), (self.config, self.layout, n_best, self._shards)
            return decode_loop.decode_many(model, cache, plan, sampler, *sides)

        key = ("decode", *plan.shape, sampler.recent.shape[1], n_best)
        key += plan.stop_ids.shape
        return Wanted(key, run, (1,), (self.params, cache, plan, sampler))

    def serve(
        self, cache: Cache, batch: Batch, sampler: sample.Sampler
    ) -> tuple[Int32[Array, " R"], Float[Array, "R V"], Cache]:
        """A token drawn from each output of a batch, and the logits; donates the cache."""

        def run(params: tuple, cache: Cache, batch: Batch, sampler: sample.Sampler):
            sides = self.config, self.layout, self._shards
            logits, cache = forward(self._model(params), cache, batch, *sides)
            tokens, _ = sample.sample_tokens(logits, sampler)
            return tokens, logits, cache

        key = ("serve", batch.tokens.shape[0], *sampler.recent.shape)
        return self._get(key, run, (1,), self.params, cache, batch, sampler)

    def copy_states(
        self, states: recurrent.StateStore, src: Int32[AnyArray, " M"], dst: Int32[AnyArray, " M"]
    ) -> recurrent.StateStore:
        """`recurrent.copy`; donates the states."""
        return self._get(("copy_states", src.shape[0]), recurrent.copy, (0,), states, src, dst)

    def draw(self, logits: Array, sampler: sample.Sampler, n_best: int) -> tuple:
        """The first token after a prefill, and its log-probabilities."""
        return self._run(self.want_draw(logits, sampler, n_best))

    def want_draw(self, logits: Any, sampler: sample.Sampler, n_best: int) -> Wanted:
        """The program of `draw` for these shapes."""

        def run(logits: Array, sampler: sample.Sampler):
            tokens, sampler = sample.sample_tokens(logits, sampler)
            return tokens, sampler, *sample.log_probs(logits, n_best)

        key = ("draw", *logits.shape, sampler.recent.shape[1], n_best)
        return Wanted(key, run, (), (logits, sampler))

    def shift(self, cache: Cache) -> Cache:
        """The K-shift of all cells with a pending delta; donates the cache."""
        layout, n_ctx, turns = self.layout, self.config.n_ctx, self.config.hadamard

        def run(cache: Cache) -> Cache:
            stores = []
            for i, (store, cells) in enumerate(zip(cache.stores, cache.cells, strict=True)):
                size = layout.stores[i].extent
                plan = shift.plan_shift(cells, size.n_blocks, size.block_size)
                owner = layout.owner(i)
                stores.append(apply_shift(self._shards, store, plan, owner, n_ctx, turns))
            settled = tuple(shift.settle(cells) for cells in cache.cells)
            return dataclasses.replace(cache, stores=tuple(stores), cells=settled)

        return self._get(("shift",), run, (0,), cache)

    def scrub(self, cache: Cache, released: Bool[np.ndarray, " R"]) -> Cache:
        """Zeroes all rows that belong to no used cell, and `released` states; donates the cache."""
        specs = self.layout.stores

        def cleared(spec: StoreSpec, store: kv_store.KVStore, cells: Cells) -> kv_store.KVStore:
            size = spec.extent
            released = (cells.pos < 0).reshape(size.n_blocks, size.block_size)
            return sharded.clear_kv(self._shards, store, released)

        def run(cache: Cache, released: Bool[Array, " R"]) -> Cache:
            stores = map(cleared, specs, cache.stores, cache.cells)
            states = cache.states and recurrent.clear(cache.states, released)
            return dataclasses.replace(cache, stores=tuple(stores), states=states)

        return self._get(("scrub",), run, (0,), cache, released)

    def move(
        self,
        store: kv_store.KVStore,
        src: Int32[AnyArray, " M"],
        dst: Int32[AnyArray, " M"],
        n_moves: Int32[AnyArray, ""],
    ) -> kv_store.KVStore:
        """`kv.move_kv`; donates the store."""
        key = _rows_key("move", src, store)
        return self._get(key, self._on(sharded.move_kv), (0,), store, src, dst, n_moves)

    def take_blocks(self, store: Any, ids: Int32[np.ndarray, " M"]) -> Array:
        """`blocks.take_blocks` of a store or of states."""
        key = _rows_key("take_blocks", ids, store)
        return self._get(key, self._on(sharded.take_blocks), (), store, ids)

    def put_blocks(self, store: Any, ids: Int32[np.ndarray, " M"], data: AnyArray) -> Any:
        """`blocks.put_blocks` of a store or of states; donates it."""
        key = _rows_key("put_blocks", ids, store)
        return self._get(key, self._on(sharded.put_blocks), (0,), store, ids, data)

    def take(
        self, store: kv_store.KVStore, slots: Int32[np.ndarray, " T"]
    ) -> tuple[KVArray, KVArray]:
        """`kv.take_kv`."""
        key = _rows_key("take", slots, store)
        return self._get(key, self._on(sharded.take_kv), (), store, slots)

    def put(
        self,
        store: kv_store.KVStore,
        slots: Int32[np.ndarray, " T"],
        k: AnyKVArray,
        v: AnyKVArray,
    ) -> kv_store.KVStore:
        """`kv.put_kv`; donates the store."""
        key = _rows_key("put", slots, store)
        return self._get(key, self._on(sharded.put_kv), (0,), store, slots, k, v)

    def _model(self, params: tuple) -> Any:
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, params))

    def _placed(self, params: Any) -> tuple[Any, ...]:
        if self._place is None:
            return tuple(jax.tree.leaves(params))
        return self._place.weights(params, self._shardings)

    def _fetched(self, x: AnyArray) -> np.ndarray:
        return self._place.fetch(x) if self._place else np.asarray(x)

    def _on(self, operation: Callable) -> Callable:
        """An operation of `store.sharded` on this cache's devices."""
        return functools.partial(operation, self._shards)

    def _get(self, key: tuple, run: Callable, donate: tuple[int, ...], *args: Any) -> Any:
        return self._run(Wanted(key, run, donate, args))

    def _run(self, wanted: Wanted) -> Any:
        if self._place:
            wanted = dataclasses.replace(wanted, args=self._place.inputs(wanted.args))
        return self._program(wanted)(*wanted.args)

    def _program(self, wanted: Wanted) -> jax.stages.Compiled:
        program = self._compiled.get(wanted.key)
        if program is None:
            self.compile_all([wanted], [])
            program = self._compiled[wanted.key]
        return program

    def _take(self, key: tuple) -> None:
        """Waits for a program on its way."""
        program, n_from_disk = self._pending[key].result()
        self._compiled[key] = program
        self.n_from_disk += n_from_disk
        del self._pending[key]

    def _lowered(self, wanted: Wanted) -> jax.stages.Lowered:
        run, donate, place = wanted.run, wanted.donate, self._place
        jitted = place.jit(run, donate, wanted.args) if place else None
        return (jitted or jax.jit(run, donate_argnums=donate)).lower(*wanted.args)


def _compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, int]:
    """A program, and 1 if it came from the disk."""
    with DiskHits() as hits:
        return lowered.compile(), hits.n


def _rows_key(kind: str, slots: AnyArray, store: Any) -> tuple:
    """Of a program that a store, or states, and so many slots are given to."""
    return (kind, slots.shape[0], *((x.shape, x.dtype.name) for x in jax.tree.leaves(store)))
