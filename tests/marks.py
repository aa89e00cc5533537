"""Which cases of a test are slow, and which of these CI leaves to `pytest --full`.

The default suite has three minutes, and runs what takes about a second at most; CI runs enough
cases of the others that each value of a grid is there. Whole grids are part of the soak.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that the default suite leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def full(*values: Any) -> Any:
    """A case that CI has no time for either."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.full])


def first_fast(values: Iterable[Any], n: int = 1) -> list[Any]:
    """Cases of which the default suite has the first n alone."""
    values = list(values)
    # A named tuple is one value.
    return [*values[:n], *(slow(*x) if type(x) is tuple else slow(x) for x in values[n:])]
