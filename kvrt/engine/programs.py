"""Compiled programs of one model and one cache, made on first use, counted and timed.

Compiling ahead of the call keeps compile time apart from run time, and makes a silent recompile
impossible: a compiled program refuses other shapes.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import xxhash
from flax import nnx

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32
from kvrt.cells import Cells
from kvrt.config import CacheConfig
from kvrt.engine import loop, sample
from kvrt.engine.batch import Batch
from kvrt.engine.layout import Layout
from kvrt.engine.mesh import Placement
from kvrt.engine.step import Cache, forward
from kvrt.errors import BadConfig
from kvrt.extent import StoreSpec
from kvrt.store import recurrent, sharded
from kvrt.store import store as rows
from kvrt.store.codec import AnyRows, Rows
from kvrt.upkeep import shift
from kvrt.upkeep.sharded import apply_shift


class Programs:
    """Programs by kind and bucket; `n_compiles` and `compile_s` say what they cost."""

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
        self.params = self._placed(params)
        self.layout = layout
        self._compiled: dict[tuple, jax.stages.Compiled] = {}
        self.compile_s = 0.0
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

    def forward(self, cache: Cache, batch: Batch) -> tuple[Array, Cache]:
        """`step.forward`; donates the cache."""
        return self.compile_forward(cache, batch)(self.params, cache, batch)

    def compile_forward(self, cache: Cache, batch: Batch) -> jax.stages.Compiled:
        """The program for a batch of this shape; shapes in place of parameters will do."""
        sides = self.config, self.layout, self._shards

        def run(params: tuple, cache: Cache, batch: Batch):
            return forward(self._model(params), cache, batch, *sides)

        key = ("forward", batch.tokens.shape[0], batch.out_ids.shape[0])
        return self._program(key, run, (1,), self.params, cache, batch)

    def decode(
        self, cache: Cache, plan: loop.LoopPlan, sampler: sample.Sampler, n_best: int
    ) -> tuple[loop.Drawn, Cache, sample.Sampler]:
        """`loop.decode_many`; donates the cache."""

        def run(params: tuple, cache: Cache, plan: loop.LoopPlan, sampler: sample.Sampler):
            model, sides = self._model(params), (self.config, self.layout, n_best, self._shards)
            return loop.decode_many(model, cache, plan, sampler, *sides)

        key = ("decode", *plan.shape, sampler.recent.shape[1], n_best)
        key += plan.stop_ids.shape
        return self._get(key, run, (1,), self.params, cache, plan, sampler)

    def serve(
        self, cache: Cache, batch: Batch, sampler: sample.Sampler
    ) -> tuple[Int32[Array, " R"], Float[Array, "R V"], Cache]:
        """A token drawn from each output of a batch, and the logits; donates the cache."""

        def run(params: tuple, cache: Cache, batch: Batch, sampler: sample.Sampler):
            sides = self.config, self.layout, self._shards
            logits, cache = forward(self._model(params), cache, batch, *sides)
            tokens, _ = sample.draw(logits, sampler)
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

        def run(logits: Array, sampler: sample.Sampler):
            tokens, sampler = sample.draw(logits, sampler)
            return tokens, sampler, *sample.log_probs(logits, n_best)

        key = ("draw", *logits.shape, sampler.recent.shape[1], n_best)
        return self._get(key, run, (), logits, sampler)

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

        def cleared(spec: StoreSpec, store: rows.KVStore, cells: Cells) -> rows.KVStore:
            size = spec.extent
            released = (cells.pos < 0).reshape(size.n_blocks, size.block_size)
            return sharded.clear_rows(self._shards, store, released)

        def run(cache: Cache, released: Bool[Array, " R"]) -> Cache:
            stores = map(cleared, specs, cache.stores, cache.cells)
            states = cache.states and recurrent.clear(cache.states, released)
            return dataclasses.replace(cache, stores=tuple(stores), states=states)

        return self._get(("scrub",), run, (0,), cache, released)

    def move(
        self,
        store: rows.KVStore,
        src: Int32[AnyArray, " M"],
        dst: Int32[AnyArray, " M"],
        n_moves: Int32[AnyArray, ""],
    ) -> rows.KVStore:
        """`store.move_rows`; donates the store."""
        key = _rows_key("move", src, store)
        return self._get(key, self._on(sharded.move_rows), (0,), store, src, dst, n_moves)

    def take_blocks(self, store: Any, ids: Int32[np.ndarray, " M"]) -> Array:
        """`blocks.take_blocks` of a store or of states."""
        key = _rows_key("take_blocks", ids, store)
        return self._get(key, self._on(sharded.take_blocks), (), store, ids)

    def put_blocks(self, store: Any, ids: Int32[np.ndarray, " M"], data: AnyArray) -> Any:
        """`blocks.put_blocks` of a store or of states; donates it."""
        key = _rows_key("put_blocks", ids, store)
        return self._get(key, self._on(sharded.put_blocks), (0,), store, ids, data)

    def take(self, store: rows.KVStore, slots: Int32[np.ndarray, " T"]) -> tuple[Rows, Rows]:
        """`store.take_rows`."""
        key = _rows_key("take", slots, store)
        return self._get(key, self._on(sharded.take_rows), (), store, slots)

    def put(
        self,
        store: rows.KVStore,
        slots: Int32[np.ndarray, " T"],
        k: AnyRows,
        v: AnyRows,
    ) -> rows.KVStore:
        """`store.put_rows`; donates the store."""
        key = _rows_key("put", slots, store)
        return self._get(key, self._on(sharded.put_rows), (0,), store, slots, k, v)

    def _model(self, params: tuple) -> Any:
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, params))

    def _placed(self, params: Any) -> tuple[Any, ...]:
        return self._place.weights(params) if self._place else tuple(jax.tree.leaves(params))

    def _fetched(self, x: AnyArray) -> np.ndarray:
        return self._place.fetch(x) if self._place else np.asarray(x)

    def _on(self, operation: Callable) -> Callable:
        """An operation of `store.sharded` on this cache's devices."""
        return functools.partial(operation, self._shards)

    def _get(self, key: tuple, run: Callable, donate: tuple[int, ...], *args: Any) -> Any:
        if self._place:
            args = self._place.inputs(args)
        return self._program(key, run, donate, *args)(*args)

    def _program(
        self, key: tuple, run: Callable, donate: tuple[int, ...], *args: Any
    ) -> jax.stages.Compiled:
        program = self._compiled.get(key)
        if program is None:
            start = time.perf_counter()
            place = self._place
            jitted = place.jit(run, donate, args) if place else jax.jit(run, donate_argnums=donate)
            program = jitted.lower(*args).compile()
            self._compiled[key] = program
            self.compile_s += time.perf_counter() - start
        return program


def _rows_key(kind: str, slots: AnyArray, store: Any) -> tuple:
    """Of a program that a store, or states, and so many slots are given to."""
    return (kind, slots.shape[0], *((x.shape, x.dtype.name) for x in jax.tree.leaves(store)))
