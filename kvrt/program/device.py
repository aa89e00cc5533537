"""The runtime's device side: the cache, and the programs that take it and give it back."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx

from kvrt.arrays import Array, Bool
from kvrt.attention.registry import require
from kvrt.cells import Cells, lengthened
from kvrt.config import CacheConfig
from kvrt.program import decode_loop, sample, step
from kvrt.program.batch import Batch, Places, bucket, pad, padded
from kvrt.program.disk_hits import Progress
from kvrt.program.layout import Layout
from kvrt.program.mesh import Placement
from kvrt.program.programs import Programs, Wanted
from kvrt.program.sample import Sampler
from kvrt.runtime.generate import Request
from kvrt.store import kv as kv_store
from kvrt.store import recurrent
from kvrt.store.codec import AnyKVArray, KVArray
from kvrt.store.recurrent import StateIndex


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ahead:
    """What to compile beside a prompt's steps.

    Attributes:
      request: what is to be generated; None is nothing.
      progress: called with programs that are there, of how many, and how many of them came from
        JAX's persistent compilation cache.
    """

    request: Request | None = None
    progress: Progress | None = None


class Device:
    """Every method replaces `cache`; arrays of the one before are dead."""

    def __init__(
        self,
        model: nnx.Module,
        config: CacheConfig,
        layout: Layout,
        place: Placement | None = None,
    ):
        """Allocates the rows; compiles nothing. Without a `place` all is on one device."""
        require(config.attention, jax.default_backend())
        self._place = place
        layout = place.layout(layout) if place else layout
        self.programs = Programs(model, config, layout, place)
        self._extents = [s.extent for s in layout.stores]
        self._n_vocab: int = model.n_vocab  # pyright: ignore[reportAttributeAccessIssue]

        def create() -> step.Cache:
            cache = step.create(layout, config)
            # As many as rows, so that programs do not depend on how many may be used.
            both = zip(cache.cells, self._extents, strict=True)
            cells = tuple(lengthened(cells, size.n_slots) for cells, size in both)
            return dataclasses.replace(cache, cells=cells)

        self.cache = place.create(create) if place else create()

    @property
    def n_bytes(self) -> int:
        """Bytes of all rows and states."""
        states = self.cache.states
        return sum(map(kv_store.n_bytes, self.cache.stores)) + (
            recurrent.n_bytes(states) if states else 0
        )

    def upload(self, store: int, cells: Cells) -> None:
        """Replaces the device's cells of a store by the host's."""
        held = list(self.cache.cells)
        cells = lengthened(cells, self._extents[store].n_slots)
        held[store] = self._place.put(cells) if self._place else step.on_device(cells)
        self.cache = dataclasses.replace(self.cache, cells=tuple(held))

    def shift(self) -> None:
        """Rotates keys whose cells have a delta, and clears it."""
        self.cache = self.programs.shift(self.cache)

    def scrub(self, released: Bool[np.ndarray, " R"]) -> None:
        """Zeroes the rows of empty cells, and these rows of states."""
        self.cache = self.programs.scrub(self.cache, released)

    def copy_rows(self, group: int, src: np.ndarray, dst: np.ndarray) -> None:
        """Copies rows src to rows dst in every layer of a group."""
        if len(src) == 0:
            return
        size = self._extents[group]
        n_most = -(-size.n_slots // kv_store.MOVE_CHUNK) * kv_store.MOVE_CHUNK
        stores = list(self.cache.stores)
        stores[group] = self.programs.move(
            stores[group],
            pad(src, n_most, size.n_slots),
            pad(dst, n_most, size.n_slots),
            np.asarray(len(src), np.int32),
        )
        self.cache = dataclasses.replace(self.cache, stores=tuple(stores))

    def copy_states(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Copies rows src of the recurrent layers' states to rows dst."""
        states, n = self.cache.states, self.programs.layout.n_states
        if len(src) == 0 or states is None:
            return
        # All at once, for a row may be read that another copy writes.
        states = self.programs.copy_states(states, pad(src, n, n), pad(dst, n, n))
        self.cache = dataclasses.replace(self.cache, states=states)

    def take_kv(self, group: int, slots: np.ndarray) -> tuple[KVArray, KVArray]:
        """Copies of the rows `slots` of every layer of a group; K and V."""
        taken = self.programs.take(self.cache.stores[group], slots)
        if self._place:
            # sync: a piece is whole on every device, and all pieces would not fit on one.
            return jax.tree.map(np.asarray, taken)
        return taken

    def put_kv(self, group: int, slots: np.ndarray, k: AnyKVArray, v: AnyKVArray) -> None:
        """Writes rows of every layer of a group."""
        stores = list(self.cache.stores)
        stores[group] = self.programs.put(stores[group], slots, k, v)
        self.cache = dataclasses.replace(self.cache, stores=tuple(stores))

    def wait(self) -> None:
        """Waits until everything that was asked is done."""
        jax.block_until_ready(self.cache)

    def take_blocks(self, store: int | None, ids: Sequence[int]) -> Array:
        """Copies of blocks of a store, or of states with None, as bytes; padded."""
        return self.programs.take_blocks(self._blocks(store), self._padded(store, ids))

    def put_blocks(self, store: int | None, ids: Sequence[int], data: np.ndarray) -> None:
        """Writes what `take_blocks` gave of so many blocks."""
        where = self._padded(store, ids)
        full = np.zeros((len(where), data.shape[1]), np.uint8)
        full[: len(ids)] = data[: len(ids)]
        new = self.programs.put_blocks(self._blocks(store), where, full)
        if store is None:
            self.cache = dataclasses.replace(self.cache, states=new)
            return
        stores = list(self.cache.stores)
        stores[store] = new
        self.cache = dataclasses.replace(self.cache, stores=tuple(stores))

    def _blocks(self, store: int | None):
        return self.cache.states if store is None else self.cache.stores[store]

    def _padded(self, store: int | None, ids: Sequence[int]) -> np.ndarray:
        """Ids in one of a few sizes, so that few programs do for all."""
        none = self.programs.layout.n_states if store is None else self._extents[store].n_blocks
        size = 1
        while size < len(ids):
            size *= 4
        return pad(ids, size, none)

    def prepare(self, n_tokens: int, ahead: Ahead | None = None) -> None:
        """Compiles the steps of a prompt of n_tokens, and of what is ahead; runs none of them."""
        n_ubatch, none = self.programs.config.n_ubatch, np.zeros(0, np.int32)
        whole, rest = divmod(n_tokens, n_ubatch)
        sizes = {bucket(n, n_ubatch) for n in {min(whole, 1) * n_ubatch, rest} - {0}}
        ahead = ahead or Ahead()
        prompt = [
            self.programs.want_forward(
                self.cache, padded(none, none, none, [], self._nowhere(size), size)
            )
            for size in sorted(sizes, reverse=True)
        ]
        first, others = self._want_tokens(ahead.request) if ahead.request else ([], [])
        self.programs.compile_all([*prompt, *first], others, ahead.progress)

    def _want_tokens(self, request: Request) -> tuple[list[Wanted], list[Wanted]]:
        """The programs that `generate` runs for the first token, and for those that follow."""
        first, others, programs = [], [], self.programs
        sampler, n_first = sample.create(request.sampling, [[]]), 0 if request.after else 1
        if n_first and request.n_predict != 0:
            logits = jax.ShapeDtypeStruct((1, self._n_vocab), np.float32)
            first.append(programs.want_draw(logits, sampler, request.n_best))
        if request.n_predict is None or request.n_predict > n_first:
            plan = decode_loop.plan(0, 0, request, *self._nowhere(request.stride), 1)
            others.append(programs.want_decode(self.cache, plan, sampler, request.n_best))
        return first, others

    def _nowhere(self, size: int) -> tuple[list[Places], StateIndex | None]:
        """Places of `size` tokens that are written nowhere and read nothing."""
        places = [
            Places(
                slots=np.full(size, x.n_slots, np.int32),
                blocks=np.zeros(x.n_blocks, np.int32),
                n_blocks=np.asarray(0, np.int32),
            )
            for x in self._extents
        ]
        unused = np.zeros(size, np.int32)
        states = StateIndex(src=unused, dst=unused) if self.programs.layout.recurrent else None
        return places, states

    def forward(self, batch: Batch) -> Array:
        """Runs a batch; its logits."""
        logits, self.cache = self.programs.forward(self.cache, batch)
        return logits

    def serve(self, batch: Batch, sampler: Sampler) -> tuple[np.ndarray, Array]:
        """Runs a batch of many sequences; the tokens drawn from its outputs, and the logits."""
        tokens, logits, self.cache = self.programs.serve(self.cache, batch, sampler)
        return np.asarray(tokens), logits  # sync: the scheduler has to know who ends

    def decode(
        self, plan: decode_loop.LoopPlan, sampler: Sampler, n_best: int
    ) -> tuple[decode_loop.Sampled, Sampler]:
        """Runs a plan of decode steps; what it drew."""
        drawn, self.cache, sampler = self.programs.decode(self.cache, plan, sampler, n_best)
        return drawn, sampler
