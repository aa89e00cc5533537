"""Which cases of a test are slow: the default suite runs one of each, for it takes few minutes."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that the default suite leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def first_fast(values: Iterable[Any]) -> list[Any]:
    """Cases of which the default suite has the first alone."""
    first, *others = values
    return [first, *(slow(*(x if isinstance(x, tuple) else (x,))) for x in others)]
