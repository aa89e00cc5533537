"""Sides that are compared: their order, what fails, what has no room, and what times say."""

import pytest

from scripts._lib import rounds, whole_steps
from scripts._lib.rounds import Ready


@pytest.mark.parametrize(("in_order", "wanted"), [(False, "cababcbca"), (True, "abcabcabc")])
def test_another_side_is_first_in_each_round_unless_they_follow_each_other(in_order, wanted):
    seen = []

    def side(name):
        return lambda: seen.append(name) or [1.0]

    times = rounds.interleaved({x: side(x) for x in "abc"}, 2, in_order=in_order)
    assert "".join(seen) == wanted
    assert dict(times) == {x: [1.0, 1.0] for x in "abc"}


def test_times_are_quartiles_and_ratios():
    times = rounds.Times({"a": [0.001, 0.002, 0.003], "b": [0.004] * 3})
    assert times.ms("a") == [1.5, 2.0, 2.5] and times.over("b", "a") == 2.0
    assert times.figures()["b_ms"] == [4.0, 4.0, 4.0]


def test_a_side_that_fails_says_why_and_one_without_room_is_timed_alone():
    n_tries = {"big": 0, "huge": 0}

    def big():
        n_tries["big"] += 1
        if n_tries["big"] == 1:
            raise MemoryError("a layer needs 50 GiB of 30 that are free")
        return Ready(run=lambda: 1, figures={"x": 2}, behind=lambda samples: {"n": len(samples)})

    def bad():
        raise ValueError("two\nlines | and a bar")

    def huge():
        n_tries["huge"] += 1
        raise MemoryError("a layer needs 90 GiB of 30 that are free")

    small = lambda: Ready(run=lambda: 1, parts=4, n_bytes=7)  # noqa: E731
    makers = {"small": small, "bad": bad, "huge": huge, "big": big}
    found = rounds.compared(makers, 3)
    assert list(found) == list(makers) and n_tries == {"big": 2, "huge": 2}
    assert len(found["small"].samples) == 3 and found["small"].n_bytes == 7
    assert found["bad"].figures == {"skipped": "ValueError: two lines / and a bar"}
    assert "90 GiB" in found["huge"].figures["skipped"] and not found["huge"].samples
    assert found["big"].figures == {"x": 2, "n": 3, "alone": True}


def test_spans_that_overlap_count_once():
    assert whole_steps.covered([(5, 7), (0, 2), (1, 3), (6, 6.5)]) == 5
    assert whole_steps.covered([]) == 0
