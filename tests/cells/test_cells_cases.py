"""The worked cases of llama.cpp's attention cache, on the host and inside jit."""

import dataclasses

import jax
import numpy as np
import pytest
from plaincells import parse, render

from kvrt import cells as kc
from kvrt.errors import BadRange, CacheFull

JITTED = {
    name: jax.jit(getattr(kc, name))
    for name in ("seq_rm", "seq_cp", "seq_keep", "seq_add", "seq_div", "place", "clear")
}
FIND = jax.jit(kc.find_slots, static_argnums=2)
MOVED_HEAD = {
    "seq_rm": kc.lowered_head,
    "seq_keep": kc.lowered_head,
    "seq_add": lambda before, after, head: kc.first_freed(before, after),
    "clear": lambda before, after, head: 0,
}


class Player:
    """Cells and head, as a caller keeps them."""

    def __init__(self, start, head, jit):
        self.cells, self.head = parse(start), head
        self.jit = jit
        if jit:
            self.cells = jax.device_put(self.cells)

    def do(self, name, *args):
        op = JITTED[name] if self.jit else getattr(kc, name)
        before, self.cells = self.cells, op(self.cells, *args)
        if name in MOVED_HEAD and not (name == "seq_add" and (args[3] == 0 or args[1] == args[2])):
            # As a caller does, on the host.
            before, after = jax.device_get((before, self.cells))
            self.head = int(MOVED_HEAD[name](before, after, self.head))

    def decode(self, first, last):
        pos = np.arange(first, last + 1, dtype=np.int32)
        if self.jit:
            slots, found = FIND(self.cells, self.head, len(pos))
            if not found:
                raise CacheFull("not found")
        else:
            slots = kc.plan_slots(self.cells, self.head, len(pos))
        place = JITTED["place"] if self.jit else kc.place
        self.cells = place(self.cells, slots, pos, np.zeros_like(pos))
        slots = np.asarray(slots)
        self.head = int(kc.next_head(slots))
        return slots.tolist()


def rm(*args):
    return ("seq_rm", *args)


def cp(*args):
    return ("seq_cp", *args)


def add(*args):
    return ("seq_add", *args)


def div(*args):
    return ("seq_div", *args)


def keep(*args):
    return ("seq_keep", *args)


def decode(first, last):
    return ("decode", first, last)


# Per line: name, map and head before, then pairs of a step and the map and head (or
# slots) that must follow; None where the case says nothing.
E8, E12, E16 = (" ".join("." * n) for n in (8, 12, 16))
FULL15 = "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 ."
CASES = [
    ("O1", E8, 0, [(decode(0, 3), "0 1 2 3 . . . .", 4, [0, 1, 2, 3])]),
    (
        "O2",
        "0 1 2 3 . . . .",
        4,
        [
            (rm(0, 1, 3), "0 . . 3 . . . .", 1, None),
            (decode(4, 6), "0 4 5 3 6 . . .", 5, [1, 2, 4]),
        ],
    ),
    (
        "O4 restart",
        ". . . . . . . . 0 1 . . . . . .",
        10,
        [(decode(2, 2), "2 . . . . . . . 0 1 . . . . . .", 1, [0])],
    ),
    (
        "O4 no restart",
        ". . . . . . . . 0 1 . . . . . .",
        10,
        [(decode(2, 5), ". . . . . . . . 0 1 2 3 4 5 . .", 14, [10, 11, 12, 13])],
    ),
    (
        "O6",
        ". . 2 3 4 5 . .",
        6,
        [(decode(6, 9), "8 9 2 3 4 5 6 7", 2, [6, 7, 0, 1])],
    ),
    (
        "O7",
        "0 1 2 3 .",
        4,
        [
            (cp(0, 1, 0, None), "0{0,1} 1{0,1} 2{0,1} 3{0,1} .", 4, None),
            (rm(0, 2, None), "0{0,1} 1{0,1} 2{1} 3{1} .", 4, None),
            (rm(1, 0, None), "0 1 . . .", 2, None),
        ],
    ),
    (
        "O9",
        "0 1 2 3 4 5 . .",
        6,
        [(add(0, 0, None, -2), ". . 0-2 1-2 2-2 3-2 . .", 0, None)],
    ),
    (
        "O10",
        "0 1 2 3 4 5",
        6,
        [
            (rm(0, 1, 3), "0 . . 3 4 5", 1, None),
            (add(0, 3, None, -2), "0 . . 1-2 2-2 3-2", 0, None),
            (add(0, 2, 4, 3), "0 . . 1-2 5+1 6+1", 0, None),
        ],
    ),
    (
        "O11",
        "0 1 2 .",
        3,
        [
            (add(0, 1, None, 4), "0 5+4 6+4 .", 0, None),
            (add(0, 5, None, -4), "0 1 2 .", 0, None),
        ],
    ),
    (
        "O12",
        "0 1 2 3 . .",
        4,
        [
            (add(0, 2, 2, 5), "0 1 2 3 . .", 4, None),
            (add(0, 0, None, 0), "0 1 2 3 . .", 4, None),
            (div(0, 0, None, 1), "0 1 2 3 . .", 4, None),
            (div(0, 3, 3, 2), "0 1 2 3 . .", 4, None),
            (rm(0, 2, 2), "0 1 2 3 . .", 4, None),
            (rm(0, 0, 2), ". . 2 3 . .", 0, None),
        ],
    ),
    (
        "O14",
        "0 1 2 3 4 5 6 7 . . . .",
        8,
        [(div(0, 2, 6, 2), "0 1 1-1 1-2 2-2 2-3 6 7 . . . .", 8, None)],
    ),
    (
        "O15",
        FULL15,
        15,
        [
            (rm(0, 2, 8), "0 1 . . . . . . 8 9 10 11 12 13 14 .", 2, None),
            (add(0, 8, 15, -6), "0 1 . . . . . . 2-6 3-6 4-6 5-6 6-6 7-6 8-6 .", 0, None),
            (decode(9, 9), "0 1 9 . . . . . 2-6 3-6 4-6 5-6 6-6 7-6 8-6 .", 3, [2]),
        ],
    ),
    (
        "O22 keep",
        "0{0,2} 0{1} 1{0} 1{1}",
        4,
        [(keep(2), "0{2} . . .", 1, None)],
    ),
    (
        "O22 any",
        "0{0,1} 1{0} 2{0} 1{1}",
        4,
        [(rm(None, 1, None), "0{0,1} . . .", 1, None)],
    ),
    (
        "O23",
        "0 1 2 3",
        4,
        [(rm(0, 0, 1), ". 1 2 3", 0, None), (decode(4, 4), "4 1 2 3", 1, [0])],
    ),
    ("clear", "0{3} 1-2 . .", 3, [(("clear",), ". . . .", 0, None)]),
]
PLAYS = [
    pytest.param(*case[1:], jit, id=f"{case[0]}-{'jit' if jit else 'host'}")
    for case in CASES
    for jit in (False, True)
]


@pytest.mark.parametrize(("start", "head", "steps", "jit"), PLAYS)
def test_case(start, head, steps, jit):
    player = Player(start, head, jit)
    for (name, *args), after, head_after, slots in steps:
        if name == "decode":
            assert player.decode(*args) == slots
        else:
            player.do(name, *args)
        assert render(player.cells) == after
        assert player.head == head_after


def test_o2_and_o7_counts():
    cells = parse("0 4 5 3 6 . . .")
    assert (kc.n_used(cells), kc.n_kv(cells), kc.n_free(cells)) == (5, 5, 3)
    assert [kc.seq_pos_max(cells, 0), kc.seq_pos_min(cells, 0)] == [6, 0]
    shared = parse("0{0,1} 1{0,1} 2{1} 3{1}")
    assert [kc.seq_pos_min(shared, s) for s in (0, 1, 2)] == [0, 0, -1]
    assert [kc.seq_pos_max(shared, s) for s in (0, 1, 2)] == [1, 3, -1]
    assert kc.n_kv(parse(". . .")) == 0


@pytest.mark.parametrize("jit", [False, True])
def test_o23_a_full_cache_stays_as_it_is(jit):
    player = Player("0 1 2 3", 4, jit)
    with pytest.raises(CacheFull):
        player.decode(4, 4)
    assert (render(player.cells), player.head) == ("0 1 2 3", 4)


def test_o12_a_reversed_or_negative_range_is_refused_where_llama_cpp_guesses():
    cells = parse("0 1 2 3")
    for p0, p1 in ((2, 0), (-1, 2), (0, -1)):
        with pytest.raises(BadRange):
            kc.seq_rm(cells, 0, p0, p1)
    assert render(cells) == "0 1 2 3"
    # Nobody can raise inside jit: a reversed range matches no cell.
    assert render(JITTED["seq_rm"](jax.device_put(cells), 0, 2, 0)) == "0 1 2 3"


@pytest.mark.parametrize("jit", [False, True])
def test_o16_self_extend(jit):
    # llama.cpp's loop with n = 2, w = 4; it rotates what is pending before each decode.
    n, w, ga_i, n_past = 2, 4, 0, 0
    player, log = Player(E12, 0, jit), []
    for _ in range(12):
        if n_past >= ga_i + w:
            ib, bd = (n * ga_i) // w, (w // n) * (n - 1)
            dd = w // n - ib * bd - w
            player.do("seq_add", 0, ga_i, n_past, ib * bd)
            player.do("seq_div", 0, ga_i + ib * bd, ga_i + ib * bd + w, n)
            player.do("seq_add", 0, ga_i + ib * bd + w, n_past + ib * bd, dd)
            n_past, ga_i = n_past - bd, ga_i + w // n
            log.append((n_past, ga_i, render(player.cells).rstrip(" .")))
        pos = player.cells.pos
        player.cells = dataclasses.replace(player.cells, delta=pos * 0)
        player.decode(n_past, n_past)
        n_past += 1
    assert log == [(2, 2, "0 0-1 1-1 1-2"), (4, 4, "0 0 1 1 2 2-1 3-1 3-2")]
    assert (n_past, render(player.cells)) == (8, "0 0 1 1 2 2 3 3 4 5 6 7")
