"""Which checkpoint is evicted, and what edits leave, against lists of positions."""

import hypothesis.strategies as st
from hypothesis import given

from kvrt.cellcache.checkpoint import checkpoints
from kvrt.cellcache.checkpoint.checkpoints import Checkpoint, CheckpointLimits, Checkpoints
from kvrt.cells.edits import Copy, Divide, Keep, Remove, Shift


def new(pos):
    return Checkpoint(pos=pos, tails=(), n_bytes=10)


def kept_of(*positions, seq_id=0):
    return Checkpoints(kept={seq_id: tuple(map(new, positions))})


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(1, 12))
def test_no_gap_is_wider_than_the_stated_bound(steps, n_most):
    kept, pos = Checkpoints(), 0
    for step in steps:
        pos += step
        limits = CheckpointLimits(n_most=n_most, n_bytes=None)
        kept = checkpoints.with_new(kept, 0, new(pos), limits)
        found = kept.positions(0)
        assert found[-1] == pos and len(found) <= n_most
        gaps = [b - a for a, b in zip((0, *found), found, strict=False)]
        # One alone is the newest, and everything before it may be evaluated again.
        assert n_most == 1 or max(gaps) <= max(*steps, 2 * pos / (n_most - 1))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=40))
def test_bytes_of_all_sequences_stay_within_the_limit(steps):
    kept, ends = Checkpoints(), [0, 0, 0]
    for seq_id, step in steps:
        ends[seq_id] += step
        kept = checkpoints.with_new(
            kept, seq_id, new(ends[seq_id]), CheckpointLimits(n_most=9, n_bytes=50)
        )
        assert kept.n_bytes <= 50 and kept.positions(seq_id)[-1] == ends[seq_id]


def test_shared_ones_count_once_and_go_from_every_sequence():
    kept = checkpoints.apply(kept_of(10, 20, 30), Copy(src=0, dst=1, p0=0, p1=20), joins=False)
    assert kept.positions(1) == (10, 20) and kept.n_bytes == 30
    after = checkpoints.with_new(kept, 2, new(7), CheckpointLimits(n_most=9, n_bytes=30))
    assert after.n_bytes == 30 and len(after.unique) == 3
    (gone,) = {p for _, p in checkpoints.lost_positions(kept, after)}
    assert all(gone not in after.positions(s) for s in range(3))


def test_an_edit_drops_what_it_changes_and_nothing_else():
    kept = kept_of(10, 20, 30)
    for edit, left in (
        (Remove(seq_id=0, p0=20), (10, 20)),
        (Remove(seq_id=0, p0=19, p1=20), (10,)),
        (Remove(seq_id=0, p0=5, p1=5), (10, 20, 30)),
        (Remove(seq_id=None, p0=0), ()),
        (Remove(seq_id=1, p0=0), (10, 20, 30)),
        (Shift(seq_id=0, p0=20, d=5), (10, 20)),
        (Shift(seq_id=0, p0=25, d=-5), (10, 20)),
        (Shift(seq_id=0, p0=25, d=-6), (10,)),
        (Shift(seq_id=0, p0=0, d=0), (10, 20, 30)),
        (Divide(seq_id=0, p0=20, d=2), (10,)),
        (Divide(seq_id=0, p0=0, d=1), (10, 20, 30)),
        (Keep(seq_id=0), (10, 20, 30)),
        (Keep(seq_id=1), ()),
        (Copy(src=1, dst=0, p0=15), (10,)),
    ):
        assert checkpoints.apply(kept, edit, joins=True).positions(0) == left, edit
    joined = checkpoints.apply(kept, Copy(src=0, dst=1, p0=0), joins=True)
    part = checkpoints.apply(kept, Copy(src=0, dst=1, p0=5), joins=False)
    assert joined.positions(1) == part.positions(1) == ()
