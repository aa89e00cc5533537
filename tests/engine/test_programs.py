"""How many programs there are, and that none of them copies the cache."""

import jax
import numpy as np
import pytest
from toys import ToyLm

from kvrt import CacheConfig, ContextShift, Runtime
from kvrt.engine.batch import buckets
from kvrt.errors import BadConfig
from kvrt.store import store as rows

OPTIMISED = True  # see conftest.py: aliases and temporaries are those of the real programs
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


KINDS = {
    "write": {"rope": "write"},
    "read": {"rope": "read"},
    "codes": {"type_k": "q8_0", "type_v": "int4", "hadamard": True},
}


@pytest.fixture(scope="module", params=KINDS)
def used(request):
    """A cache far larger than what a step touches, after one call of every program."""
    config = CacheConfig(n_ctx=8192, n_seq_max=2, n_ubatch=8, **KINDS[request.param])
    runtime = Runtime(ToyLm(head_dim=32 if request.param == "codes" else 16), config)
    runtime.append(PROMPT)
    list(runtime.generate(3))
    if config.rope == "write":
        runtime.append([1])
        list(runtime.generate(5, stride=4))
    runtime.seq_cp(0, 1)
    runtime.seq_add(1, 2, None, 5)
    runtime.append([1], 1)
    runtime.scrub()
    return runtime


@pytest.mark.slow
def test_no_program_copies_the_cache(used):
    (store,) = used.cache.stores
    layer_bytes = sum(x.nbytes for x in jax.tree.leaves((store.k[0], store.v[0])))
    all_bytes = rows.n_bytes(store)
    assert all_bytes == 2 * layer_bytes == used.stats().cache_bytes
    of_cache = {k: p for k, p in used.programs.compiled().items() if k[0] != "draw"}
    expected = {"forward", "decode", "move", "shift", "scrub"}
    assert {key[0] for key in of_cache} == expected - (
        {"shift"} if used.config.rope == "read" else set()
    )
    for key, program in of_cache.items():
        memory = program.memory_analysis()
        print(key, memory.temp_size_in_bytes, memory.alias_size_in_bytes)
        assert memory.alias_size_in_bytes >= all_bytes, key
        # Cosines and sines of all cells are wider than codes.
        n_rot = store.v[0].codec.sizes(32)[0] if used.config.hadamard else 0
        tables = 8192 * 2 * n_rot * 4 if key[0] == "shift" else 0
        assert memory.temp_size_in_bytes < layer_bytes + tables, key


@pytest.mark.slow
def test_every_writer_donates(used):
    def dead(write):
        """Which arrays of the cache `write` has consumed: all of them, or it made a copy."""
        old = jax.tree.leaves(used.cache.stores)
        write()
        return {x.is_deleted() for x in old}

    def shift():
        used.seq_add(1, 0, None, 1)
        used.flush()

    assert dead(lambda: used.append([1])) == {True}
    assert dead(lambda: list(used.generate(4))) == {True}
    assert dead(lambda: used.decode({1: 2})) == {True}
    # The first time, rows of shared cells are copied before they turn.
    assert dead(shift) == {True}
    assert dead(shift) == {used.config.rope == "write"}
    used.seq_rm(None, 0, 2)
    assert dead(used.defrag) == {True}
    assert dead(used.clear) == {False}
    assert dead(used.scrub) == {True}
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(used.cache.stores))


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
