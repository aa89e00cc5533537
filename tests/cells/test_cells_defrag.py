"""Defragmentation plans: llama.cpp's order, any chunking, nothing lost."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from plaincells import parse, plain, render

from kvrt import cells as kc
from kvrt.errors import BadConfig
from kvrt.upkeep.defrag import fragmentation, plan_defrag, should_defrag


@st.composite
def fragmented(draw):
    """Cells of several sequences, some shared, some with a pending shift, any order."""
    n_seq_max = draw(st.sampled_from([1, 40, 256]))
    owner = st.sampled_from(sorted({0, n_seq_max // 2, n_seq_max - 1}))
    cell = st.tuples(st.integers(0, 9), st.integers(-3, 3), st.sets(owner, min_size=1, max_size=2))
    words = []
    for c in draw(st.lists(st.none() | cell, min_size=1, max_size=24)):
        owners = c and ",".join(map(str, sorted(c[2])))
        words.append(f"{c[0]}{c[1]:+d}{{{owners}}}".replace("+0", "") if c else ".")
    return parse(" ".join(words), n_seq_max)


def apply(rows, plan, chunk, rng):
    """Runs a plan in chunks of even size, shuffled: all rows of a chunk are read, then written."""
    for moves in plan.rounds:
        parts = [moves[i : i + chunk] for i in range(0, len(moves), chunk)]
        rng.shuffle(parts)
        for part in parts:
            rows[part[:, 1]] = rows[part[:, 0]]
    return rows


def held(cells, rows):
    """What each row of a used cell means."""
    lists = plain(cells)
    return {
        int(rows[c]): (pos, lists.delta[c], frozenset(lists.seqs[c]))
        for c, pos in enumerate(lists.pos)
        if pos >= 0
    }


@pytest.mark.slow
@settings(max_examples=150)
@given(
    cells=fragmented(),
    by_sequence=st.booleans(),
    chunk=st.sampled_from([2, 4, 64]),
    rng=st.randoms(use_true_random=False),
)
def test_rows_keep_their_meaning_and_come_first(cells, by_sequence, chunk, rng):
    before, rows = render(cells), np.arange(len(cells.pos))
    after, plan = plan_defrag(cells, by_sequence)
    assert render(cells) == before
    assert held(after, apply(rows.copy(), plan, chunk, rng)) == held(cells, rows)
    assert kc.n_kv(after) == kc.n_used(after) == kc.n_used(cells)
    assert len(plan.rounds) <= (2 if by_sequence else 1)
    for moves in plan.rounds:
        check_round(moves)
    assert plan.n_moves == sum(map(len, plan.rounds))
    if by_sequence:
        lists = plain(after)
        order = [(min(s), p) for s, p in zip(lists.seqs, lists.pos, strict=True) if s]
        assert order == sorted(order)


def check_round(moves):
    """Swaps as neighbours at even places; otherwise no row is touched twice."""
    assert moves.dtype == np.int32 and len(moves)
    src, dst = moves.T.tolist()
    assert len(set(dst)) == len(dst) and len(set(src)) == len(src)
    for i, (a, b) in enumerate(zip(src, dst, strict=True)):
        assert a != b
        if b in src or a in dst:
            assert moves[i ^ 1].tolist() == [b, a]


def plain_plan(used):
    """llama.cpp's old defrag, one cell at a time: ids[i] is where cell i goes."""
    n_kv, n_used = len(used), sum(used)
    ids, i0 = [n_kv] * n_kv, 0
    while i0 < n_used:
        if used[i0]:
            ids[i0], i0 = i0, i0 + 1
            continue
        nh = 1
        while i0 + nh < n_used and not used[i0 + nh]:
            nh += 1
        nf, first = 0, n_kv
        while nf < nh:
            first -= 1
            nf += used[first] and ids[first] == n_kv
        for i1 in range(first, n_kv):
            if used[i1] and ids[i1] == n_kv and nh:
                ids[i1], i0, nh = i0, i0 + 1, nh - 1
    return sorted((i, to) for i, to in enumerate(ids) if used[i] and to != i)


@settings(max_examples=150)
@given(used=st.lists(st.booleans(), min_size=1, max_size=24))
def test_the_plain_plan_is_llama_cpps(used):
    cells = parse(" ".join(str(i) if u else "." for i, u in enumerate(used)))
    _, plan = plan_defrag(cells)
    moves = sorted(map(tuple, plan.rounds[0].tolist())) if plan.rounds else []
    assert moves == plain_plan(used)


def test_worked_plans():
    after, plan = plan_defrag(parse("0 . . 3 . 5{1} 6-2 7{0,1}"))
    assert render(after) == "0 6-2 7{0,1} 3 5{1} . . ."
    assert [m.tolist() for m in plan.rounds] == [[[6, 1], [7, 2], [5, 4]]]
    after, plan = plan_defrag(parse("1{1} 0{2} 1 0{1} . 0{0,2}"), by_sequence=True)
    assert render(after) == "0{0,2} 1 0{1} 1{1} 0{2} ."
    packed = parse("0 1 2 . .")
    for by_sequence in (False, True):
        after, plan = plan_defrag(packed, by_sequence)
        assert (render(after), plan.rounds, plan.n_moves) == ("0 1 2 . .", (), 0)


def test_no_limit_on_moves():
    n = 4096
    cells = kc.create(2 * n, 2)
    slots = np.arange(1, 2 * n, 2, dtype=np.int32)
    pos = np.arange(n, dtype=np.int32)[::-1].copy()
    cells = kc.place(cells, slots, pos, pos % 2)
    rows = np.arange(2 * n)
    for by_sequence in (False, True):
        after, plan = plan_defrag(cells, by_sequence)
        moved = rows.copy()
        for moves in plan.rounds:
            moved[moves[:, 1]] = moved[moves[:, 0]]
        assert kc.n_kv(after) == n
        np.testing.assert_array_equal(after.pos[:n], cells.pos[moved[:n]])
        np.testing.assert_array_equal(after.seqs[:n], cells.seqs[moved[:n]])


@pytest.mark.parametrize(
    ("n_kv", "n_used", "expected"),
    [
        (2047, 1, 0.0),
        (2048, 1024, 1 - 1280 / 2048),
        (2048, 1, 1 - 257 / 2048),
        (2048, 2048, 0.0),
        (0, 0, 0.0),
    ],
)
def test_fragmentation_is_llama_cpps(n_kv, n_used, expected):
    cells = kc.create(3000, 1)
    slots = np.concatenate([np.arange(n_used - 1), [n_kv - 1]])[:n_used].astype(np.int32)
    cells = kc.place(cells, slots, slots, np.zeros_like(slots))
    assert kc.n_kv(cells) == n_kv
    assert fragmentation(cells) == pytest.approx(expected, abs=1e-12)
    assert not should_defrag(cells, None)
    assert should_defrag(cells, 0.1) == (expected > 0.1)
    assert not should_defrag(cells, expected)


@pytest.mark.slow
@pytest.mark.parametrize("threshold", [-1, 1.5, float("nan")])
def test_a_threshold_that_is_no_fraction_is_refused(threshold):
    with pytest.raises(BadConfig) as bad:
        should_defrag(kc.create(4, 1), threshold)
    assert str(bad.value) == (
        f"defrag threshold is {threshold}; use 0 to 1, or None to turn it off"
    )
