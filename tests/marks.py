"""Which cases of a test are slow, and which of these CI leaves to `pytest --full`.

The default suite has three minutes, and runs what takes about a second at most; CI runs enough
cases of the others that each value of a grid is there. Whole grids are part of the soak.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """A case that the default suite leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def full(*values: Any) -> Any:
    """A case that CI has no time for either."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.full])


# Kinds of layers that CI has wherever kinds are a grid; the matrix has all beside all else, and
# layers that read others or have an indexer have files of their own.
KINDS_OF_CI = frozenset({"full", "window", "recurrent", "latent"})


def of_ci(kinds: Iterable[str], fast: str | None = None) -> list[Any]:
    """Kinds of layers, of which CI has some, and the default suite the one that is `fast`."""
    some = slow if fast else str
    return [
        kind if kind == fast else some(kind) if kind in KINDS_OF_CI else full(kind)
        for kind in kinds
    ]


def in_turn(first: Iterable[str], second: Sequence[Any]) -> list[Any]:
    """Kinds of layers and other values, of which CI has its kinds once, the others in turn."""
    out = []
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            mark = slow if i % len(second) == j and a in KINDS_OF_CI else full
            out.append(mark(a, b))
    return out


def first_fast(values: Iterable[Any], n: int = 1) -> list[Any]:
    """Cases of which the default suite has the first n alone."""
    values = list(values)
    # A named tuple is one value.
    return [*values[:n], *(slow(*x) if type(x) is tuple else slow(x) for x in values[n:])]
