"""What the matrix refuses is refused when the object is made; debts fail as they are known to."""

import pytest

from tests.matrix.covering import witnesses
from tests.matrix.judged import assert_ruled
from tests.matrix.rules import DEBTS, REFUSED

pytestmark = pytest.mark.slow


def cases(rules):
    return [pytest.param(r, c, id=f"{r.id}-{c}") for r in rules for c in witnesses(r)]


@pytest.mark.parametrize(("rule", "cell"), cases(REFUSED))
def test_a_cell_is_refused_with_reason_and_remedy(rule, cell):
    assert_ruled(rule, cell)


@pytest.mark.parametrize(("rule", "cell"), cases(DEBTS))
def test_a_debt_still_fails_as_it_is_known_to(rule, cell):
    assert_ruled(rule, cell)
