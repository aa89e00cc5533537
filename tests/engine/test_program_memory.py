"""No program copies the cache: what is donated is written in place."""

import jax
import numpy as np
import pytest
from toys import ToyLm

from kvrt import CacheConfig, Runtime
from kvrt.store import kv as kv_store

pytestmark = pytest.mark.slow
OPTIMISED = True  # see conftest.py: aliases and temporaries are those of the real programs
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


KINDS = {
    "write": {"rope": "write"},
    "read": {"rope": "read"},
    "codes": {"type_k": "q8_0", "type_v": "int4", "hadamard": True},
    "by channel": {"type_k": "kivi4", "type_v": "int4"},
}


@pytest.fixture(scope="module", params=KINDS)
def used(request):
    """A cache far larger than what a step touches, after one call of every program."""
    config = CacheConfig(n_ctx=8192, n_seq_max=2, n_ubatch=8, **KINDS[request.param])
    runtime = Runtime(ToyLm(head_dim=32 if "type_k" in KINDS[request.param] else 16), config)
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


def test_no_program_copies_the_cache(used):
    (store,) = used.cache.stores
    layer_bytes = sum(x.nbytes for x in jax.tree.leaves((store.k[0], store.v[0])))
    all_bytes = kv_store.n_bytes(store)
    assert all_bytes == 2 * layer_bytes == used.stats().cache_bytes
    of_cache = {k: p for k, p in used.programs.compiled().items() if k[0] != "sample"}
    expected = {"forward", "decode", "move", "shift", "scrub"}
    assert {key[0] for key in of_cache} == expected - (
        {"shift"} if used.config.rope == "read" else set()
    )
    for key, program in of_cache.items():
        memory = program.memory_analysis()
        print(key, memory.temp_size_in_bytes, memory.alias_size_in_bytes)
        assert memory.alias_size_in_bytes >= all_bytes, key
        # Cosines and sines of all cells are wider than codes.
        n_rot = 32 // 2 if used.config.type_k in ("q8_0", "kivi4") else 0
        tables = 8192 * 2 * n_rot * 4 if key[0] == "shift" else 0
        assert memory.temp_size_in_bytes < layer_bytes + tables, key


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
    # Indices of what is kept beside codes are no rows.
    kept = [x for x in jax.tree.leaves(used.cache.stores) if x.dtype != np.int32]
    assert not any(np.any(np.asarray(x)) for x in kept)
