"""A text far longer than its cache leaves no array behind, and no memory of the host."""

import gc
import statistics
import tracemalloc

import jax
import numpy as np
import pytest

from kvrt import CacheConfig, ContextShift, Runtime
from tests.marks import full
from tests.toys import ToyLm

pytestmark = pytest.mark.slow
N_CELLS, N_TOKENS, PER = 32, 600, 100
# On the host the list of drops grows, by some hundred bytes a shift: 8 shifts in 100 tokens.
MOST_BYTES = 6 << 10
ALONE = True  # see conftest.py: what other tests have compiled is not held here


def live_bytes():
    """Bytes of all arrays on the device that something still refers to."""
    return sum(x.nbytes for x in jax.live_arrays())


def run(rope="write"):
    """A runtime after N_TOKENS; bytes of arrays at each token, of the host at each PER."""
    config = CacheConfig(n_ctx=N_CELLS, n_ubatch=8, rope=rope)
    runtime = Runtime(ToyLm(), config, policy=ContextShift(n_keep=4))
    # Room for what is noted is taken before anything is counted.
    held, host = np.zeros(1 + N_TOKENS, np.int64), np.zeros(N_TOKENS // PER, np.int64)
    held[0] = live_bytes()
    runtime.append([1, 2, 3])
    tracemalloc.start()
    try:
        for i, _ in enumerate(runtime.generate(N_TOKENS), 1):
            held[i] = live_bytes()
            if i % PER == 0:
                gc.collect()
                host[i // PER - 1] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    print(len(runtime.stats().drops), sorted(set(held.tolist())), np.diff(host).tolist())
    return runtime, held, host


def growth(host):
    """Bytes that most spans of PER tokens add.

    What leaks does so in each of them. What is once more in one only is a table of the whole
    process that has outgrown its place, such as the one that the type checker of the tests keeps
    of all functions: 295 KB where they are some thousands.
    """
    return statistics.median(np.diff(host).tolist())


@pytest.mark.parametrize("rope", ["write", full("read")])
def test_memory_is_the_same_after_every_context_shift(rope):
    runtime, held, host = run(rope)
    assert len(runtime.stats().drops) > 25
    # The cache is donated from step to step: one copy of it would be half of this or more.
    cache_bytes = runtime.stats().cache_bytes
    assert max(held) - held[0] < cache_bytes / 8
    # The first third compiles and shifts; from then on nothing at all is added.
    assert set(held[301:]) <= set(held[101:301])
    assert growth(host) < MOST_BYTES


def test_a_kilobyte_a_shift_is_noticed(monkeypatch):
    kept, drop = [], ContextShift.drop

    def leak(*args, **named):
        kept.append(bytes(1 << 10))
        return drop(*args, **named)

    monkeypatch.setattr(ContextShift, "drop", leak)
    runtime, _, host = run()
    assert len(kept) == len(runtime.stats().drops) > 25
    assert growth(host) > MOST_BYTES
