"""The K-shift of keys in codes: what it codes anew, what it leaves, and what many of them cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import CacheConfig, GroupSpec, RopeSpec, Runtime
from kvrt import cells as kc
from kvrt.sizes import store_spec
from kvrt.store import codec, hadamard
from kvrt.store import kv as kv_store
from kvrt.upkeep import shift
from tests.oracle import rope
from tests.store import plaincodec
from tests.toys import RowModel

pytestmark = pytest.mark.slow

H, D, B, N_CTX, N_BLOCKS = 2, 64, 8, 32, 4
GROUP = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=RopeSpec(n_rot=D, base=100.0))
CASES = [("int8", False), ("q8_0", True), ("int4", True), ("int2", False)]


@functools.cache
def program(on):
    def run(store, cells):
        plan = shift.plan_shift(cells, N_BLOCKS, B)
        return shift.apply_shift(store, plan, GROUP, N_CTX, on)

    return jax.jit(run)


def filled(kind, on, seed=0):
    """A store of these keys, as a step leaves them."""
    k, v = np.random.default_rng(seed).standard_normal((2, N_CTX, H, D)).astype(np.float32)
    config = CacheConfig(n_ctx=N_CTX, block_size=B, type_k=kind, type_v=kind, hadamard=on)
    kept = hadamard.transform(jnp.asarray(k), hadamard.size_k(D, on))
    slots = np.arange(N_CTX, dtype=np.int32)
    empty = kv_store.create(store_spec(GROUP, config))
    return jax.jit(kv_store.write_kv)(empty, slots, [kept], [jnp.asarray(v)]), k


def keys(store, on):
    found = kv_store.read_kv(store, 0, np.arange(N_CTX, dtype=np.int32))[0]
    return np.asarray(hadamard.transform(found, hadamard.size_k(D, on)))


def cells_with(delta):
    cells = kc.create(N_CTX, 1)
    pos = np.arange(100, 100 + N_CTX, dtype=np.int32)
    cells = kc.place(cells, np.arange(N_CTX, dtype=np.int32), pos, np.zeros(N_CTX, np.int32))
    return kc.Cells(pos=cells.pos, delta=np.array(delta, np.int32), seqs=cells.seqs)


@pytest.mark.parametrize(("kind", "on"), CASES)
def test_moved_keys_are_coded_anew_and_no_other_byte_changes(kind, on):
    store, _ = filled(kind, on)
    delta = np.zeros(N_CTX, np.int32)
    delta[[1, 2, 7, 20, 31]] = [3, -5, 40, 1, -90]
    old = keys(store, on)
    new = program(on)(store, cells_with(delta))
    assert isinstance(new.k[0], codec.Quantized)
    moved = delta != 0
    for a, b in zip(jax.tree.leaves(new.k), jax.tree.leaves(store.k), strict=True):
        a, b = (np.moveaxis(np.asarray(x), 3, 1).reshape(N_CTX, -1) for x in (a, b))
        assert a[~moved].tobytes() == b[~moved].tobytes()
    for a, b in zip(jax.tree.leaves(new.v), jax.tree.leaves(store.v), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    exact = np.stack(
        [
            rope(x, int(d), n_rot=D, base=100.0, layout="neox")
            for x, d in zip(old, delta, strict=True)
        ]
    )
    # One more step of codes: what a fresh row of these values loses.
    if not on:
        wanted = plaincodec.coded(exact[moved].astype(np.float32), kind)
        step = {"int8": 0.03, "int2": 3.0}[kind]
        assert np.abs(keys(new, on)[moved] - wanted).max() < step
    fresh = {"int8": 0.02, "q8_0": 0.02, "int4": 0.4, "int2": 1.6}[kind]
    assert np.abs(keys(new, on)[moved] - exact[moved]).max() < fresh


def drift(kind, on):
    """Error of keys after a hundred one-token shifts that sum to zero, relative to the keys."""
    store, _ = filled(kind, on)
    start = keys(store, on)
    for i in range(100):
        store = program(on)(store, cells_with([1 if i < 50 else -1] * N_CTX))
    return float(np.linalg.norm(keys(store, on) - start) / np.linalg.norm(start))


def test_many_shifts_cost_what_is_known():
    plain, turned, half = drift("q8_0", False), drift("q8_0", True), drift("f16", False)
    print(f"a hundred shifts: q8_0 {plain:.1e}, turned {turned:.1e}, f16 {half:.1e}")
    assert half < 5e-3 < min(turned, plain) and max(turned, plain) < 0.2


def test_raw_keys_in_codes_never_change():
    """With rope="read" a hundred moves that sum to zero leave every byte, and the logits."""
    group = GroupSpec(layers=(0,), n_kv_heads=H, head_dim=D, rope=RopeSpec(n_rot=D, base=100.0))
    config = CacheConfig(
        n_ctx=16, block_size=8, n_ubatch=8, rope="read", type_k="q8_0", type_v="q8_0"
    )
    runtime = Runtime(RowModel(head_dim=D, group=group), config)
    runtime.append(list(range(8)))
    before = [np.array(x).tobytes() for x in jax.tree.leaves(runtime.cache.stores[0])]
    logits = np.asarray(runtime.probe([9, 10]))
    for i in range(100):
        runtime.seq_add(0, 0, None, 1 if i < 50 else -1)
    np.testing.assert_array_equal(runtime.probe([9, 10]), logits)
    assert before == [np.array(x).tobytes() for x in jax.tree.leaves(runtime.cache.stores[0])]
    assert runtime.stats().n_kshift == 0
