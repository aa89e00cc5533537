"""Cells with drafts, equal to the oracle without them or refused when the object is made."""

import pytest

from tests.matrix.drafted import DRAFTED, NOT_DRAFTED
from tests.matrix.judged import assert_equal, assert_refused

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cell", DRAFTED, ids=str)
def test_a_cell_with_drafts_is_equal_to_its_oracle(cell):
    assert_equal(cell)


@pytest.mark.parametrize("cell", NOT_DRAFTED, ids=str)
def test_a_cell_is_refused_with_reason_and_remedy(cell):
    assert_refused(cell)
