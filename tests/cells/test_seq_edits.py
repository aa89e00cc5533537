"""Edits as values: the operations of the same names on cells, known to every part of a cache."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from named_edits import NamedEdits
from plaincells import parse, render

from kvrt import MaskSpec
from kvrt import cells as kc
from kvrt.cache.last_logits import LastLogits
from kvrt.cellcache import contents, history
from kvrt.cellcache import group as groups
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.group import CellGroup
from kvrt.cellcache.history import TokenHistory
from kvrt.cellcache.recurrent import RecurrentStates
from kvrt.errors import BadSequence

edit = NamedEdits(kc.apply)
SHOWN = "0{0,1} 1{0} 2{0} . 3{1}"
CALLS = {
    "seq_rm": (0, 1, 2),
    "seq_cp": (0, 2, 1, None),
    "seq_keep": (1,),
    "seq_add": (0, 1, None, 5),
    "seq_div": (0, 1, None, 2),
}
EDITS = [
    kc.Remove(seq_id=0, p0=9),
    kc.Remove(seq_id=None),
    kc.Copy(src=0, dst=1),
    kc.Keep(seq_id=1),
    kc.Shift(seq_id=0, p0=9, d=3),
    kc.Divide(seq_id=0, p0=9, d=3),
]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_an_edit_is_the_operation_of_its_name(name, jit):
    cells = parse(SHOWN)
    expected = render(getattr(kc, name)(cells, *CALLS[name]))
    if jit:
        cells = jax.device_put(cells)
    apply = getattr(edit, name.removeprefix("seq_"))
    assert render(apply(cells, *CALLS[name])) == expected


def test_the_cases_are_all_kinds_of_edits():
    assert {type(x) for x in EDITS} == set(typing.get_args(kc.SeqEdit))


@pytest.mark.parametrize("value", EDITS, ids=lambda x: type(x).__name__)
def test_every_part_knows_every_edit_and_keeps_the_old_state(value):
    """Contents of attention and recurrent layers with one sequence of 4 tokens."""
    cells = kc.place(kc.create(8, 2), *(np.arange(4, dtype=np.int32),) * 2, np.zeros(4, np.int32))
    zeros, pos = np.zeros(4, np.int32), np.arange(4, dtype=np.int32)
    states = RecurrentStates(n_states=2, depth=1, kept={0: ((3, 0),)})
    before = CacheContents(
        groups=(CellGroup(cells=cells, mask=MaskSpec(), head=4),),
        states=states,
        history=history.append(TokenHistory(), zeros, pos, pos),
    )
    after, copies = contents.apply(before, value)
    (group,) = after.groups
    assert [len(src) for src, _ in copies] == [0]
    assert after.states is not None
    for s in (0, 1):
        held = sorted(group.cells.pos[kc.owned(group.cells, s)].tolist())
        assert history.positions(after.history, s).tolist() == held
        assert len(after.states.kept.get(s, ())) == bool(held)
    assert before.states is states and states.kept == {0: ((3, 0),)}
    assert render(before.groups[0].cells) == "0 1 2 3 . . . ."


@pytest.mark.parametrize("value", EDITS, ids=lambda x: type(x).__name__)
def test_logits_of_changed_sequences_are_dropped(value):
    logits = LastLogits()
    for s in (0, 1):
        logits.put(s, 3, jnp.zeros((1, 4)))
    logits.apply(value)
    left = {kc.Copy: [0], kc.Keep: [1]}.get(type(value), [] if value.seq_ids == () else [1])
    assert sorted(logits.known({0: 3, 1: 3})) == left


def test_a_group_refuses_sequences_that_its_cells_have_no_bit_for():
    group = CellGroup(cells=kc.create(4, 2), mask=MaskSpec())
    for value in (kc.Remove(seq_id=40), kc.Copy(src=0, dst=40), kc.Keep(seq_id=40)):
        with pytest.raises(BadSequence):
            groups.apply(group, value)
