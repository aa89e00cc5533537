"""Cells of tests/matrix beyond its pairs: those with most triples of values not tried yet."""

import itertools
from typing import Any

import numpy as np

from tests.matrix import covering, history
from tests.matrix.axes import AXES, Cell

_LOOKED_AT = 200
_CELLS = 4  # of a unit


def run(seed: int, tried: list[str], with_mesh: bool) -> tuple[list[str], str]:
    """Runs a few cells.

    Args:
      seed: of the cells that are looked at.
      tried: cells that were run already.
      with_mesh: whether cells of a mesh are looked at.

    Returns:
      The cells, and what was wrong with the first that is not equal to its oracle, or "".
    """
    seen = {t for name in tried for t in triples(named(name))}
    rng, run_now = np.random.default_rng(seed), []
    for _ in range(_CELLS):
        cell = max(_looked_at(rng, with_mesh), key=lambda c: len(triples(c) - seen))
        seen |= triples(cell)
        run_now.append(str(cell))
        if wrong := run_cell(cell):
            return run_now, wrong
    return run_now, ""


def run_cell(cell: Cell) -> str:
    """What is wrong with a cell, or ""."""
    found = history.outcome(cell)
    return "" if found.kind == "equal" else f"{cell}: {found.kind} {found.error}: {found.text}"


def named(name: str) -> Cell:
    """The cell of a name.

    Raises:
      ValueError: there is none.
    """
    values = name.split("-")
    if len(values) != len(AXES) or any(v not in AXES[a] for a, v in zip(AXES, values, strict=True)):
        raise ValueError(f"{name} is no cell of the matrix; see tests/matrix/axes.py")
    return Cell(*values)


def triples(cell: Cell) -> set[tuple]:
    """All combinations of three of its values."""
    # Speculation stands beside the axes.
    return set(itertools.combinations(zip(AXES, cell[: len(AXES)], strict=True), 3))


def n_triples(tried: list[str]) -> int:
    """Triples of the cells that were run."""
    return len({t for name in tried for t in triples(named(name))})


def _looked_at(rng: Any, with_mesh: bool) -> list[Cell]:
    """Cells that no rule matches."""
    found = [covering.free_cell(i) for i in rng.integers(0, covering.n_free(), _LOOKED_AT)]
    return [c for c in found if with_mesh or c.devices == "one"]
