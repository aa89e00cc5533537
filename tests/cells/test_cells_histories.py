"""Random histories: lists of cells = NumPy = one jitted scan, and the invariants of the state."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from plaincells import PlainCells, plain, render

from kvrt import cells as kc
from kvrt.errors import SharedCells

N_CTX, N_STEPS, END = 12, 24, 2**31 - 1
OPS = ("none", "rm", "rm_any", "cp", "keep", "add", "div", "clear", "place1", "place3")
SEQS_OF = {1: 32, 2: 33, 8: 256}


def device_op(cells, head, code, x):
    """One step on cells and head, chosen by a traced number."""
    seq, dst, p0, p1, d = x

    def place(n):
        slots, found = kc.find_slots(cells, head, n)
        pos = p0 % 32 + jnp.arange(n, dtype=jnp.int32)
        new = kc.place(cells, slots, pos, jnp.full(n, seq))
        return new, jnp.where(found, kc.next_head(slots), head)

    branches = (
        lambda: (cells, head),
        lambda: (kc.seq_rm(cells, seq, p0, p1), head),
        lambda: (kc.seq_rm(cells, None, p0, p1), head),
        lambda: (kc.seq_cp(cells, seq, dst, p0, p1), head),
        lambda: (kc.seq_keep(cells, seq), head),
        lambda: (kc.seq_add(cells, seq, p0, p1, d), head),
        lambda: (kc.seq_div(cells, seq, p0, p1, jnp.abs(d) + 1), head),
        lambda: (kc.clear(cells), jnp.int32(0)),
        lambda: place(1),
        lambda: place(3),
    )
    return lax.switch(code, branches)


def queries(cells, seq, p0, p1):
    """What can be asked of cells, in either world."""
    return (
        kc.n_used(cells),
        kc.n_free(cells),
        kc.n_kv(cells),
        kc.seq_pos_min(cells, seq),
        kc.seq_pos_max(cells, seq),
        kc.n_shared(cells, seq, p0, p1),
    )


@functools.cache
def device_program(n_words):
    """A jitted scan over a history, giving every state and what was asked of it."""

    def step(carry, x):
        cells, head = carry
        new, head = device_op(cells, head, x[0], x[1:])
        freed = kc.first_freed(cells, new), kc.lowered_head(cells, new, head)
        return (new, head), (new, head, freed, queries(new, x[1], x[3], x[4]))

    def run(steps):
        start = kc.create(N_CTX, 32 * n_words)
        start = jax.device_put(start)
        return lax.scan(step, (start, jnp.int32(0)), tuple(steps[:, i] for i in range(6)))[1]

    return jax.jit(run)


def histories(n_seq_max):
    seq = st.sampled_from([0, 1, n_seq_max // 2, n_seq_max - 1])
    places = st.tuples(st.sampled_from(["place1", "place3"]), seq, seq, st.integers(0, 20)).map(
        lambda x: (*x, x[3], 0)
    )
    ranges = st.tuples(st.integers(0, 20), st.integers(0, 20) | st.just(END)).map(sorted)
    changes = st.tuples(
        st.sampled_from((*OPS[1:8], "cp", "add")), seq, seq, ranges, st.integers(-4, 4)
    ).map(lambda x: (*x[:3], *x[3], x[4]))
    return st.lists(places | changes, max_size=N_STEPS)


def host_op(cells, head, name, seq, dst, p0, p1, d):
    """The same step in NumPy; a refused move changes nothing."""
    slots = np.zeros(0, np.int32)
    match name:
        case "rm":
            cells = kc.seq_rm(cells, seq, p0, p1)
        case "rm_any":
            cells = kc.seq_rm(cells, None, p0, p1)
        case "cp":
            cells = kc.seq_cp(cells, seq, dst, p0, p1)
        case "keep":
            cells = kc.seq_keep(cells, seq)
        case "add":
            cells = kc.seq_add(cells, seq, p0, p1, d)
        case "div":
            cells = kc.seq_div(cells, seq, p0, p1, abs(d) + 1)
        case "clear":
            cells, head = kc.clear(cells), 0
        case _:
            n = {"place1": 1, "place3": 3}[name]
            slots, found = kc.find_slots(cells, head, n)
            pos = p0 % 32 + np.arange(n, dtype=np.int32)
            cells = kc.place(cells, slots, pos, np.full(n, seq, np.int32))
            head = kc.next_head(slots) if found else head
    return cells, head


def plain_op(cells, head, name, seq, dst, p0, p1, d):
    match name:
        case "rm":
            cells.rm(seq, p0, p1)
        case "rm_any":
            cells.rm(None, p0, p1)
        case "cp":
            cells.cp(seq, dst, p0, p1)
        case "keep":
            cells.keep(seq)
        case "add":
            cells.add(seq, p0, p1, d)
        case "div":
            cells.div(seq, p0, p1, abs(d) + 1)
        case "clear":
            cells, head = PlainCells(N_CTX), 0
        case _:
            n = {"place1": 1, "place3": 3}[name]
            slots = cells.find(head, n)
            if slots is not None:
                cells.place(slots, [p0 % 32 + i for i in range(n)], seq)
                head = slots[-1] + 1
    return cells, head


def as_steps(history):
    steps = np.zeros((N_STEPS, 6), np.int32)
    for i, (name, *args) in enumerate(history):
        steps[i] = [OPS.index(name), *args]
    return steps


def at(states, i):
    return jax.tree.map(lambda x: np.asarray(x)[i], states)


@pytest.mark.parametrize(
    "n_words", [pytest.param(n, marks=[] if n == 2 else [pytest.mark.slow]) for n in SEQS_OF]
)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_lists_numpy_and_one_jitted_scan_agree_after_every_step(n_words, data):
    history = data.draw(histories(SEQS_OF[n_words]))
    on_device = device_program(n_words)(as_steps(history))
    cells, head = kc.create(N_CTX, 32 * n_words), 0
    lists, plain_head = PlainCells(N_CTX), 0
    for i, (name, *args) in enumerate(history):
        before, text = cells, render(cells)
        lists, plain_head = plain_op(lists, plain_head, name, *args)
        try:
            cells, head = host_op(cells, head, name, *args)
        except SharedCells:
            assert plain(cells).n_shared(args[0], args[2], args[3]) > 0
            assert render(cells) == text
            # Inside jit shared cells stay and the others move, as the lists do.
            cells = jax.tree.map(np.copy, at(on_device, i)[0])
        assert render(before) == text, "an old state was changed"
        after, device_head, freed, answers = at(on_device, i)
        assert render(cells) == render(lists) == render(after)
        assert head == plain_head == device_head
        assert queries(cells, args[0], *args[2:4]) == tuple(map(int, answers))
        assert kc.first_freed(before, cells) == freed[0]
        assert kc.lowered_head(before, cells, head) == freed[1]
        check_invariants(cells)


def check_invariants(cells):
    empty = ~cells.seqs.any(axis=1)
    np.testing.assert_array_equal(cells.pos == -1, empty)
    assert not cells.delta[empty].any()
    assert np.all(cells.pos[~empty] - cells.delta[~empty] >= 0)
    assert (cells.pos.dtype, cells.delta.dtype, cells.seqs.dtype) == (np.int32, np.int32, np.uint32)


@settings(max_examples=60)
@given(history=histories(256))
def test_answers_are_those_of_the_lists(history):
    cells, head = kc.create(N_CTX, 256), 0
    for name, *args in history:
        try:
            cells, head = host_op(cells, head, name, *args)
        except SharedCells:
            continue
        lists = plain(cells)
        mine = [lists.pos[c] for c in lists.hit(args[0], 0, None)]
        used = [c for c, pos in enumerate(lists.pos) if pos >= 0]
        assert queries(cells, args[0], *args[2:4]) == (
            len(used),
            N_CTX - len(used),
            max(used, default=-1) + 1,
            min(mine, default=-1),
            max(mine, default=-1),
            lists.n_shared(args[0], *args[2:4]),
        )


@settings(max_examples=60)
@given(history=histories(256), block_size=st.sampled_from([1, 4, 5, 12, 16]), data=st.data())
def test_blocks_of_lists_every_block_with_a_cell_of_the_sequences(history, block_size, data):
    cells, head = kc.create(N_CTX, 256), 0
    for name, *args in history:
        try:
            cells, head = host_op(cells, head, name, *args)
        except SharedCells:
            continue
    wanted = data.draw(st.lists(st.sampled_from([0, 1, 128, 255]), max_size=3))
    lists = plain(cells)
    expected = {c // block_size for c, s in enumerate(lists.seqs) if s & set(wanted)}
    blocks = kc.blocks_of(cells, wanted, block_size)
    assert blocks.dtype == np.int32
    assert blocks.tolist() == sorted(expected)
