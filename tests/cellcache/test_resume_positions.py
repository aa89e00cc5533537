"""The set of positions that a sequence can be cut back to, against each position asked alone."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvrt import MaskSpec
from kvrt.cellcache import window
from kvrt.cellcache.checkpoint import resume
from kvrt.cellcache.checkpoint.resume import ResumePositions
from kvrt.errors import UsageError

MASKS = [
    MaskSpec(kind="window", size=1),
    MaskSpec(kind="window", size=5),
    MaskSpec(kind="chunked", size=4),
]
LOST = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=3)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    groups=st.lists(st.tuples(st.sampled_from(MASKS), LOST), max_size=3),
    checkpoints=st.sets(st.integers(1, 40), max_size=3),
)
def test_a_position_is_in_the_set_where_every_layer_resumes_or_a_checkpoint_stands(
    groups, checkpoints
):
    lost = [(mask, window.union(pairs)) for mask, pairs in groups]
    gaps = [x for mask, pairs in lost for x in window.resume_gaps(mask, pairs)]
    at = resume.of_layers(tuple(gaps), tuple(sorted(checkpoints)))
    wanted = {
        p
        for p in range(60)
        if p in checkpoints or all(window.can_resume(mask, x, p) for mask, x in lost)
    }
    assert {p for p in range(60) if p in at} == wanted
    for p in range(60):
        assert at.nearest(p) == max(x for x in wanted if x <= p)
    assert all(p in at for p in range(at.earliest, 60)) and -1 not in at
    assert at.earliest == 0 or at.earliest - 1 in checkpoints or at.earliest - 1 not in at


@pytest.mark.parametrize("gaps", [((0, 4),), ((4, 4),), ((9, 12), (3, 5))])
def test_gaps_that_are_none_are_refused(gaps):
    with pytest.raises(UsageError, match="intervals \\[a, b\\) after 0, ascending"):
        ResumePositions(gaps=gaps)
