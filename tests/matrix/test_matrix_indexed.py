"""Cells with an indexer, equal to the oracle that sorts scores or refused when made."""

import pytest

from tests.matrix.indexed import INDEXED, NOT_INDEXED
from tests.matrix.judged import assert_equal, assert_refused

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cell", INDEXED, ids=str)
def test_a_cell_with_an_indexer_is_equal_to_its_oracle(cell):
    assert_equal(cell)


@pytest.mark.parametrize("cell", NOT_INDEXED, ids=str)
def test_a_cell_is_refused_with_reason_and_remedy(cell):
    assert_refused(cell)
