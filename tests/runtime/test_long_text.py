"""A text far longer than its cache leaves no array behind, and no memory of the host."""

import gc
import tracemalloc

import jax
import pytest
from toys import ToyLm

from kvrt import CacheConfig, ContextShift, Runtime

pytestmark = pytest.mark.slow
N_CELLS, N_TOKENS = 32, 500
ALONE = True  # see conftest.py: what other tests have compiled is not held here


def live_bytes():
    """Bytes of all arrays on the device that something still refers to."""
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.parametrize("rope", ["write", "read"])
def test_memory_is_the_same_after_every_context_shift(rope):
    config = CacheConfig(n_ctx=N_CELLS, n_ubatch=8, rope=rope)
    runtime = Runtime(ToyLm(), config, policy=ContextShift(n_keep=4))
    before = live_bytes()
    runtime.append([1, 2, 3])
    held, host = [], []
    tracemalloc.start()
    for i, _ in enumerate(runtime.generate(N_TOKENS)):
        held.append(live_bytes())
        if i % 100 == 99:
            gc.collect()
            host.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    n_shifts = len(runtime.stats().drops)
    print(n_shifts, sorted(set(held)), host)
    assert n_shifts > 25
    # The cache is donated from step to step: one copy of it would be half of this or more.
    cache_bytes = runtime.stats().cache_bytes
    assert max(held) - before < cache_bytes / 8
    # The first third compiles and shifts; from then on nothing at all is added.
    assert set(held[300:]) <= set(held[100:300])
    # On the host the lists of drops and of this test grow, by some hundred bytes a shift.
    assert host[-1] - host[2] < 64 << 10
