"""Masks: the worked table, then every rule against one pair of positions at a time."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from kvrt import cells as kc
from kvrt.config import MaskSpec
from tests.oracle import sees

VISIBLE = jax.jit(kc.visible, static_argnums=0)
POSITIONS = np.arange(9, dtype=np.int32)
ONE = np.ones((9, 1), np.uint32)

O20 = [
    (MaskSpec(kind="window", size=3), 5, [3, 4, 5]),
    (MaskSpec(kind="window", size=3), 2, [0, 1, 2]),
    (MaskSpec(kind="chunked", size=4), 3, [0, 1, 2, 3]),
    (MaskSpec(kind="chunked", size=4), 4, [4]),
    (MaskSpec(kind="chunked", size=4), 7, [4, 5, 6, 7]),
    (MaskSpec(kind="chunked", size=4), 8, [8]),
    (MaskSpec(kind="symmetric", size=4), 3, [1, 2, 3, 4, 5]),
    (MaskSpec(), 4, [0, 1, 2, 3, 4]),
    (MaskSpec(kind="window", size=2, n_sink=2), 6, [0, 1, 5, 6]),
    (MaskSpec(kind="window", size=2, n_sink=2), 0, [0]),
    (MaskSpec(kind="chunked", size=4, n_sink=1), 5, [0, 4, 5]),
    (MaskSpec(kind="symmetric", size=2, n_sink=2), 0, [0, 1]),
]


@pytest.mark.parametrize("visible", [kc.visible, VISIBLE], ids=["host", "jit"])
@pytest.mark.parametrize(("mask", "query", "seen"), O20)
def test_o20_rules(mask, query, seen, visible):
    q = np.array([query], np.int32)
    assert np.flatnonzero(visible(mask, POSITIONS, ONE, q, ONE[:1])[0]).tolist() == seen


@pytest.mark.parametrize("kind", ["full", "window", "chunked", "symmetric"])
def test_o20_equal_positions_see_each_other(kind):
    mask = MaskSpec(kind=kind, size=0 if kind == "full" else 4)
    pos = np.array([5, 5], np.int32)
    assert np.asarray(kc.visible(mask, pos, ONE[:2], pos, ONE[:2])).all()


@st.composite
def scenes(draw):
    n_words = draw(st.sampled_from([1, 2, 8]))
    kind = draw(st.sampled_from(["full", "window", "chunked", "symmetric"]))
    size = 0 if kind == "full" else draw(st.integers(1, 6) | st.just(2**31 - 1))
    mask = MaskSpec(kind=kind, size=size, n_sink=draw(st.integers(0, 3)))
    pos = st.integers(0, 12) | st.sampled_from([-1, 2**31 - 1])
    owners = st.sets(st.sampled_from([0, 31, 32 * n_words - 1]), max_size=2)
    token = st.tuples(pos, owners).map(lambda x: (x[0], x[1] if x[0] >= 0 else set()))
    cells = draw(st.lists(token, min_size=5, max_size=5))
    queries = draw(st.lists(token, min_size=3, max_size=3))
    return mask, n_words, cells, queries


def words(owners, n_words):
    out = np.zeros((len(owners), n_words), np.uint32)
    for row, seqs in zip(out, owners, strict=True):
        for s in seqs:
            row[s // 32] |= np.uint32(1 << s % 32)
    return out


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(scene=scenes())
def test_every_rule_is_that_of_one_pair(scene):
    mask, n_words, cells, queries = scene
    k_pos, k_seqs = zip(*cells, strict=True)
    q_pos, q_seqs = zip(*queries, strict=True)
    expected = [
        [bool(ks & qs) and kp >= 0 and sees(mask, kp, qp) for kp, ks in cells] for qp, qs in queries
    ]
    args = (
        np.array(k_pos, np.int32),
        words(k_seqs, n_words),
        np.array(q_pos, np.int32),
        words(q_seqs, n_words),
    )
    np.testing.assert_array_equal(kc.visible(mask, *args), expected)
    np.testing.assert_array_equal(kc.visible(mask, *map(jnp.asarray, args)), expected)


def test_an_empty_cell_is_never_seen_even_with_a_stale_owner():
    pos, q = np.array([-1], np.int32), np.array([0], np.int32)
    for kind in ("full", "window", "chunked", "symmetric"):
        mask = MaskSpec(kind=kind, size=0 if kind == "full" else 4, n_sink=2)
        assert not np.asarray(kc.visible(mask, pos, ONE[:1], q, ONE[:1])).any()


VISIBILITY = jax.jit(kc.mask.visibility, static_argnums=0)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(scene=scenes())
def test_visibility_is_that_of_all_pairs(scene):
    mask, n_words, cells, queries = scene
    k_pos, k_seqs = zip(*cells, strict=True)
    q_pos, q_seqs = zip(*queries, strict=True)
    args = (
        np.array(k_pos, np.int32),
        words(k_seqs, n_words),
        np.array(q_pos, np.int32),
        words(q_seqs, n_words),
    )
    seen = kc.visible(mask, *args)
    found = int(kc.mask.visibility(mask, *args))
    assert found == int(VISIBILITY(mask, *map(jnp.asarray, args)))
    real = args[2] >= 0
    assert found != 0 or not seen.any()
    assert found != 2 or (real.any() and seen[real].all())


@pytest.mark.parametrize(
    ("mask", "first", "found"),
    [
        (MaskSpec(), 0, 2),
        (MaskSpec(), 3, 2),  # its last cell is where the first query is
        (MaskSpec(), 4, 1),
        (MaskSpec(), 9, 1),
        (MaskSpec(), 10, 0),
        (MaskSpec(kind="window", size=3), 0, 0),
        (MaskSpec(kind="window", size=4), 1, 1),
        (MaskSpec(kind="window", size=4, n_sink=1), 0, 1),
        (MaskSpec(kind="window", size=7), 3, 2),
        (MaskSpec(kind="window", size=6), 3, 1),
        (MaskSpec(kind="chunked", size=12), 3, 2),
        (MaskSpec(kind="chunked", size=5), 1, 0),
        (MaskSpec(kind="symmetric", size=6), 9, 1),
        (MaskSpec(kind="symmetric", size=14), 6, 2),
    ],
)
def test_visibility_of_four_cells_and_four_queries(mask, first, found):
    k, q = np.arange(first, first + 4, dtype=np.int32), np.arange(6, 10, dtype=np.int32)
    assert kc.mask.visibility(mask, k, ONE[:4], q, ONE[:4]) == found
    # Padding neither sees nor is asked; cells of another sequence are not seen.
    q[3], bits = -1, ONE[:4].copy()
    bits[3] = 0
    if found == 2:
        assert kc.mask.visibility(mask, k, ONE[:4], q, bits) == 2
    assert kc.mask.visibility(mask, k, ONE[:4] * np.uint32(2), q, bits) == 0
    k[1] = -1
    assert kc.mask.visibility(mask, k, ONE[:4], q, bits) <= 1
