"""The K-shift: what turns, what does not, and what many turns cost in precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from kvrt import CacheConfig, GroupSpec, RopeSpec, Runtime
from kvrt import cells as kc
from kvrt.sizes import store_spec
from kvrt.store import kv as kv_store
from kvrt.upkeep import shift
from tests.oracle import rope
from tests.toys import RowModel, allclose

H, D, B, N_CTX = 2, 8, 4, 18
N_BLOCKS = 5  # the last one has two cells of four
# Largest error of a turned key against the exact rotation, for keys of size 1 to 4.
TOLERANCE = {"f32": 1e-5, "bf16": 0.03, "f16": 0.004}
# One group per layout, one that turns half a head, and one that has no positions.
ROPES = (
    RopeSpec(n_rot=D, base=100.0),
    RopeSpec(n_rot=D, base=100.0, layout="norm"),
    RopeSpec(n_rot=D // 2, base=50.0),
    None,
)
GROUPS = tuple(
    GroupSpec(layers=(i,), n_kv_heads=H, head_dim=D, rope=spec) for i, spec in enumerate(ROPES)
)


@functools.cache
def program():
    """Plan and apply as the runtime compiles them."""

    def run(stores, cells):
        plan = shift.plan_shift(cells, N_BLOCKS, B)
        return [shift.apply_shift(x, plan, g, N_CTX) for x, g in zip(stores, GROUPS, strict=True)]

    return jax.jit(run, donate_argnums=0)


def filled(seed, kind):
    """A store a group with normal rows everywhere, those that no cell has included."""
    rng = np.random.default_rng(seed)
    config = CacheConfig(n_ctx=N_CTX, block_size=B, type_k=kind, type_v=kind)
    slots = np.arange(N_BLOCKS * B, dtype=np.int32)
    k, v = (
        [jnp.asarray(rng.standard_normal((len(slots), H, D)), jnp.float32) for _ in GROUPS]
        for _ in range(2)
    )
    write = jax.jit(kv_store.write_kv)
    return [
        write(kv_store.create(store_spec(g, config)), slots, [a], [b])
        for g, a, b in zip(GROUPS, k, v, strict=True)
    ]


def keys(store):
    """Key rows of the first layer, [row, H, D] in float64."""
    slots = np.arange(N_BLOCKS * B, dtype=np.int32)
    return np.asarray(kv_store.read_kv(store, 0, slots)[0], np.float64)


def with_delta(delta):
    """Cells that hold something, with these changes pending."""
    cells = kc.create(N_CTX, 1)
    pos = np.arange(100, 100 + N_CTX, dtype=np.int32)
    cells = kc.place(cells, np.arange(N_CTX, dtype=np.int32), pos, np.zeros(N_CTX, np.int32))
    return kc.Cells(pos=cells.pos, delta=np.array(delta, np.int32), seqs=cells.seqs)


def turned(k, delta, spec):
    """Rows [row, H, D] turned by delta tokens each, by the oracle."""
    out = np.array(k)
    for c, d in enumerate(delta):
        if spec is not None:
            out[c] = rope(k[c], int(d), n_rot=spec.n_rot, base=spec.base, layout=spec.layout)
    return out


DELTAS = st.lists(st.one_of(st.just(0), st.integers(-90, 90)), min_size=N_CTX, max_size=N_CTX)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOLERANCE)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 99), delta=DELTAS)
def test_moved_keys_turn_and_no_other_bit_changes(kind, seed, delta):
    store = filled(seed, kind)
    before = [np.array(x) for x in jax.tree.leaves(store)]
    old = [keys(store[layer]) for layer in range(len(GROUPS))]
    new = program()(store, with_delta(delta))
    for layer, spec in enumerate(ROPES):
        expected = turned(old[layer], delta, spec)
        allclose(keys(new[layer])[:N_CTX], expected[:N_CTX], TOLERANCE[kind])
    moved = np.zeros(N_BLOCKS * B, bool)
    moved[:N_CTX] = np.array(delta) != 0
    for x, was in zip([x.k[0] for x in new], before[::2], strict=True):
        # [N, H, D, B]: blocks and cells outermost.
        x, was = (np.moveaxis(np.array(a), 3, 1).reshape(len(moved), -1) for a in (x, was))
        assert x[~moved].tobytes() == was[~moved].tobytes()
    assert [np.array(x.v[0]).tobytes() for x in new] == [v.tobytes() for v in before[1::2]]
    # Layers without positions never change.
    assert np.array(new[3].k[0]).tobytes() == before[6].tobytes()


@settings(max_examples=30)
@given(delta=DELTAS)
def test_the_plan_lists_the_blocks_with_a_moved_cell_and_no_other(delta):
    cells = with_delta(delta)
    host = shift.plan_shift(cells, N_BLOCKS, B)
    expected = sorted({c // B for c, d in enumerate(delta) if d != 0})
    assert int(host.n_blocks) == len(expected)
    assert host.blocks[: len(expected)].tolist() == expected
    assert sorted(host.blocks.tolist()) == list(range(N_BLOCKS))
    assert host.delta.reshape(-1).tolist() == [*delta, 0, 0]
    assert (host.blocks.dtype, host.delta.dtype) == (np.int32, np.int32)


def test_the_plan_is_the_same_inside_jit():
    cells = with_delta([0] * 5 + [3, 0, 0, -2] + [0] * 8 + [7])
    host = shift.plan_shift(cells, N_BLOCKS, B)
    traced = jax.jit(lambda c: shift.plan_shift(c, N_BLOCKS, B))(jax.device_put(cells))
    for a, b in zip(jax.tree.leaves(host), jax.tree.leaves(traced), strict=True):
        np.testing.assert_array_equal(a, b)


def test_blocks_that_the_plan_does_not_list_are_not_read():
    """The cost follows the moved blocks: a plan cut short leaves what it no longer lists."""
    store = filled(3, "f32")
    old = keys(store[0])
    plan = shift.plan_shift(with_delta([5] * N_CTX), N_BLOCKS, B)
    assert int(plan.n_blocks) == N_BLOCKS
    cut = shift.ShiftPlan(
        delta=plan.delta, blocks=plan.blocks[::-1].copy(), n_blocks=np.asarray(2, np.int32)
    )
    new = jax.jit(lambda s, p: shift.apply_shift(s, p, GROUPS[0], N_CTX))(store[0], cut)
    changed = (keys(new) != old).any(axis=(1, 2))
    assert changed.tolist() == [False] * 12 + [True] * 6 + [False] * 2


def test_settled_cells_have_nothing_pending():
    cells = with_delta(range(N_CTX))
    settled = shift.settle(cells)
    assert not settled.delta.any()
    assert (settled.pos == cells.pos).all()
    assert cells.delta.any()


# --- many shifts -------------------------------------------------------------------------------

N_TOKENS, N_SHIFTS = 8, 1000


@pytest.mark.slow
def test_a_thousand_moves_leave_raw_keys_exact():
    """With rope="read" attention is bit for bit that of tokens written where they stand now."""
    config = CacheConfig(n_ctx=16, block_size=8, n_ubatch=8, rope="read")
    runtime, tokens = Runtime(RowModel(), config), list(range(N_TOKENS))
    runtime.append(tokens)
    before = [np.array(x).tobytes() for x in runtime.cache.stores[0].k]
    for _ in range(N_SHIFTS):
        runtime.seq_add(0, 0, None, 1)
    assert runtime.seq_pos_min() == N_SHIFTS
    moved = np.asarray(runtime.probe([9, 10]))
    assert before == [np.array(x).tobytes() for x in runtime.cache.stores[0].k]
    assert runtime.stats().n_kshift == 0
    # One move by 1,000 gives the same bits as 1,000 moves by one.
    runtime.clear()
    runtime.append(tokens)
    runtime.seq_add(0, 0, None, N_SHIFTS)
    np.testing.assert_array_equal(moved, runtime.probe([9, 10]))


def drift(kind, n_steps, d):
    """Largest error of turned keys after n_steps K-shifts by d each, against the exact rotation."""
    store = filled(5, kind)
    start = keys(store[0])
    cells = with_delta([d] * N_CTX)

    def run(store):
        plan = shift.plan_shift(jax.device_put(cells), N_BLOCKS, B)
        step = functools.partial(shift.apply_shift, plan=plan, group=GROUPS[0], n_ctx=N_CTX)
        return lax.fori_loop(0, n_steps, lambda _, s: step(s), store)

    new = jax.jit(run)(store[0])
    exact = turned(start, [n_steps * d] * N_CTX, ROPES[0])
    return float(np.abs(keys(new) - exact)[:N_CTX].max())


# Errors allowed after 1,000 one-token shifts: each applied alone, and their sum applied once.
BOUNDS = {"f32": (3e-4, 3e-4), "f16": (0.08, 0.004), "bf16": (1.5, 0.03)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOUNDS)
def test_a_thousand_moves_of_turned_keys_drift_within_bounds(kind):
    each, once = drift(kind, N_SHIFTS, 1), drift(kind, 1, N_SHIFTS)
    print(f"drift of {kind} keys after {N_SHIFTS} one-token shifts:", end=" ")
    print(f"{each:.1e} if each is applied, {once:.1e} if their sum is")
    assert 0 < each < BOUNDS[kind][0]
    assert 0 < once < BOUNDS[kind][1]
    if kind != "f32":
        assert once < each / 4
