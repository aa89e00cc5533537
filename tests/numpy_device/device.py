"""A device in NumPy, for tests of what the host decides: nothing is compiled.

It holds the arrays of a `Device` and runs the same toys on them, so logits and texts depend on
every slot, row, mask, position, state and draw that the host has decided; and it asserts what a
device cannot: no token reads a block twice, no two are written to one slot.
"""

import contextlib
import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvrt.attention.choice.decide import AttentionChoice
from kvrt.cells import create as create_cells
from kvrt.cells import lengthened
from kvrt.program.batch import Batch
from kvrt.program.decode_loop import Sampled
from kvrt.program.device import Device
from kvrt.program.layout import rotated_buffers
from kvrt.program.programs import Programs
from kvrt.program.rounds.round import NO_DRAFT, Verified
from kvrt.program.sample import NO_TOKEN
from kvrt.program.step import Cache, StepSpec
from kvrt.store.kv import MOVE_CHUNK, KVStore
from kvrt.store.recurrent import StateStore
from tests.numpy_device import attend
from tests.numpy_device.sampling import log_probs, sample_tokens

_TYPES = {"f32": np.float32, "f16": np.float16}


@contextlib.contextmanager
def installed(make=None):
    """Runtimes and engines that are made meanwhile have devices in NumPy, where it can hold them.

    A toy says `takes_numpy`; one without, and more than plain layers and types, is compiled. It is
    a decorator as well.
    """
    homes = ("kvrt.cache.cell_cache.Device", "kvrt.serving.cache.opening.Device")
    with contextlib.ExitStack() as stack:
        for home in homes:
            stack.enter_context(mock.patch(home, make or _made))
        yield


# For a test of a module with NumPy devices that looks at what is compiled.
compiled = functools.partial(installed, Device)


def _made(model, config, layout, place=None):
    special = place or layout.scored or config.select or config.hadamard
    special = special or any(g.latent_rank or g.indexed or g.temperature for g in layout.groups)
    plain = {x for s in layout.stores for x in (s.type_k, s.type_v)} <= {*_TYPES}
    if special or not plain or not getattr(model, "takes_numpy", False):
        return Device(model, config, layout, place)
    return NumpyDevice(model, config, layout)


class NumpyDevice(Device):
    """A `Device` by name alone: every method that the host calls is here."""

    cache = labels = by_layer = None
    is_host, is_divided, skips_unwanted = True, False, False

    def __init__(self, model, config, layout):
        self.layout, self.attention = layout, AttentionChoice("chunked", "NumPy")
        self.dispatch = "whole", "NumPy"
        self.spec = StepSpec(self.settled(config), layout)
        self.programs, self.n_vocab = Programs(model, self.spec), model.n_vocab
        self._split, self._model = nnx.split(model), (None, None)
        recurrent = layout.recurrent.arrays if layout.recurrent else ()
        tables = tuple(
            tuple(np.zeros((layout.n_states, *x.shape), x.dtype) for x in layer)
            for layer in recurrent
        )
        cells = (create_cells(s.extent.n_slots, config.n_seq_max) for s in layout.stores)
        self.cache = Cache(
            stores=tuple(map(_empty, layout.stores)),
            cells=tuple(cells),
            states=StateStore(tables=tables) if recurrent else None,
        )
        arrays = self.cache.stores, self.cache.states
        self.n_bytes = sum(x.nbytes for x in jax.tree.leaves(arrays))

    def free(self):
        self.cache = None

    # --- steps ---------------------------------------------------------------------------------

    def forward(self, batch, sampler=None):
        logits, _ = self._step(batch)
        tokens = sampler and jnp.asarray(sample_tokens(logits, sampler)[0])
        return jnp.asarray(logits), tokens

    def sampled(self, tokens, source):
        return jnp.asarray(np.maximum(np.asarray(tokens)[source], 0))

    def read(self, tokens):
        return np.asarray(tokens)

    def decode(self, plan, sampler, n_best):
        ids, found, n_most = plan.tokens, [], int(plan.n_steps)
        ended = np.zeros(len(ids), bool)
        while len(found) < n_most and not ended.all():
            i = len(found)
            places = [dataclasses.replace(p, slots=p.slots[i]) for p in plan.places]
            batch = Batch(
                tokens=ids,
                pos=plan.pos + np.int32(i),
                seq_ids=plan.seq_ids,
                places=tuple(places),
                states=jax.tree.map(lambda x, i=i: x[i], plan.states),
                out_ids=np.arange(len(ids)),
            )
            logits, _ = self._step(batch)
            ids, sampler = sample_tokens(logits, sampler)
            found.append((ids, *log_probs(logits, n_best)))
            ended |= np.isin(ids, [NO_TOKEN, *plan.stop_ids[plan.stop_ids >= 0]])
        return _sampled(found, plan.shape[0]), sampler

    def verify(self, step, how):
        assert how.exit_layer is None, "layers that draft are compiled"
        rounds, sampler, n_tokens = step.rounds, step.sampler, len(step.batch.tokens)
        n_seqs, (n_rounds, n_drafts) = len(sampler.seed), rounds.drafts.shape

        def judge(logits):
            first, after = sample_tokens(logits[:n_seqs], sampler)
            more = np.full((n_rounds, n_drafts), -1, np.int32)
            n, stays, ends = np.ones(n_rounds, np.int32), np.ones(n_tokens, bool), []
            for d, seq in enumerate(np.minimum(rounds.seq, n_seqs - 1).tolist()):
                mine = jax.tree.map(lambda x, s=seq: np.asarray(x)[s : s + 1], after)
                token = first[seq] if rounds.seq[d] < n_seqs else NO_TOKEN
                for k in range(n_drafts):
                    if token != rounds.drafts[d, k] or token in rounds.stop_ids[d]:
                        break
                    old = np.arange(mine.recent.shape[1]) < mine.recent.shape[1] - rounds.last_n[d]
                    mine = dataclasses.replace(mine, recent=np.where(old, NO_TOKEN, mine.recent))
                    row = n_seqs + d * n_drafts + k
                    (token,), mine = sample_tokens(logits[row : row + 1], mine)
                    more[d, k], n[d] = token, n[d] + 1
                refused = rounds.at[d, n[d] :]
                stays[refused[refused < n_tokens]] = False
                ends.append(mine)
            best_ids, best = log_probs(logits, how.n_best)
            found = Verified(
                first=first,
                more=more,
                n=n,
                n_drafted=np.sum(rounds.drafts != NO_DRAFT, axis=1, dtype=np.int32),
                logits=jnp.asarray(logits),
                best_ids=best_ids,
                best=best,
                sampler=jax.tree.map(lambda *x: np.concatenate(x), *ends),
            )
            return found, stays

        return self._step(step.batch, judge)[1]

    def sample(self, logits, sampler, n_best):
        logits = np.asarray(logits)
        ids, sampler = sample_tokens(logits, sampler)
        return _sampled([(ids, *log_probs(logits, n_best))], 1), sampler

    def best_tokens(self, logits, rows, n_best):
        return log_probs(np.asarray(logits)[list(rows)], n_best)

    def _step(self, batch, judge=None):
        """Logits of a batch, and what `judge` makes of them beside which tokens stay."""
        batch = jax.tree.map(np.asarray, batch)
        step = attend.NumpyAttend(self.spec, self.cache, batch)
        with np.errstate(invalid="ignore", over="ignore"):
            logits = self.model(batch.tokens, step, batch.out_ids).astype(np.float32)
        result, stays = judge(logits) if judge else (None, np.ones(len(batch.tokens), bool))
        self.cache = dataclasses.replace(self.cache, cells=step.write(stays))
        return logits, result

    @property
    def model(self):
        """The model with its parameters in NumPy and float64: sums do not depend on the batch."""
        params = self.programs.params
        if self._model[0] is not params:
            wide = (np.asarray(x) for x in params)
            wide = tuple(x.astype(np.float64) if x.dtype == np.float32 else x for x in wide)
            graph, like = self._split
            wide = jax.tree.unflatten(jax.tree.structure(like), wide)
            self._model = params, nnx.merge(graph, wide)
        return self._model[1]

    # --- cells, keys and values between steps --------------------------------------------------

    def upload(self, store, cells):
        held = list(self.cache.cells)
        held[store] = jax.tree.map(np.array, lengthened(cells, len(held[store].pos)))
        self.cache = dataclasses.replace(self.cache, cells=tuple(held))

    def shift(self, moved=()):
        for i, (store, cells) in enumerate(zip(self.cache.stores, self.cache.cells, strict=True)):
            slots = np.flatnonzero(cells.delta)
            for some in rotated_buffers(self.layout, i):
                if some.spec.rope is None:
                    continue
                block = slots // self.layout.stores[i].extent.block_size
                of = slots if some.group is None else slots[moved[some.group][block]]
                for buffer in some.buffers:
                    keys = attend.taken_keys(store.k[buffer], of)
                    by = cells.delta[of], some.spec.rope, self.spec.config.n_ctx, 1.0
                    attend.put_keys(store.k[buffer], of, attend.rotate(keys, *by))
        cells = (dataclasses.replace(x, delta=np.zeros_like(x.delta)) for x in self.cache.cells)
        self.cache = dataclasses.replace(self.cache, cells=tuple(cells))

    def scrub(self, released):
        for store, cells in zip(self.cache.stores, self.cache.cells, strict=True):
            empty = np.flatnonzero(cells.pos < 0)
            for k, v in zip(store.k, store.v, strict=True):
                attend.put_keys(k, empty, 0)
                attend.put_values(v, empty, 0)
        for table in jax.tree.leaves(self.cache.states):
            table[released] = 0

    def copy_kv(self, group, src, dst):
        store = self.cache.stores[group]
        for start in range(0, len(src), MOVE_CHUNK):
            at = slice(start, start + MOVE_CHUNK)
            for k, v in zip(store.k, store.v, strict=True):
                attend.put_keys(k, dst[at], attend.taken_keys(k, src[at]))
                attend.put_values(v, dst[at], attend.taken_values(v, src[at]))

    def keep_runs(self, store, held):
        pass

    def copy_states(self, src, dst):
        for table in jax.tree.leaves(self.cache.states):
            table[dst] = table[src]

    def take_state(self, index):
        return jax.tree.map(lambda table: table[index].copy(), self.cache.states.tables)

    def put_state(self, index, data):
        tables = jax.tree.leaves(self.cache.states)
        for table, new in zip(tables, jax.tree.leaves(data), strict=True):
            table[index] = np.asarray(new)

    def take_kv(self, group, slots):
        store, kept = self.cache.stores[group], self._inside(group, slots)

        def taken(arrays, take):
            found = np.stack([take(x, np.where(kept, slots, 0)) for x in arrays])
            return np.where(kept[None, :, None, None], found, found.dtype.type(0))

        return taken(store.k, attend.taken_keys), taken(store.v, attend.taken_values)

    def put_kv(self, group, slots, k, v):
        store, kept = self.cache.stores[group], self._inside(group, slots)
        for i, (keys, values) in enumerate(zip(store.k, store.v, strict=True)):
            attend.put_keys(keys, slots[kept], np.asarray(k)[i, kept])
            attend.put_values(values, slots[kept], np.asarray(v)[i, kept])

    def _inside(self, store, slots):
        return slots < self.layout.stores[store].extent.n_slots

    def wait(self):
        pass

    def take_blocks(self, store, ids):
        found = [x[list(ids)] for x in self._arrays(store)]
        return np.concatenate([x.reshape(len(ids), -1).view(np.uint8) for x in found], axis=1)

    def put_blocks(self, store, ids, data):
        start = 0
        for x in self._arrays(store):
            part = np.ascontiguousarray(data[: len(ids), start : start + x[0].nbytes])
            x[list(ids)] = part.view(x.dtype).reshape(len(ids), *x.shape[1:])
            start += x[0].nbytes

    def _arrays(self, store):
        return jax.tree.leaves(self.cache.states if store is None else self.cache.stores[store])


def _empty(spec):
    n, b = spec.extent.n_blocks, spec.extent.block_size
    h, d, d_v = spec.n_kv_heads, spec.head_dim, spec.head_dim_v or spec.head_dim
    keys = (np.zeros((n, h, d, b), _TYPES[spec.type_k]) for _ in range(spec.n_buffers))
    values = (np.zeros((n, h, b, d_v), _TYPES[spec.type_v]) for _ in range(spec.n_buffers))
    return KVStore(k=tuple(keys), v=tuple(values))


def _sampled(found, size):
    """What steps sampled, padded to `size`."""
    rest = [(0, size - len(found))]
    ids, best_ids, best = (
        np.pad(np.stack(x), rest + [(0, 0)] * x[0].ndim) for x in zip(*found, strict=True)
    )
    n_steps = np.int32(len(found))
    return Sampled(n_steps=n_steps, tokens=ids, best_ids=best_ids, best=best)
