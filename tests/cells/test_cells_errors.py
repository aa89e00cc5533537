"""What the host refuses, in which words, and that nothing has changed then."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plaincells import parse, render

from kvrt import cells as kc
from kvrt.errors import BadRange, BadSequence, CacheFull, SharedCells

TOP = 2**31 - 1
START = f"0{{0,1}} 1{{0,1}} 2 3-1 {TOP - 2}{{2}} . ."

REFUSED = [
    (
        lambda c: kc.seq_rm(c, 32),
        BadSequence,
        "sequence 32 does not exist, ids are 0 to 31; raise n_seq_max",
    ),
    (
        lambda c: kc.seq_cp(c, 0, -1),
        BadSequence,
        "sequence -1 does not exist, ids are 0 to 31; raise n_seq_max",
    ),
    (lambda c: kc.seq_cp(c, 40, 0), BadSequence, "sequence 40 does not exist"),
    (lambda c: kc.seq_keep(c, 32), BadSequence, "sequence 32 does not exist"),
    (lambda c: kc.seq_add(c, -2, 0, None, 1), BadSequence, "sequence -2 does not exist"),
    (lambda c: kc.seq_div(c, 99, 0, None, 2), BadSequence, "sequence 99 does not exist"),
    (lambda c: kc.seq_pos_min(c, 32), BadSequence, "sequence 32 does not exist"),
    (lambda c: kc.seq_pos_max(c, 32), BadSequence, "sequence 32 does not exist"),
    (
        lambda c: kc.check_seq_id(2, 2),
        BadSequence,
        "sequence 2 does not exist, ids are 0 to 1; raise n_seq_max",
    ),
    (
        lambda c: kc.seq_rm(c, 0, 3, 1),
        BadRange,
        "range [3, 1) is reversed; p0 must not exceed p1",
    ),
    (
        lambda c: kc.seq_cp(c, 0, 1, -1),
        BadRange,
        f"range [-1, {TOP}) is negative; start at 0, and end with p1=None",
    ),
    (
        lambda c: kc.seq_add(c, 0, 0, -1, 1),
        BadRange,
        "range [0, -1) is negative; start at 0, and end with p1=None",
    ),
    (
        lambda c: kc.seq_rm(c, None, 0, 2**31),
        BadRange,
        f"range [0, {2**31}) exceeds the last position {TOP}; lower it",
    ),
    (lambda c: kc.n_shared(c, 0, 2, 1), BadRange, "range [2, 1) is reversed"),
    (lambda c: kc.plan_split(c, 0, 2, 1, 0), BadRange, "range [2, 1) is reversed"),
    (
        lambda c: kc.seq_add(c, 2, 0, None, 3),
        BadRange,
        f"position {TOP - 2} would move by 3 to {TOP + 1}, the limit is {TOP}; move by 2 at most",
    ),
    (
        lambda c: kc.seq_add(c, 2, 0, None, 2**31),
        BadRange,
        f"a move by {2**31} tokens leaves [0, {TOP}] from anywhere; lower d",
    ),
    (lambda c: kc.seq_add(c, 2, 0, None, -(2**31)), BadRange, "leaves [0, 2147483647]"),
    (
        lambda c: kc.seq_div(c, 2, 0, None, 0),
        BadRange,
        f"positions cannot be divided by 0; use 1 to {TOP}",
    ),
    (lambda c: kc.seq_div(c, 2, 0, None, -2), BadRange, "positions cannot be divided by -2"),
    (
        lambda c: kc.seq_add(c, 0, 0, None, 1),
        SharedCells,
        "seq_add on sequence 0 would move 2 of 4 cells that other sequences own as well; split "
        "them first with plan_split",
    ),
    (
        lambda c: kc.seq_div(c, 1, 0, 1, 2),
        SharedCells,
        "seq_div on sequence 1 would move 1 of 1 cells that other sequences own as well",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_refused_in_clear_words_with_nothing_changed(call, error, text):
    cells = parse(START)
    with pytest.raises(error) as caught:
        call(cells)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert render(cells) == START


def test_the_last_position_can_be_reached_and_removed():
    cells = kc.seq_add(parse(START), 2, 0, None, 2)
    assert kc.seq_pos_max(cells, 2) == TOP
    assert kc.seq_pos_min(cells, 2) == TOP
    assert kc.seq_pos_max(kc.seq_rm(cells, 2, 0, TOP), 2) == TOP
    assert kc.seq_pos_max(kc.seq_rm(cells, 2), 2) == -1
    assert kc.seq_pos_max(kc.seq_add(cells, 2, 0, None, -TOP), 2) == 0


def test_a_range_may_be_empty_or_hold_unshared_cells_only():
    cells = parse(START)
    assert render(kc.seq_add(cells, 0, 1, 1, 5)) == START
    moved = kc.seq_add(cells, 0, 2, None, -1)
    assert render(moved).startswith("0{0,1} 1{0,1} 1-1 2-2 ")


def test_numpy_and_device_scalars_are_numbers_too():
    cells = parse("0 1 2 3")
    for one in (np.int64(1), np.array(1, np.int32), jnp.int32(1)):
        assert render(kc.seq_rm(cells, one - one, one, one + one)) == "0 . 2 3"
    device = jax.device_put(cells)
    assert render(kc.seq_rm(device, 0, 1, np.int32(2))) == "0 . 2 3"


@pytest.mark.parametrize("op", [kc.seq_add, kc.seq_div])
def test_inside_jit_shared_cells_stay_and_are_counted(op):
    cells = jax.device_put(parse("2{0,1} 4 6{1,200} 8{0,200}", 256))
    moved = jax.jit(op)(cells, 0, 0, None, 2)
    assert render(moved).split()[1] in ("6+2", "2-2")
    assert [render(moved).split()[i] for i in (0, 2, 3)] == ["2{0,1}", "6{1,200}", "8{0,200}"]
    assert int(jax.jit(kc.n_shared)(cells, 0, 0, None)) == 2
    assert int(jax.jit(kc.n_shared)(cells, 200, 7, None)) == 1


@pytest.mark.parametrize("seq_id", [-1, 32, 1000])
def test_inside_jit_a_sequence_without_a_bit_owns_nothing(seq_id):
    cells = jax.device_put(parse("0{31} 1{0} ."))
    for op, args in ((kc.seq_rm, ()), (kc.seq_add, (0, None, 1)), (kc.seq_cp, (0,))):
        assert render(jax.jit(op)(cells, seq_id, *args)) == "0{31} 1 ."
    assert int(jax.jit(kc.seq_pos_max)(cells, seq_id)) == -1


def test_plan_split_gives_private_copies():
    cells = parse("0{0,1} 1+1{0,1,40} . 2 3{1} . .", 64)
    after, src, dst = kc.plan_split(cells, 0, 0, None, 5)
    assert render(after) == "0{1} 1+1{1,40} . 2 3{1} 0 1+1"
    assert (src.tolist(), dst.tolist()) == ([0, 1], [5, 6])
    assert src.dtype == dst.dtype == np.int32
    assert kc.n_shared(after, 0) == 0
    assert render(kc.seq_add(after, 0, 0, None, -1)) == "0{1} 1+1{1,40} . 1-1 3{1} . 0"


def test_plan_split_of_nothing_shared_is_the_same_state():
    cells = parse("0{0,1} 1 .")
    after, src, dst = kc.plan_split(cells, 0, 1, None, 0)
    assert after is cells
    assert len(src) == len(dst) == 0


def test_plan_split_says_when_there_is_no_room():
    cells = parse("0{0,1} 1{0,1} 2{0,1} .")
    with pytest.raises(CacheFull) as full:
        kc.plan_split(cells, 1, 0, None, 0)
    assert str(full.value) == (
        "splitting 3 shared cells of sequence 1 needs 3 cells, 1 of 4 are empty; "
        "remove positions or raise n_ctx"
    )
    assert render(cells) == "0{0,1} 1{0,1} 2{0,1} ."
