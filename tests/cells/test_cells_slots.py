"""The ring search, its host plan and placement, against llama.cpp's loops over lists."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from plaincells import parse, plain, render

from kvrt import cells as kc
from kvrt.errors import BadRange, BadSequence, CacheFull

FIND = jax.jit(kc.find_slots, static_argnums=2)
JIT_N_CTX = 9


def with_used(used):
    cells = kc.create(len(used), 1)
    slots = np.flatnonzero(used).astype(np.int32)
    return kc.place(cells, slots, slots, np.zeros_like(slots))


def rings(n_ctx):
    used = st.lists(st.booleans(), min_size=n_ctx, max_size=n_ctx)
    return used.flatmap(lambda u: st.tuples(st.just(u), st.integers(0, len(u))))


@settings(max_examples=150)
@given(
    ring=st.integers(1, 14).flatmap(rings),
    n=st.integers(0, 15),
    knows_used=st.booleans(),
)
def test_host_search_is_the_loop(ring, n, knows_used):
    used, head = ring
    cells = with_used(used)
    expected = plain(cells).find(head, n)
    slots, found = kc.find_slots(cells, head, n)
    assert bool(found) == (expected is not None)
    assert slots.dtype == np.int32
    assert slots.tolist() == ([len(used)] * n if expected is None else expected)
    n_used = sum(used) if knows_used else None
    if expected is None:
        with pytest.raises(CacheFull):
            kc.plan_slots(cells, head, n, n_used=n_used)
        return
    planned = kc.plan_slots(cells, head, n, n_used=n_used)
    assert planned.dtype == np.int32
    assert planned.tolist() == expected


@settings(max_examples=200, deadline=None)
@given(ring=rings(JIT_N_CTX), n=st.sampled_from([1, 2, 5, 9, 10]))
def test_jitted_search_is_the_loop(ring, n):
    used, head = ring
    cells = with_used(used)
    expected = plain(cells).find(head, n)
    slots, found = FIND(jax.device_put(cells), head, n)
    assert bool(found) == (expected is not None)
    assert slots.dtype == jnp.int32
    assert slots.tolist() == ([JIT_N_CTX] * n if expected is None else expected)


def test_the_errors_name_what_was_wanted_found_and_helps():
    cells = parse(". 1 . 3 4 . . 7")
    with pytest.raises(CacheFull) as full:
        kc.plan_slots(cells, 0, 5)
    assert str(full.value) == (
        "batch needs 5 cells, 4 of 8 are empty; remove positions, shift the context or raise n_ctx"
    )


@pytest.mark.parametrize("n_tokens", [1, 3])
@pytest.mark.parametrize("jit", [False, True])
def test_place_drops_padding_and_resets_what_was_there(n_tokens, jit):
    cells = parse("5+2{1,40} . . 3 .", 64)
    slots = np.array([5, 0, 9, 4][:: -1 if n_tokens == 1 else 1][:n_tokens], np.int32)
    pos = np.arange(7, 7 + n_tokens, dtype=np.int32)
    seqs = np.full(n_tokens, 33, np.int32)
    place = jax.jit(kc.place) if jit else kc.place
    after = place(jax.device_put(cells) if jit else cells, slots, pos, seqs)
    expected = {1: "5+2{1,40} . . 3 7{33}", 3: "8{33} . . 3 ."}[n_tokens]
    assert render(after) == expected
    assert render(cells) == "5+2{1,40} . . 3 ."


def test_place_of_padding_alone_changes_nothing_whatever_it_holds():
    cells = parse("0 . .")
    for n in (1, 2):
        padding, no_token = np.full(n, 3, np.int32), np.full(n, -1, np.int32)
        assert render(kc.place(cells, padding, no_token, no_token)) == "0 . ."


@pytest.mark.parametrize("n", [1, 2])
def test_place_refuses_tokens_without_position_or_sequence(n):
    cells, slots = parse(". . ."), np.arange(n, dtype=np.int32)
    good, bad = np.zeros(n, np.int32), np.arange(-n, 0, dtype=np.int32)
    with pytest.raises(BadRange, match="negative"):
        kc.place(cells, slots, bad, good)
    with pytest.raises(BadSequence, match="does not exist, ids are 0 to 31; raise n_seq_max"):
        kc.place(cells, slots, good, bad)
    with pytest.raises(BadSequence, match="sequence 32 does not exist"):
        kc.place(cells, slots, good, good + 32)


@pytest.mark.parametrize(
    ("slots", "head"),
    [([6, 7, 0, 1], 2), ([7], 8), ([3, 4, 8, 8], 5), ([8, 8], 0)],
)
def test_next_head_follows_the_last_slot_that_is_no_padding(slots, head):
    slots = np.array(slots, np.int32)
    assert kc.next_head(slots, 8) == head
    assert int(jax.jit(kc.next_head, static_argnums=1)(slots, 8)) == head
    if 8 not in slots:
        assert kc.next_head(slots) == head


def test_blocks_of_a_part_filled_last_block():
    cells = parse("0 . . . 4{1} . 6{0,1} . . 9{40}", 64)
    assert kc.blocks_of(cells, [0], 4).tolist() == [0, 1]
    assert kc.blocks_of(cells, np.array([1], np.int32), 4).tolist() == [1]
    assert kc.blocks_of(cells, [40, 0], 4).tolist() == [0, 1, 2]
    assert kc.blocks_of(cells, [2], 4).tolist() == []
    with pytest.raises(BadSequence):
        kc.blocks_of(cells, [64], 4)
