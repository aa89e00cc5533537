"""Specs that a model gives: what they refuse when they are made."""

import pytest

from kvrt import RecurrentSpec
from kvrt.errors import BadConfig


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(layers=()), "need at least one layer"),
        (dict(layers=(1, 1)), r"recurrent layers \(1, 1\) must ascend"),
        (dict(layers=(2, 0)), r"recurrent layers \(2, 0\) must ascend"),
        (dict(shapes=()), "need a state with at least one axis"),
        (dict(shapes=((),)), "need a state with at least one axis"),
        (dict(shapes=((3, 4), (4, 0))), r"state shapes \(\(3, 4\), \(4, 0\)\) must be above 0"),
    ],
)
def test_recurrent_layers_that_cannot_be_are_refused(change, words):
    with pytest.raises(BadConfig, match=words):
        RecurrentSpec(**dict(layers=(0, 2), shapes=((3, 4), (4, 2))) | change)
