"""Every pair of values of the matrix's axes: cells of a mesh, in a process of its own."""

import pytest

from tests.matrix.covering import part
from tests.matrix.drafted import ON_MESH
from tests.matrix.judged import assert_equal

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cell", [*part("mesh"), *ON_MESH], ids=str)
def test_a_cell_is_equal_to_its_oracle(cell):
    assert_equal(cell)
