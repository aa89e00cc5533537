"""Every pair of values of the matrix's axes: cells of one device that are computed by XLA."""

import pytest

from tests.matrix.covering import part
from tests.matrix.judged import assert_equal

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cell", part("pairs"), ids=str)
def test_a_cell_is_equal_to_its_oracle(cell):
    assert_equal(cell)
