"""Keys by channel in an engine's blocks: what the oracle has, whoever else writes and copies."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from plainchannel import SIZE, RunKeys

from kvrt.kv_types import CHANNEL_CODECS
from kvrt.sizes import Extent, StoreSpec
from kvrt.store import blocks, tile
from kvrt.store import kv as kv_store
from kvrt.store.per_channel import PerChannel
from kvrt.store.runs import channel_runs

H, D, B, N_BLOCKS, N_SEQ = 1, 8, 64, 12, 3
N_CELLS = B * N_BLOCKS

write = jax.jit(kv_store.write_kv, donate_argnums=0)
keep = jax.jit(channel_runs.keep_runs, donate_argnums=0)
copy = jax.jit(channel_runs.copy_blocks, donate_argnums=0)


def spec_of(run, n_seq=N_SEQ):
    extent = Extent(n_cells=N_CELLS, block_size=B)
    sizes = {"n_buffers": 1, "n_kv_heads": H, "head_dim": D, "extent": extent}
    return StoreSpec(**sizes, type_k="kivi4", n_seq_max=n_seq, run=run)


read = jax.jit(lambda store: tile.keys(store.k[0], jnp.arange(N_BLOCKS, dtype="int32")))


def found(store):
    """All keys as attention reads them, [cells, H, D]."""
    return np.moveaxis(np.asarray(read(store)), -1, 0)


class Texts:
    """Sequences that write into blocks of their own, in any order, here and in the oracle."""

    def __init__(self, run):
        self.store = kv_store.create(spec_of(run))
        self.oracle = RunKeys(N_CELLS, H, D, run, CHANNEL_CODECS["kivi4"].bits)
        self.rng = np.random.default_rng(run)
        self.free = list(range(N_BLOCKS))
        self.texts = {}  # by name, blocks and the number of tokens

    def append(self, wanted):
        """One step of some tokens a sequence."""
        slots = []
        for name, n in wanted.items():
            held, end = self.texts.setdefault(name, ([], 0))
            while len(held) * B < end + n:
                held.append(self.free.pop(0))
            at = np.arange(end, end + n)
            slots += (np.array(held)[at // B] * B + at % B).tolist()
            self.texts[name] = held, end + n
        keys = 40 * self.rng.standard_normal((len(slots), H, D)).astype(np.float32)
        size = 128
        padded = np.full(size, N_CELLS, np.int32)
        padded[: len(slots)] = slots
        full = np.zeros((size, H, D), np.float32)
        full[: len(slots)] = keys
        self.store = write(self.store, padded, [full], [full])
        self.oracle.put(slots, keys)

    def fork(self, src, dst):
        """The block that a sequence ends within is copied; the others are of no interest here."""
        held, end = self.texts[src]
        (block,) = self.free[:1]
        del self.free[:1]
        pairs = np.array([held[-1]], np.int32), np.array([block], np.int32)
        self.store = copy(self.store, *pairs, np.asarray(1, np.int32))
        at, to = (slice(int(x[0]) * B, int(x[0]) * B + B) for x in pairs)
        self.oracle.keys[to] = self.oracle.keys[at]
        self.texts[dst] = [*held[:-1], block], end

    def end(self, name):
        blocks, _ = self.texts.pop(name)
        self.free += [b for b in blocks if all(b not in x for x, _ in self.texts.values())]
        held = np.zeros(N_BLOCKS, bool)
        held[[b for x, _ in self.texts.values() for b in x]] = True
        self.store = keep(self.store, held)

    def check(self):
        keys = found(self.store)
        for held, end in self.texts.values():
            at = np.arange(end)
            slots = np.array(held)[at // B] * B + at % B
            np.testing.assert_array_equal(keys[slots], self.oracle.keys[slots])


STEPS = st.lists(
    st.one_of(
        st.dictionaries(st.sampled_from("ab"), st.sampled_from([1, 7, 31, 33, 64]), min_size=1),
        st.sampled_from(["a ends", "b ends", "a forks"]),
    ),
    min_size=3,
    max_size=12,
)


@pytest.mark.slow
@pytest.mark.parametrize("run", [B, SIZE])
@given(steps=STEPS)
@settings(max_examples=15, deadline=None)
def test_a_sequence_has_what_it_has_alone(run, steps):
    """With as many places as sequences, and more ended texts than places."""
    both = Texts(run)
    for step in steps:
        if isinstance(step, dict):
            grown = {k: n for k, n in step.items() if len(both.free) > 2}
            grown = {k: n for k, n in grown.items() if both.texts.get(k, ([], 0))[1] < 2 * B}
            if grown:
                both.append(grown)
        elif step.endswith("ends") and step[0] in both.texts:
            both.end(step[0])
        elif step == "a forks" and "a" in both.texts and both.texts["a"][1] % B and both.free:
            if "b" in both.texts:
                both.end("b")
            both.fork("a", "b")
        both.check()


def test_runs_that_nobody_goes_on_with_take_no_place():
    """Twenty texts end within a run, while another one waits within its own."""
    both = Texts(B)
    both.append({"waits": 40})
    for i in range(20):
        both.append({f"{i}": 33})
        both.end(f"{i}")
    both.check()
    both.append({"waits": 24})
    both.check()
    keys = both.store.k[0]
    assert isinstance(keys, PerChannel) and (np.asarray(keys.group) < 0).all()


@pytest.mark.slow
def test_a_block_leaves_and_comes_back_bit_by_bit():
    """Into a block of which a text that has ended left half a run."""
    both = Texts(B)
    both.append({"a": 64, "b": 40})
    data = blocks.take_blocks(both.store, np.array([0], np.int32))
    store = blocks.put_blocks(both.store, np.array([1], np.int32), data)
    np.testing.assert_array_equal(found(store)[B : 2 * B], both.oracle.keys[:B])
    assert data.shape[1] == B * (H * (D // 2 + D * 2 * 2 // 32) + H * D * 4)
