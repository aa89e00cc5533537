"""Cells with rows of numbers against the oracle's lists, and the oracle against mathematics."""

import functools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvrt import cells as kc
from kvrt.config import MaskSpec
from kvrt.errors import CacheFull
from kvrt.upkeep.defrag import plan_defrag
from tests.oracle import Oracle, rope

N_CTX, SEQS = 16, (0, 1, 31, 32, 255)


class RowCache:
    """Cells and one number a row, moved as plans say; ids stand for keys and values."""

    def __init__(self):
        self.cells, self.head = kc.create(N_CTX, 256), 0
        self.ids = np.full(N_CTX, -1)

    def append(self, seq, pos, ids):
        slots = kc.plan_slots(self.cells, self.head, len(pos))
        self.cells = kc.place(self.cells, slots, pos, np.full(len(pos), seq, np.int32))
        self.ids[slots] = ids
        self.head = kc.next_head(slots)

    def move(self, op, seq, p0, p1, d):
        self.cells, src, dst = kc.plan_split(self.cells, seq, p0, p1, self.head)
        self.ids[dst] = self.ids[src]
        self.cells = op(self.cells, seq, p0, p1, d)

    def defrag(self, by_sequence):
        self.cells, plan = plan_defrag(self.cells, by_sequence)
        for moves in plan.rounds:
            self.ids[moves[:, 1]] = self.ids[moves[:, 0]]
        self.head = kc.n_used(self.cells)

    def content(self, seq):
        mine = kc.owned(self.cells, seq)
        return sorted(zip(self.cells.pos[mine].tolist(), self.ids[mine].tolist(), strict=True))


SEQ = st.sampled_from(SEQS)
RANGE = st.tuples(st.integers(0, 12), st.none() | st.integers(0, 12)).map(
    lambda r: (min(r), max(r)) if r[1] is not None else r
)
STEP = st.one_of(
    st.tuples(st.just("append"), SEQ, st.integers(1, 4)),
    st.tuples(st.just("append"), SEQ, st.integers(1, 4)),
    st.tuples(st.just("rm"), st.none() | SEQ, RANGE),
    st.tuples(st.just("cp"), SEQ, SEQ, RANGE),
    st.tuples(st.just("keep"), SEQ),
    st.tuples(st.just("add"), SEQ, RANGE, st.integers(-4, 4)),
    st.tuples(st.just("div"), SEQ, RANGE, st.integers(1, 3)),
    st.tuples(st.just("defrag"), st.booleans()),
)


@pytest.mark.slow
@settings(max_examples=60)
@given(history=st.lists(STEP, max_size=25))
def test_cells_and_rows_hold_what_the_oracle_holds(history):
    cache, oracle, n_drawn = RowCache(), Oracle(), 0
    for step in history:
        n_drawn = play(cache, oracle, step, n_drawn)
        for seq in SEQS:
            held = sorted((r.pos, int(r.k[0, 0])) for r in oracle.of(seq))
            assert cache.content(seq) == held
            assert kc.seq_pos_min(cache.cells, seq) == oracle.pos_min(seq)
            assert kc.seq_pos_max(cache.cells, seq) == oracle.pos_max(seq)
            assert kc.n_shared(cache.cells, seq) == oracle.n_shared(seq)
        assert kc.n_used(cache.cells) == oracle.n_used()


def play(cache, oracle, step, n_drawn):
    name, *args = step
    cells = cache.cells
    match name:
        case "append":
            seq, n = args
            pos = oracle.pos_max(seq) + 1 + np.arange(n, dtype=np.int32)
            ids = n_drawn + np.arange(n)
            if oracle.n_used() + n > N_CTX:
                with pytest.raises(CacheFull):
                    cache.append(seq, pos, ids)
                return n_drawn
            cache.append(seq, pos, ids)
            oracle.append(seq, pos, [(np.array([[i]]), np.array([[i]])) for i in ids])
            return n_drawn + n
        case "rm":
            cache.cells = kc.seq_rm(cells, args[0], *args[1])
            oracle.rm(args[0], *args[1])
        case "cp":
            cache.cells = kc.seq_cp(cells, args[0], args[1], *args[2])
            oracle.cp(args[0], args[1], *args[2])
        case "keep":
            cache.cells = kc.seq_keep(cells, args[0])
            oracle.keep(args[0])
        case "add" | "div":
            seq, (p0, p1), d = args
            idle = d == (0 if name == "add" else 1)
            if idle:
                return n_drawn
            op = kc.seq_add if name == "add" else kc.seq_div
            if oracle.n_used() + oracle.n_shared(seq, p0, p1) > N_CTX:
                with pytest.raises(CacheFull):
                    cache.move(op, seq, p0, p1, d)
                return n_drawn
            cache.move(op, seq, p0, p1, d)
            (oracle.add if name == "add" else oracle.div)(seq, p0, p1, d)
        case "defrag":
            cache.defrag(args[0])
    return n_drawn


def rows(rng, n, heads=2, dim=4):
    return [(rng.normal(size=(heads, dim)), rng.normal(size=(heads, dim))) for _ in range(n)]


def test_the_oracle_attends_by_the_formula():
    rng = np.random.default_rng(0)
    oracle, held = Oracle(), rows(rng, 5)
    oracle.append(0, range(5), held)
    q, sinks = rng.normal(size=(1, 4, 4)), np.array([0.5, -1.0, 2.0, 0.0])
    k, v = (np.stack([r[i] for r in held]) for i in (0, 1))
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    s = 3.0 * np.tanh(np.einsum("hd,nhd->hn", q[0], k) * 0.5 / 3.0)
    w = np.exp(s)
    expected = np.einsum("hn,nhd->hd", w, v) / (w.sum(axis=1) + np.exp(sinks))[:, None]
    out = oracle.attend(0, q, [4], MaskSpec(), 0.5, soft_cap=3.0, sinks=sinks)
    np.testing.assert_allclose(out[0], expected, rtol=1e-12)
    window = MaskSpec(kind="window", size=1)
    alone = oracle.attend(0, q, [2], window, 0.5)
    np.testing.assert_allclose(alone[0], v[2], rtol=1e-12)
    assert not oracle.attend(1, q, [2], window, 0.5).any()


@pytest.mark.parametrize("layout", ["norm", "neox"])
def test_the_oracle_turns_keys_by_complex_numbers(layout):
    x = np.random.default_rng(1).normal(size=(3, 8))
    turned = rope(x, 7, n_rot=6, base=100.0, layout=layout)
    a, b = (slice(0, 6, 2), slice(1, 6, 2)) if layout == "norm" else (slice(0, 3), slice(3, 6))
    z = (x[:, a] + 1j * x[:, b]) * np.exp(7j * 100.0 ** (-np.arange(3) / 3))
    np.testing.assert_allclose(turned[:, a], z.real, rtol=1e-12)
    np.testing.assert_allclose(turned[:, b], z.imag, rtol=1e-12)
    np.testing.assert_array_equal(turned[:, 6:], x[:, 6:])


@pytest.mark.slow
def test_o9_and_relative_positions():
    # O9: after moving down by two, the next token sees what it saw without the move.
    rng = np.random.default_rng(2)
    held, q = rows(rng, 6), rng.normal(size=(1, 2, 4))
    turn = functools.partial(rope, n_rot=4)
    shifted, cut = Oracle(), Oracle()
    for oracle in (shifted, cut):
        oracle.append(0, range(6), held)
    shifted.add(0, 0, None, -2)
    cut.rm(0, 0, 2)
    outs = [
        oracle.attend(0, q, [pos], MaskSpec(), 0.5, rope_fn=turn)
        for oracle, pos in ((shifted, 4), (cut, 6))
    ]
    np.testing.assert_allclose(outs[0], outs[1], rtol=1e-12)
