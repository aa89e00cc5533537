"""How many programs there are, and when they are compiled."""

import jax
import pytest
from toys import ToyLm

from kvrt import CacheConfig, ContextShift, Runtime
from kvrt.engine.batch import buckets
from kvrt.errors import BadConfig

ALONE = True  # see conftest.py: what is counted was compiled here
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def compilations(caplog):
    """Messages of everything that JAX compiles while the test runs, eager operations included."""
    with jax.log_compiles():
        yield lambda: [r.message for r in caplog.records if r.message.startswith("Compiling")]


def kinds(runtime, kind):
    return [key for key in runtime.programs.compiled() if key[0] == kind]


@pytest.mark.parametrize("mode", ["write", pytest.param("read", marks=pytest.mark.slow)])
def test_one_decode_program_from_the_first_cell_to_the_last(mode, compilations):
    runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=90, block_size=8, rope=mode))
    runtime.append([1])
    tokens = runtime.generate()
    for _ in range(3):
        next(tokens)
    n = len(compilations())
    assert n > 0
    for _ in range(87):
        next(tokens)
    assert runtime.n_free == 0
    assert len(compilations()) == n
    assert len(kinds(runtime, "decode")) == 1


@pytest.mark.slow
def test_one_forward_program_for_each_bucket():
    runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=512, block_size=16, n_ubatch=32))
    assert buckets(32) == (1, 8, 32)
    runtime.prepare(40)
    assert sorted(kinds(runtime, "forward")) == [("forward", n, 1) for n in (8, 32)]
    for n in (1, 2, 7, 8, 9, 31, 32, 33, 40, 63, 64):
        runtime.append([1] * n)
    assert sorted(kinds(runtime, "forward")) == [("forward", n, 1) for n in (1, 8, 32)]
    n_compiles = runtime.programs.n_compiles
    for n in (5, 17, 50):
        runtime.append([1] * n)
    assert runtime.stats().n_compiles == runtime.programs.n_compiles == n_compiles


@pytest.mark.slow
def test_nothing_compiles_after_the_first_context_shift(compilations):
    config = CacheConfig(n_ctx=32, block_size=8)
    runtime = Runtime(ToyLm(n_layers=1), config, policy=ContextShift(n_keep=3))
    runtime.append(PROMPT)
    tokens = runtime.generate(stride=4)
    while runtime.stats().n_shift < 1:
        next(tokens)
    before = len(compilations()), runtime.stats().n_compiles
    for _ in range(80):
        next(tokens)
    assert runtime.stats().n_shift >= 5
    assert (len(compilations()), runtime.stats().n_compiles) == before


def test_another_models_weights_are_refused():
    runtime = Runtime(ToyLm(n_layers=1), CacheConfig(n_ctx=16, block_size=8))
    before = runtime.append(PROMPT)
    with pytest.raises(BadConfig, match="has other parameters; make a new Runtime for it"):
        runtime.bind(ToyLm(n_layers=2))
    n = runtime.programs.n_compiles
    runtime.bind(ToyLm(n_layers=1, seed=1))
    runtime.clear()
    assert (runtime.append(PROMPT) != before).any()
    assert runtime.programs.n_compiles == n
