"""The arithmetic of a context shift, as llama.cpp's main does it, and the plan that makes room."""

import jax
import numpy as np
import pytest

from kvrt import ContextShift, MaskSpec
from kvrt import cells as kc
from kvrt.cache import schedules
from kvrt.cellcache import group as groups
from kvrt.cellcache.contents import CacheContents
from kvrt.cellcache.group import CellGroup
from kvrt.errors import BadConfig, CacheFull
from kvrt.policies import Drop, DropSchedule, SeqCounts

N_CTX = 16


def llama_cpp(n_past, n_keep):
    """n_left and n_discard by examples/main: the range that seq_rm gets."""
    n_left = n_past - n_keep
    n_discard = n_left // 2
    return n_keep, n_keep + n_discard


@pytest.mark.parametrize("n_keep", [0, 1, 4, 7])
@pytest.mark.parametrize("n_past", [9, 10, 31, 256])
def test_half_of_what_is_not_kept_goes(n_keep, n_past):
    drop = ContextShift(n_keep=n_keep).drop(n_past)
    assert drop is not None
    assert (drop.p0, drop.p1) == llama_cpp(n_past, n_keep)
    assert drop.n == (n_past - n_keep) // 2


def test_a_drop_has_a_fixed_size_if_one_is_given():
    policy = ContextShift(n_keep=2, n_discard=5)
    assert policy.drop(16) == Drop(p0=2, p1=7)
    # No more than there is.
    assert policy.drop(5) == Drop(p0=2, p1=5)
    assert policy.drop(2) is None


@pytest.mark.parametrize(("n_keep", "n_past"), [(0, 0), (0, 1), (4, 3), (4, 4), (4, 5)])
def test_nothing_goes_where_there_is_no_half(n_keep, n_past):
    assert ContextShift(n_keep=n_keep).drop(n_past) is None


def test_one_cell_is_kept_back():
    policy = ContextShift()
    assert [policy.n_fit(n, 9) for n in (2, 3, 4)] == [1, 2, 3]


@pytest.mark.parametrize("bad", [{"n_keep": -1}, {"n_discard": 0}, {"n_discard": -2}])
def test_negative_counts_are_refused(bad):
    with pytest.raises(BadConfig, match="n_keep must be at least 0 and n_discard at least 1"):
        ContextShift(**bad)


# --- plan_drops --------------------------------------------------------------------------------


def plan_drops(before, seq_id, n_new, policy):
    """Drops until n_new tokens fit, in the contents of a cache."""
    schedule = DropSchedule(policy=policy, n_ctx=N_CTX, n_step=N_CTX)
    n_past = groups.n_past(before.groups[0], seq_id)
    counts = SeqCounts(seq_id, n_past + n_new, n_past, n_new=n_new)
    return schedules.plan_drops(schedules.DropPlan(contents=before), schedule, counts)


def holding(*lengths):
    """A group with sequences of these lengths, one behind the other."""
    cells, head = kc.create(N_CTX, 4), 0
    for seq, n in enumerate(lengths):
        pos = np.arange(n, dtype=np.int32)
        slots = kc.plan_slots(cells, head, n)
        cells = kc.place(cells, slots, pos, np.full(n, seq, np.int32))
        head = int(kc.next_head(slots))
    return CellGroup(cells=cells, mask=MaskSpec(), head=head)


def positions(cells, seq):
    return sorted(cells.pos[kc.owned(cells, seq)].tolist())


def same(a, b):
    return all(np.array_equal(*x) for x in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_there_is_room_already():
    group = holding(12)
    room = plan_drops(CacheContents(groups=(group,)), 0, 3, ContextShift())
    assert room.contents.groups == (group,)
    assert (room.drops, room.copies) == ((), ())


def test_one_drop_moves_the_rest_down():
    group = holding(15)
    room = plan_drops(CacheContents(groups=(group,)), 0, 1, ContextShift(n_keep=3))
    assert room.drops == ((0, 15, Drop(p0=3, p1=9)),)
    assert positions(room.contents.groups[0].cells, 0) == list(range(9))
    # Cells stay where they are: 3 kept, 6 emptied, 6 that wait for their rotation.
    assert room.contents.groups[0].cells.pos.tolist() == [0, 1, 2, *[-1] * 6, *range(3, 9), -1]
    assert room.contents.groups[0].cells.delta.tolist() == [0] * 9 + [-6] * 6 + [0]
    assert room.contents.groups[0].head == 0
    assert same(group.cells, holding(15).cells)


def test_drops_repeat_until_the_tokens_fit():
    group = holding(15)
    room = plan_drops(CacheContents(groups=(group,)), 0, 10, ContextShift(n_keep=1))
    assert room.drops == ((0, 15, Drop(p0=1, p1=8)), (0, 8, Drop(p0=1, p1=4)))
    assert positions(room.contents.groups[0].cells, 0) == list(range(5))
    assert int(kc.n_free(room.contents.groups[0].cells)) == 11
    # The sum of both moves is pending on the last cells.
    assert room.contents.groups[0].cells.delta.tolist()[11:15] == [-10] * 4


def test_drops_end_where_nothing_is_left_to_drop():
    group = holding(12, 4)
    room = plan_drops(CacheContents(groups=(group,)), 0, 16, ContextShift(n_keep=2))
    assert [d.n for _, _, d in room.drops] == [5, 2, 1, 1]
    assert positions(room.contents.groups[0].cells, 0) == [0, 1, 2]
    assert positions(room.contents.groups[0].cells, 1) == [0, 1, 2, 3]


def test_another_sequence_gives_nothing():
    group = holding(2, 13)
    room = plan_drops(CacheContents(groups=(group,)), 0, 4, ContextShift(n_keep=2))
    assert (room.drops, room.contents.groups) == ((), (group,))


def test_shared_cells_are_copied_and_their_other_owner_stays():
    group = holding(12)
    group, _ = groups.apply(group, kc.Copy(src=0, dst=1, p0=5, p1=8))
    room = plan_drops(CacheContents(groups=(group,)), 0, 4, ContextShift())
    # Position 5 is shared as well: it goes from sequence 0 and keeps its cell.
    assert room.drops == ((0, 12, Drop(p0=0, p1=6)),)
    # The removal copies nothing, the shift what both have.
    ((_,), ((src, dst),)) = room.copies
    assert (src.tolist(), dst.tolist()) == ([6, 7], [0, 1])
    assert positions(room.contents.groups[0].cells, 0) == list(range(6))
    assert positions(room.contents.groups[0].cells, 1) == [5, 6, 7]
    assert room.contents.groups[0].cells.pos.tolist() == [
        0,
        1,
        -1,
        -1,
        -1,
        5,
        6,
        7,
        2,
        3,
        4,
        5,
        *[-1] * 4,
    ]
    assert room.contents.groups[0].cells.delta.tolist() == [-6] * 2 + [0] * 6 + [-6] * 4 + [0] * 4


def test_a_drop_that_frees_no_cell_is_not_made():
    group = holding(12)
    group, _ = groups.apply(group, kc.Copy(src=0, dst=1))
    room = plan_drops(CacheContents(groups=(group,)), 0, 4, ContextShift(n_keep=8))
    assert (room.drops, room.copies, room.contents.groups) == ((), (), (group,))


def test_a_copy_needs_an_empty_cell():
    group = holding(16)
    group, _ = groups.apply(group, kc.Copy(src=0, dst=1))
    with pytest.raises(CacheFull, match="splitting 8 shared cells of sequence 0 needs 8 cells, 0"):
        plan_drops(CacheContents(groups=(group,)), 0, 1, ContextShift())
