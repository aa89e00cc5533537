"""The device's side of a cache: its arrays, and the programs that take them and give them back."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvrt.arrays import Array, Bool, Float, array_bytes
from kvrt.attention.choice import choose
from kvrt.attention.choice.cases import cases_of
from kvrt.attention.choice.decide import AttentionChoice, among_processes
from kvrt.attention.contract import Decoder
from kvrt.cellcache.host_cells import Where
from kvrt.cells import Cells, lengthened
from kvrt.cells.slots import Places, one_sequence, pad
from kvrt.errors import BadConfig
from kvrt.exclusive import HeldInterrupts
from kvrt.options.cache import CacheConfig
from kvrt.program import decode_loop, sample, step
from kvrt.program.batch import Batch, bucket, prompt_batches
from kvrt.program.copies.block_copies import block_copies
from kvrt.program.decode_loop import LoopPlan, LoopSpec, Sampled, sampled_once
from kvrt.program.labels.arrays import check_labels, label_plan, n_labelled
from kvrt.program.labels.shift import shift
from kvrt.program.labels.upkeep import LabelUpkeep
from kvrt.program.layers.by_layer import Arrays, StepByLayer, call_traced
from kvrt.program.layout import Layout, mixes_rotations
from kvrt.program.mesh import Placement
from kvrt.program.programs import ModelKind, Program, Programs, TracedParams, reason_for_whole
from kvrt.program.rounds.layer_skip import n_drafting, round_program
from kvrt.program.rounds.round import Drafted, RoundSpec, RoundStep, Verified, round_step
from kvrt.program.rounds.round_by_layer import round_by_layer
from kvrt.program.sample import Sampler
from kvrt.program.step import Cache, StepSpec
from kvrt.store import kv as kv_store
from kvrt.store import recurrent, sharded
from kvrt.store.codec import AnyKVArray
from kvrt.store.recurrent import StateIndex
from kvrt.store.runs.channel_runs import has_runs


class Device:
    """The cache on the device; every method replaces `cache`, arrays of the one before are dead.

    `attention` says what computes attention and why; the config in `spec` has its name.
    """

    def __init__(
        self,
        model: Decoder,
        config: CacheConfig,
        layout: Layout,
        place: Placement | None = None,
    ):
        """Allocates the cache, on one device without a `place`; compiles what tests kernels."""
        self._place, self._shards = place, place.shards if place else None
        self.layout = place.layout(layout) if place else layout
        check_labels(self.layout, config)
        self.attention = self._choice(model, config)
        self.dispatch = dispatched(model, config, is_divided=place is not None)
        self.spec = spec = StepSpec(self.settled(config), self.layout, self._shards)
        self.programs = Programs(model, spec, place)
        self.by_layer = StepByLayer(self.programs) if spec.config.programs == "by_layer" else None
        # By what they compute and the shapes of it, programs in their order.
        self._compiled: dict[tuple, list[Callable]] = {}
        plan = label_plan(self.layout, config)
        self.labels = plan and LabelUpkeep(plan, self.layout.stores)
        self._extents = [s.extent for s in self.layout.stores]
        self.n_vocab: int = model.n_vocab
        self.cache = step.allocate(spec, place.create if place else lambda create: create())

    def _choice(self, model: Decoder, config: CacheConfig) -> AttentionChoice:
        """What computes attention here; the processes of a mesh find the same."""
        cases = functools.partial(cases_of, model, config, self.layout.stored, self._shards)
        agree = among_processes() if self._place else None
        return choose(config.attention, jax.default_backend(), cases, agree)

    @property
    def cache(self) -> Cache:
        """The arrays; dead after the next step."""
        return self._cache

    @cache.setter
    def cache(self, cache: Cache) -> None:
        is_scored = cache.nan_scores is not None
        self._cache = self.programs.nan_scores.taken_from(cache) if is_scored else cache

    def settled(self, config: CacheConfig) -> CacheConfig:
        """The config that this cache was made from, with what "auto" was found to be."""
        found = {"attention": self.attention.implementation, "programs": self.dispatch[0]}
        is_settled = all(getattr(config, name) == x for name, x in found.items())
        return config if is_settled else dataclasses.replace(config, **found)

    def free(self) -> None:
        """Releases the arrays; `n_bytes` stays as it was."""
        _ = self.n_bytes
        del self._cache

    @functools.cached_property
    def n_bytes(self) -> int:
        """Bytes of all keys, values, states and labels."""
        kept = self.cache.stores, self.cache.states, self.cache.labels
        return array_bytes(kept)

    # --- steps ---------------------------------------------------------------------------------

    def forward(self, batch: Batch, sampler: Sampler | None = None) -> tuple[Array, Array | None]:
        """Runs a batch, not waited for; its logits, and with a sampler a token of each output."""
        if self.labels:
            self._label(batch.places)
        if self.by_layer is None:
            program = self._of_step(forward, (), batch, sampler)
            logits, tokens, self.cache = self.programs.run(program)
            return logits, tokens
        return self.logits(self._rows(batch), sampler)

    def logits(self, rows: Array, sampler: Sampler | None = None) -> tuple[Array, Array | None]:
        """As `forward`, of the residual stream behind the last layer."""
        if rows.shape[0] == 0:
            return jnp.zeros((0, self.n_vocab), jnp.float32), None
        return self.programs.run(self._of_rows(head, (), rows, sampler))

    def _rows(self, batch: Batch) -> Array:
        """The residual stream behind the last layer, of tokens whose logits are wanted."""
        assert self.by_layer is not None
        return self.in_order((), batch, self.by_layer.rows)

    def in_order(self, what: tuple, args: Any, walk: Callable[[Arrays, Any], Any]) -> Any:
        """Runs programs that follow one another, when all of them are compiled.

        Args:
          what: tells walks apart whose `args` have equal shapes.
          args: of the walk; which programs it calls follows from their shapes and `what`.
          walk: calls programs by `Arrays.call`, also where that only begins them.

        Returns:
          What the walk gives.
        """
        key = *what, *[x.shape for x in jax.tree.leaves(args)]
        if key not in self._compiled:
            # All of them, before the first one runs.
            made = self.programs.compile_all(lambda begin: walk(Arrays(self.cache, begin), args))
            self._compiled[key] = made
        run = self.programs.run
        if self._place is None:
            following = iter(self._compiled[key])

            def run(program: Program) -> Any:
                return next(following)(*program.args)

        arrays = Arrays(self.cache, run)
        with HeldInterrupts():
            try:
                return walk(arrays, args)
            finally:
                self.cache = arrays.cache()

    def _of_rows(self, run: Callable, static: tuple, rows: Any, *args: Any) -> Program:
        """A program that takes parameters outside of layers and a stream, and whatever else."""
        static = self.programs.kind, *static
        return Program(run, static, (self.programs.rest, rows, *args), n_known=1)

    def _of_step(self, run: Callable, static: tuple, *args: Any) -> Program:
        """A program that takes parameters and the cache, and whatever else."""
        static, args = (self.programs.kind, *static), (self.programs.params, self.cache, *args)
        return Program(run, static, args, donate=(1,), n_known=2)

    def sampled(self, tokens: Array, source: np.ndarray) -> Array:
        """Of tokens that `forward` sampled those at `source`, as the input of the next batch."""
        return self.programs.run(Program(sampled, (), (tokens, source)))

    def read(self, tokens: Array) -> np.ndarray:
        """What `forward` sampled, when it is there."""
        return np.asarray(tokens)  # sync: the scheduler has to know who ends

    @property
    def skips_unwanted(self) -> bool:
        """Whether a step without logits leaves layers out, those that only read."""
        return self.layout.skips_unwanted and not self.is_divided

    @property
    def is_host(self) -> bool:
        """Whether programs run on the host's own processor."""
        return jax.default_backend() == "cpu"

    @property
    def is_divided(self) -> bool:
        """Whether a mesh divides the cache."""
        return self._place is not None

    def decode(self, plan: LoopPlan, sampler: Sampler, n_best: int) -> tuple[Sampled, Sampler]:
        """Runs a plan of decode steps; what it sampled, and the sampler after it."""
        if self.by_layer is not None and plan.shape[0] == 1:
            logits, _ = self.forward(decode_loop.batch_of(plan, 0, plan.tokens))
            return self.sample(logits, sampler, n_best)
        if self.labels:
            self._label(plan.places)
        wanted = self._of_step(decode_steps, (n_best,), plan, sampler)
        sampled, self.cache, sampler = self.programs.run(wanted)
        return sampled, sampler

    def verify(self, step: RoundStep, how: RoundSpec) -> Verified:
        """Runs a step with rounds of drafts; what was sampled."""
        if self.by_layer is None:
            wanted = round_program(self.programs, self.cache, step, how)
            verified, self.cache = self.programs.run(wanted)
            return verified
        walk = functools.partial(round_by_layer, self.by_layer, how)
        return self.in_order((how, n_drafting(step, how)), step, walk)

    def sample(self, logits: Array, sampler: Sampler, n_best: int) -> tuple[Sampled, Sampler]:
        """A token of each row of logits, and the sampler after it."""
        return self.programs.run(Program(sampled_once, (n_best,), (logits, sampler)))

    def best_tokens(
        self, logits: Array, rows: Sequence[int], n_best: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probabilities [n, K] of the most probable tokens; of equal ones by id."""
        size = bucket(len(rows), logits.shape[0])
        program = sample.best_tokens_program(logits, pad(rows, size, 0), n_best)
        ids, log_probs = self.programs.run(program)
        # sync: a search decides on the host which texts go on.
        return np.asarray(ids)[: len(rows)], np.asarray(log_probs)[: len(rows)]

    def _label(self, places: Sequence[Places]) -> None:
        """Labels what has none yet before a step of these reads it, and marks what it writes."""
        assert self.labels is not None
        if any(map(n_labelled, places)) and (program := self.labels.pending(self.cache)):
            self.cache = dataclasses.replace(self.cache, labels=self.programs.run(program))
        self.labels.mark_step(self.layout.store_of, places)

    # --- programs that will be needed ----------------------------------------------------------

    def begin_prompt(self, begin: Callable, n_tokens: int) -> None:
        """Begins the programs of a prompt of n_tokens, see `Programs.compile_all`."""
        batches = prompt_batches(
            n_tokens, self.spec.config.n_ubatch, self._nowhere, skips=self.skips_unwanted
        )
        for batch in batches:
            if self.by_layer is None:
                begin(self._of_step(forward, (), batch, None))
                continue
            rows = self.by_layer.rows(Arrays(self.cache, begin), batch)
            if rows.shape[0]:
                begin(self._of_rows(head, (), rows, None))

    def sample_program(self, sampler: Sampler, n_best: int) -> Program:
        """The program of `sample` for one sequence."""
        logits = jax.ShapeDtypeStruct((1, self.n_vocab), np.float32)
        return Program(sampled_once, (n_best,), (logits, sampler))

    def begin_decode(self, begin: Callable, loop: LoopSpec, sampler: Sampler) -> None:
        """Begins the programs of `decode` for one sequence, see `Programs.compile_all`."""
        plan = decode_loop.plan_run((0, 0), 0, self._nowhere(loop.stride), loop.stop_ids, 1)
        if self.by_layer is None or loop.stride > 1:
            begin(self._of_step(decode_steps, (loop.n_best,), plan, sampler))
            return
        batch = decode_loop.batch_of(plan, 0, plan.tokens)
        rows = self.by_layer.rows(Arrays(self.cache, begin), batch)
        begin(self._of_rows(head, (), rows, None))
        begin(self.sample_program(sampler, loop.n_best))

    def empty_round(self, size: int, stop_ids: Sequence[int], sampler: Sampler) -> RoundStep:
        """A round of `size` tokens as programs are compiled for, which is written nowhere."""
        drafted = Drafted(0, 0, sampler.recent.shape[1], (), stop_ids)
        step, where = one_sequence([0], 0, 0, size), self._nowhere(size)
        return round_step(step, where, [drafted], (1, size - 1), sampler)

    def begin_round(self, begin: Callable, step: RoundStep, how: RoundSpec) -> None:
        """Begins the programs of `verify`, see `Programs.compile_all`."""
        if self.by_layer is None:
            begin(round_program(self.programs, self.cache, step, how))
        else:
            round_by_layer(self.by_layer, how, Arrays(self.cache, begin), step)

    def _nowhere(self, size: int) -> Where:
        """Places of `size` tokens that are written nowhere and read nothing."""
        places = tuple(
            Places(
                slots=np.full(size, x.n_slots, np.int32),
                blocks=np.zeros(x.n_blocks, np.int32),
                n_blocks=np.asarray(0, np.int32),
            )
            for x in self._extents
        )
        unused = np.zeros(size, np.int32)
        states = StateIndex(src=unused, dst=unused) if self.layout.recurrent else None
        return places, states

    # --- cells, keys and values between steps --------------------------------------------------

    def upload(self, store: int, cells: Cells) -> None:
        """Replaces the device's cells of a store by the host's."""
        if self.labels:
            self.labels.mark_changed(store, np.asarray(cells.pos))
        held = list(self.cache.cells)
        # JAX reads host arrays after this call returned, and an engine changes its own in place.
        cells = jax.tree.map(np.array, lengthened(cells, self._extents[store].n_slots))
        held[store] = self._place.put(cells) if self._place else step.on_device(cells)
        self.cache = dataclasses.replace(self.cache, cells=tuple(held))

    def shift(self, moved: Sequence[Bool[np.ndarray, " N"]] = ()) -> None:
        """The K-shift: rotates keys whose cells have a delta, and clears it.

        Args:
          moved: by group, which blocks of its store hold its keys that moved; it is asked for
            where groups that rotate in different ways share a store.
        """
        by_block = tuple(moved) if mixes_rotations(self.layout) else ()
        static, args = (self.programs.kind,), (self.cache, by_block)
        self.cache = self.programs.run(Program(shift, static, args, donate=(0,), n_known=1))

    def scrub(self, released: Bool[np.ndarray, " R"]) -> None:
        """Zeroes keys and values of empty cells, and the states `released`."""
        static, args = (self.programs.kind,), (self.cache, released)
        self.cache = self.programs.run(Program(scrub, static, args, donate=(0,), n_known=1))

    def copy_kv(self, group: int, src: np.ndarray, dst: np.ndarray) -> None:
        """Copies keys and values of cells src to cells dst in every layer of a group."""
        if len(src) == 0:
            return
        if self.labels:
            self.labels.mark_slots(group, dst)
        if self._copied_by_block(group, src, dst):
            return
        n_slots = self._extents[group].n_slots
        n_most = -(-n_slots // kv_store.MOVE_CHUNK) * kv_store.MOVE_CHUNK
        moves = pad(src, n_most, n_slots), pad(dst, n_most, n_slots), np.asarray(len(src), np.int32)
        self._set_store(group, self._on_store(sharded.move_kv, group, *moves))

    def _copied_by_block(self, group: int, src: np.ndarray, dst: np.ndarray) -> bool:
        """Copies cells block by block where that is faster than one by one, and says whether."""
        store = self.cache.stores[group]
        if self._shards and not has_runs(store):
            return False
        found = block_copies(store, self._extents[group], src, dst)
        for operation, args in found or ():
            self._set_store(group, self._on_store(operation, group, *args))
        return found is not None

    def keep_runs(self, store: int, held: Bool[np.ndarray, " N"]) -> None:
        """Ends runs of keys by channel whose blocks nobody holds, where there are some."""
        if has_runs(self.cache.stores[store]):
            self._set_store(store, self._on_store(sharded.keep_runs, store, held))

    def copy_states(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Copies states src of the recurrent layers to states dst."""
        states, n = self.cache.states, self.layout.n_states
        if len(src) == 0 or states is None:
            return
        # All at once, for a state may be read that another copy writes.
        args = states, pad(src, n, n), pad(dst, n, n)
        copied = Program(recurrent.copy_states, (), args, donate=(0,))
        self._set_store(None, self.programs.run(copied))

    def take_state(self, index: int) -> recurrent.OneState:
        """A copy of one state of the recurrent layers."""
        args = self.cache.states, np.asarray(index, np.int32)
        return self.programs.run(Program(recurrent.take_one, (), args))

    def put_state(self, index: int, data: recurrent.OneState) -> None:
        """Writes what `take_state` gave."""
        args = self.cache.states, np.asarray(index, np.int32), data
        written = Program(recurrent.put_one, (), args, donate=(0,))
        self._set_store(None, self.programs.run(written))

    def take_kv(self, group: int, slots: np.ndarray) -> tuple[AnyKVArray, AnyKVArray]:
        """Copies of keys and values in `slots`, of every layer of a group."""
        taken = self._on_store(sharded.take_kv, group, slots, donate=False)
        if self._place:
            # sync: a piece is whole on every device, and all pieces would not fit on one.
            return jax.tree.map(np.asarray, taken)
        return taken

    def put_kv(self, group: int, slots: np.ndarray, k: AnyKVArray, v: AnyKVArray) -> None:
        """Writes keys and values of every layer of a group."""
        if self.labels:
            self.labels.mark_slots(group, slots)
        self._set_store(group, self._on_store(sharded.put_kv, group, slots, k, v))

    def wait(self) -> None:
        """Waits until everything that was asked is done."""
        jax.block_until_ready(self.cache)

    def take_blocks(self, store: int | None, ids: Sequence[int]) -> Array:
        """Copies of blocks of a store, or of states with None, as bytes; padded."""
        where = self._padded(store, ids)
        return self._on_store(sharded.take_blocks, store, where, donate=False)

    def put_blocks(self, store: int | None, ids: Sequence[int], data: np.ndarray) -> None:
        """Writes what `take_blocks` gave of so many blocks."""
        if self.labels:
            self.labels.mark(store, np.asarray(ids))
        where = self._padded(store, ids)
        full = np.zeros((len(where), data.shape[1]), np.uint8)
        full[: len(ids)] = data[: len(ids)]
        self._set_store(store, self._on_store(sharded.put_blocks, store, where, full))

    def _on_store(
        self, operation: Callable, store: int | None, *args: Any, donate: bool = True
    ) -> Any:
        """The result of an operation of `store.sharded` on a store, or on states with None."""
        held = self.cache.states if store is None else self.cache.stores[store]
        donated = (0,) if donate else ()
        return self.programs.run(Program(operation, (self._shards,), (held, *args), donated))

    def _set_store(self, store: int | None, new: Any) -> None:
        parts: dict[str, Any] = {"states": new}
        if store is not None:
            parts = {"stores": (*self.cache.stores[:store], new, *self.cache.stores[store + 1 :])}
        self.cache = dataclasses.replace(self.cache, **parts)

    def _padded(self, store: int | None, ids: Sequence[int]) -> np.ndarray:
        """Ids in one of a few sizes, so that few programs do for all."""
        none = self.layout.n_states if store is None else self._extents[store].n_blocks
        size = 1
        while size < len(ids):
            size *= 4
        return pad(ids, size, none)


def dispatched(model: Decoder, config: CacheConfig, *, is_divided: bool) -> tuple[str, str]:
    """How a step is dispatched, "whole" or "by_layer", and why.

    Raises:
      BadConfig: by layer was asked for, and the model does not tell its layers apart.
    """
    wanted, why = config.programs, reason_for_whole(model)
    if wanted == "by_layer" and why:
        raise BadConfig(f"programs='by_layer': {why}; use 'whole'")
    if wanted != "auto":
        return wanted, "as asked for"
    if why:
        return "whole", why
    if is_divided or jax.default_backend() != "cpu":
        return "whole", "a dispatch costs more than compiling here"
    return "by_layer", "a CPU compiles longer than it dispatches"


# --- programs ----------------------------------------------------------------------------------


def forward(
    kind: ModelKind, params: tuple, cache: Cache, batch: Batch, sampler: Sampler | None
) -> tuple[Array, Array | None, Cache]:
    """Logits of a batch, and with a sampler a token for each output."""
    logits, cache = whole_step(kind, params, cache, batch)
    return logits, sampler and sample.sample_tokens(logits, sampler)[0], cache


def whole_step(kind: ModelKind, params: tuple, cache: Cache, batch: Batch) -> tuple[Array, Cache]:
    """Logits of a batch."""
    if kind.has_runs:
        return _forward_by_kind(kind, params, cache, batch)
    return step.forward(kind.model(params), cache, batch, kind.spec)


def _forward_by_kind(
    kind: ModelKind, params: tuple, cache: Cache, batch: Batch
) -> tuple[Array, Cache]:
    """The functions of a step by layer as one program, in which equal ones are traced once."""
    traced, arrays = TracedParams(kind, params), Arrays(cache, call_traced)
    rows = StepByLayer(traced).rows(arrays, batch)
    model = kind.outer(traced.rest)
    if rows.shape[0] == 0:
        return jnp.zeros((0, model.n_vocab), jnp.float32), arrays.cache()
    return model.head(rows), arrays.cache()


def head(
    kind: ModelKind, rest: tuple, rows: Float[Array, "R E"], sampler: Sampler | None
) -> tuple[Float[Array, "R V"], Array | None]:
    """Logits of a stream, and with a sampler a token for each row."""
    logits = kind.outer(rest).head(rows)
    return logits, sampler and sample.sample_tokens(logits, sampler)[0]


def sampled(tokens: Array, source: Array) -> Array:
    """Sampled tokens as the input of another batch."""
    # Where no token could be sampled any one will do, for the sequence ends there.
    return jnp.maximum(tokens[source], 0)


def decode_steps(
    kind: ModelKind, n_best: int, params: tuple, cache: Cache, plan: LoopPlan, sampler: Sampler
) -> tuple[Sampled, Cache, Sampler]:
    """A run of steps."""
    run = functools.partial(whole_step, kind, params)
    return decode_loop.decode_many(run, cache, plan, sampler, n_best)


def scrub(kind: ModelKind, cache: Cache, released: Bool[Array, " R"]) -> Cache:
    """The cache with zeroes in its empty cells, and in the states `released`."""
    stores, layout = [], kind.spec.layout
    for of, store, cells in zip(layout.stores, cache.stores, cache.cells, strict=True):
        empty = (cells.pos < 0).reshape(of.extent.n_blocks, of.extent.block_size)
        stores.append(sharded.clear_kv(kind.spec.shards, store, empty))
    states = cache.states and recurrent.clear_states(cache.states, released)
    return dataclasses.replace(cache, stores=tuple(stores), states=states)
