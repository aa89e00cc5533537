"""Which tokens of a step are advanced at once, and that the states are those of single steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt.cellcache.recurrent import RecurrentStates, plan_probe, plan_states
from kvrt.store.recurrent import StateIndex, advance, advance_chunks, plan_chunks
from tests.marks import slow

WIDTH, N_TOKENS, N_STATES = 3, 48, 24


def step(state, row):
    (s,), (x,) = state, row
    s = 0.5 * s + jnp.tanh(x + 0.1 * s)
    return (s,), jnp.concatenate([s, x])


def chunk(state, rows, n):
    """The same in one go, token by token; what is beyond the n-th is spoilt."""
    (s,), (xs,) = state, rows

    def one(s, row):
        i, x = row
        (new,), out = step((s,), (x,))
        return jnp.where(i < n, new, s), jnp.where(i < n, out, 99.0)

    s, out = jax.lax.scan(one, s, (jnp.arange(len(xs)), xs))
    return (s,), out


def within(run):
    """The same of the state at an index of tables, which stay where they are."""

    def in_tables(tables, index, *rest):
        state, out = run(tuple(t.at[index].get(mode="fill", fill_value=0) for t in tables), *rest)
        return tuple(
            t.at[index].set(s, mode="drop") for t, s in zip(tables, state, strict=True)
        ), out

    return in_tables


plan = jax.jit(plan_chunks, static_argnums=(1, 2))


def planned_lengths(at, n_states, size):
    return np.asarray(plan(at, n_states, size)[0])


def index(src, dst):
    return StateIndex(src=np.array(src, np.int32), dst=np.array(dst, np.int32))


@functools.partial(jax.jit, static_argnums=3)
def both(tables, xs, at, size):
    """Tables and outputs by steps, by chunks, and both in place."""
    one, form = advance(tables, at, step, xs), (within(chunk), size)
    return (
        one,
        advance_chunks(tables, at, step, (chunk, size), xs),
        advance(tables, at, within(step), xs, in_place=True),
        advance_chunks(tables, at, within(step), form, xs, in_place=True),
    )


def assert_alike(at, n_states, size):
    """In one program for all plans: padded to N_TOKENS, their states among N_STATES."""
    rng = np.random.default_rng(0)
    src, dst = (np.where(x < n_states, x, N_STATES) for x in (at.src, at.dst))
    rest = [N_STATES] * (N_TOKENS - len(src))
    at = index([*src, *rest], [*dst, *rest])
    tables = (rng.standard_normal((N_STATES, WIDTH), np.float32),)
    xs = (rng.standard_normal((N_TOKENS, WIDTH), np.float32),)
    (t1, y1), *others = both(tables, xs, at, size)
    real = at.dst < N_STATES
    for t2, y2 in others:
        np.testing.assert_allclose(t1[0], t2[0], rtol=1e-6, atol=1e-6)
        y1, y2 = np.asarray(y1), np.asarray(y2)
        np.testing.assert_allclose(y1[real], y2[real], rtol=1e-6, atol=1e-6)
        assert np.isfinite(y2).all()


def planned(depth, lengths, seed=0):
    """A plan of the runtime's for sequences of these lengths, after one step of some tokens."""
    states = RecurrentStates(n_states=len(lengths) * depth, depth=depth)
    seq_ids = np.repeat(np.arange(len(lengths)), 3).astype(np.int32)
    first = dict.fromkeys(range(len(lengths)), 0)
    states = plan_states(states, seq_ids, first).after
    seq_ids = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    found = plan_states(states, seq_ids, dict.fromkeys(range(len(lengths)), 3))
    return index(found.src, found.dst), states.n_states + 1


@pytest.mark.parametrize("size", [8, slow(16), slow(64)])
@pytest.mark.parametrize("depth", [1, slow(2), 5])
@pytest.mark.parametrize("lengths", [[40], [7, 30, 1, 9], [1, 1, 1, 20], [8, 8, 16]], ids=str)
def test_a_plan_gives_the_same_in_chunks(lengths, depth, size):
    assert_alike(*planned(depth, lengths), size)


def test_all_but_the_kept_tokens_of_a_prompt_are_in_chunks():
    at, n = planned(5, [40])
    length = planned_lengths(at, n, 16)
    # 35 states are written again by a later token, and the 36th is the first that is kept.
    assert length[[0, 16]].tolist() == [16, 16] and length[32:].tolist() == [1] * 8
    at, n = planned(1, [40])
    assert planned_lengths(at, n, 64)[0] == 40
    assert planned_lengths(at, n, 16)[[0, 16, 32]].tolist() == [16, 16, 8]


@pytest.mark.slow
def test_tokens_of_a_probe_are_one_chunk():
    states = RecurrentStates(n_states=4, depth=1)
    found = plan_probe(states, 0, 20)
    at = index(found.src, found.dst)
    assert planned_lengths(at, 5, 64)[0] == 20
    assert_alike(at, 5, 64)


@pytest.mark.slow
def test_padding_is_skipped_wherever_it_stands():
    none = 4
    src = [0, none, none, 1, *[2] * 12, none, none]
    dst = [0, none, none, 1, *[2] * 12, none, none]
    length, after = plan(index(src, dst), 4, 64)
    assert length[4] == 12 and after.tolist()[:5] == [0, 3, 3, 3, 4] and after[16] == 18
    assert_alike(index(src, dst), 4, 64)
    assert_alike(index([none] * 12, [none] * 12), 4, 64)


@pytest.mark.slow
def test_a_state_that_another_sequence_has_is_left_as_it_is():
    # A fork: sequence 1 goes on from the state of sequence 0, into one of its own.
    at = index([0, *[2] * 11, 0, *[1] * 9], [*[2] * 12, *[1] * 10])
    assert planned_lengths(at, 3, 64)[[0, 12]].tolist() == [12, 10]
    assert_alike(at, 3, 64)


def test_a_state_that_is_kept_between_ends_a_chunk():
    # The tenth token's state is written nowhere else, as a checkpoint's would be.
    src, dst = [0] * 10 + [1] + [0] * 9, [0] * 9 + [1] + [0] * 10
    assert planned_lengths(index(src, dst), 2, 64)[[0, 10]].tolist() == [10, 10]
    assert_alike(index(src, dst), 2, 8)


def test_tokens_of_sequences_that_take_turns_go_one_by_one():
    assert planned_lengths(index([0, 1] * 10, [0, 1] * 10), 2, 64).tolist() == [1] * 20


def test_few_tokens_run_the_program_of_steps():
    at = index([0] * 7, [0] * 7)
    tables, xs = (jnp.zeros((1, WIDTH)),), (jnp.ones((7, WIDTH)),)
    texts = [
        jax.jit(run).lower(tables, xs).as_text()
        for run in (
            lambda t, x: advance(t, at, step, x),
            lambda t, x: advance_chunks(t, at, step, (chunk, 64), x),
        )
    ]
    assert texts[0].split("\n", 1)[1] == texts[1].split("\n", 1)[1]
