"""What rolling groups have lost, against plain sets of positions; which cells they use again."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from named_edits import NamedEdits, alone

from kvrt import CacheConfig, GroupSpec, MaskSpec
from kvrt import cells as kc
from kvrt.cellcache import group as groups
from kvrt.cellcache import window
from kvrt.errors import CacheFull, CannotRewind
from kvrt.sizes import Extent, extent

WINDOW = MaskSpec(kind="window", size=4)
PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=4)
ENDS = st.one_of(st.none(), st.integers(0, 40))

shift = NamedEdits(groups.apply)
edit = NamedEdits(alone(groups.apply))


def held(intervals):
    return {p for a, b in intervals for p in range(a, b)}


def inside(p, p0, p1):
    return p0 <= p and (p1 is None or p < p1)


@given(pairs=PAIRS)
def test_intervals_are_ascending_and_disjoint(pairs):
    found = window.union(pairs)
    assert held(found) == held(pairs)
    edges = [x for pair in found for x in pair]
    assert edges == sorted(set(edges))


@given(pairs=PAIRS, p0=st.integers(0, 40), p1=ENDS, d=st.integers(-20, 20))
def test_what_is_lost_moves_with_its_positions(pairs, p0, p1, d):
    lost = window.union(pairs)
    positions = held(lost)
    here = {p for p in positions if inside(p, p0, p1)}
    assert held(window.within(lost, p0, p1)) == here
    assert held(window.without(lost, p0, p1)) == positions - here
    expected = {p + d for p in here if p + d >= 0} | (positions - here)
    assert held(window.added(lost, p0, p1, d)) == expected


@given(pairs=PAIRS, p0=st.integers(0, 40), p1=ENDS, d=st.integers(1, 5))
def test_what_is_lost_is_divided_with_its_positions(pairs, p0, p1, d):
    lost = window.union(pairs)
    expected = {p // d if inside(p, p0, p1) else p for p in held(lost)}
    assert held(window.divided(lost, p0, p1, d)) == expected


@pytest.mark.parametrize("mask", [WINDOW, MaskSpec(kind="chunked", size=4)])
@settings(max_examples=8)
@given(end=st.integers(1, 40))
def test_the_earliest_place_to_resume_is_the_first_that_sees_nothing_lost(mask, end):
    def sees(pos):
        """Positions that a token at pos, or a later one, sees."""
        return {
            k
            for q in range(pos, pos + 9)
            for k in range(q)
            if kc.visible(mask, *of([k]), *of([q]))[0, 0]
        }

    def of(pos):
        return np.array(pos, np.int32), np.ones((1, 1), np.uint32)

    ((_, found),) = window.resume_gaps(mask, ((0, end),))
    assert min(sees(found), default=found) >= end
    assert found == end or min(sees(found - 1)) < end
    assert window.horizon(mask, found) >= end


def rolled(n, *, n_cells=8, mask=WINDOW, n_seq=1):
    """A group that took in n tokens of sequence 0, one at a time."""
    group = groups.open_group(Extent(n_cells=n_cells, block_size=4, rolls=True), mask, n_seq)
    for pos in range(n):
        group = taken(group, 0, pos)
    return group


def taken(group, seq, pos, n=1):
    found = groups.find(group, n, {seq: pos}, int(kc.n_used(group.cells)))
    where = np.arange(pos, pos + n, dtype=np.int32)
    cells = kc.place(found.group.cells, found.slots, where, np.full(n, seq, np.int32))
    return dataclasses.replace(found.group, cells=cells, head=int(kc.next_head(found.slots)))


def positions(group, seq=0):
    return sorted(group.cells.pos[kc.owned(group.cells, seq)].tolist())


def test_the_oldest_cells_are_used_again_and_no_more_than_needed():
    group = rolled(30)
    assert positions(group) == list(range(22, 30))
    assert group.lost == {0: ((0, 22),)}
    assert window.resume_gaps(WINDOW, group.lost[0]) == ((1, 25),)


def test_tokens_of_one_step_see_what_was_there_before_it():
    """Of 5 new tokens the first sees 3 back: with 8 cells those 3 and the 5 are all there is."""
    group = taken(rolled(20), 0, 20, 5)
    assert positions(group) == list(range(17, 25))
    with pytest.raises(CacheFull, match="a step needs 6 cells of windowed layers, 5 of 8 can be"):
        groups.find(group, 6, {0: 25}, 8)


def test_a_sequence_is_cut_back_to_what_it_still_has():
    group = rolled(30)
    assert positions(edit.rm(group, 0, 25)) == [22, 23, 24]
    with pytest.raises(CannotRewind, match=r"position 24, where .* window of 4 see .* below 22"):
        edit.rm(group, 0, 24)
    assert edit.rm(group, 0).lost == {}


def test_a_shift_may_not_bring_lost_tokens_into_sight():
    """Tokens 0 and 1 are kept, but lost: near enough to the end they would have to be seen."""
    group = rolled(30)
    far = edit.rm(group, 0, 2, 26)
    assert positions(shift.add(far, 0, 26, None, -4)[0]) == [22, 23, 24, 25]
    assert shift.add(far, 0, 26, None, -4)[0].lost == {0: ((0, 2),)}
    # At 2 to 5 they are a whole window; one token less, and the next would see position 1.
    assert positions(shift.add(far, 0, 26, None, -24)[0]) == [2, 3, 4, 5]
    less = edit.rm(group, 0, 2, 28)
    with pytest.raises(CannotRewind):
        shift.add(less, 0, 28, None, -26)


def test_what_another_sequence_still_sees_stays():
    group = rolled(6, n_cells=12, n_seq=2)
    group = edit.cp(group, 0, 1)
    for pos in range(6, 26):
        group = taken(group, 0, pos)
    # Sequence 1 goes on from 6 and sees 3 back; sequence 0 has given its share of them up.
    assert {3, 4, 5} <= set(positions(group, 1))
    assert positions(group) == list(range(positions(group)[0], 26))
    group = taken(group, 1, 6)
    assert 6 in positions(group, 1)


def test_a_copy_of_what_is_lost_is_refused():
    group = rolled(30, n_seq=2)
    assert positions(edit.cp(group, 0, 1), 1) == list(range(22, 30))
    with pytest.raises(CannotRewind, match="sequence 1 would end at position 10"):
        edit.cp(group, 0, 1, 0, 10)


def test_a_group_has_n_ctx_cells_or_what_its_window_needs():
    def size(mask=WINDOW, **change):
        group = GroupSpec(layers=(0,), n_kv_heads=1, head_dim=8, rope=None, mask=mask)
        found = extent(group, CacheConfig(**{"n_ctx": 64, "block_size": 8, **change}))
        return found.n_cells, found.rolls

    assert size(n_ubatch=16) == (24, True)
    assert size(n_ubatch=16, n_seq_max=3) == (32, True)
    assert size(n_ubatch=64) == (64, False)
    assert size(n_ubatch=16, swa_full=True) == (64, False)
    assert size(MaskSpec(), n_ubatch=16) == (64, False)
    assert size(MaskSpec(kind="window", size=4, n_sink=2), n_ubatch=16) == (64, False)
    assert size(MaskSpec(kind="symmetric", size=4), n_ubatch=16) == (64, False)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5)), max_size=20))
def test_any_steps_of_two_sequences_fit_and_keep_what_is_in_sight(steps):
    group = groups.open_group(Extent(n_cells=13, block_size=4, rolls=True), WINDOW, 2)
    ends = [0, 0]
    for seq, n in steps:
        group = taken(group, seq, ends[seq], n)
        ends[seq] += n
        for s, end in enumerate(ends):
            there = positions(group, s)
            assert there == list(range(there[0], end)) if there else end == 0
            assert not end or there[0] <= max(end - 3, 0)


STEPS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, 5), st.integers(0, 30)), max_size=20)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [WINDOW, MaskSpec(kind="chunked", size=4)], ids=lambda m: m.kind)
@settings(max_examples=30)
@given(steps=STEPS, n_keep=st.integers(0, 5))
def test_any_drop_leaves_what_is_in_sight_where_the_first_are_pinned(mask, steps, n_keep):
    """However much a policy drops behind what it keeps; a cell's first position says its token."""
    size = Extent(n_cells=2 * (mask.size + n_keep) + 5, block_size=4, rolls=True)
    group = groups.open_group(size, mask, 2, n_keep)
    texts = [[], []]
    for seq, n, n_drop in steps:
        text = texts[seq]
        groups.check_room(group, seq, n, 5)
        group = taken(group, seq, len(text), n)
        text += range(len(text), len(text) + n)
        n_drop = min(n_drop, len(text) - n_keep)
        if n_drop > 0:
            group = edit.rm(group, seq, n_keep, n_keep + n_drop)
            group = edit.add(group, seq, n_keep + n_drop, None, -n_drop)
            del text[n_keep : n_keep + n_drop]
        for s, text in enumerate(texts):
            mine = kc.owned(group.cells, s)
            at, delta = group.cells.pos[mine], group.cells.delta[mine]
            there = dict(zip(at.tolist(), (at - delta).tolist(), strict=True))
            seen = {
                *range(window.horizon(mask, len(text)), len(text)),
                *range(min(n_keep, len(text))),
            }
            assert {p: text[p] for p in seen} == {p: there.get(p) for p in seen}
            assert groups.n_past(group, s) == len(text)
            lost = group.lost.get(s, ())
            resumes = [p for p in range(len(text) + 1) if window.can_resume(mask, lost, p)]
            assert resumes[-1] == len(text)
            for p in resumes:
                assert set(range(window.horizon(mask, p), p)) <= there.keys()
