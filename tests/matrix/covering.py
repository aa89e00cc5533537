"""Which cells are run: every pair of values that no rule forbids, in few cells; and each rule.

All cells are numbered in the order of the axes, plain ones first, and every choice takes the first
of the best, so that the arrays are the same on every machine.
"""

import functools
import itertools
from collections.abc import Iterable

import numpy as np

from tests.matrix.axes import AXES, DEBTS, RULES, Cell, Rule

NAMES = tuple(AXES)
SHAPE = tuple(map(len, AXES.values()))
# Pairs of axes.
PAIRS = tuple(itertools.combinations(range(len(NAMES)), 2))


@functools.cache
def _order() -> np.ndarray:
    """The cells, by numbers that count the last axis first; those with fewest wishes first."""
    n_wishes = sum(x > 0 for x in np.indices(SHAPE, np.int8))
    return np.argsort(np.ravel(n_wishes), kind="stable")


@functools.cache
def _grid():
    """Indices of every cell's values, [axes, cells], in that order."""
    return np.stack(np.unravel_index(_order(), SHAPE)).astype(np.int8)


@functools.cache
def _cube(rule_id: str) -> np.ndarray:
    """Which cells a rule matches, by the indices of their values."""
    (rule,) = (r for r in RULES if r.id == rule_id)
    wanted = (np.isin(AXES[x], rule.when.get(x, " ".join(AXES[x])).split()) for x in NAMES)
    by_axis = np.meshgrid(*wanted, indexing="ij", sparse=True)
    return np.broadcast_to(functools.reduce(np.logical_and, by_axis), SHAPE)


@functools.cache
def _matched(rule_id: str) -> np.ndarray:
    """Which cells a rule matches, in order."""
    return _cube(rule_id).ravel()[_order()]


def _any(rules: Iterable[Rule]) -> np.ndarray:
    """Which cells one of some rules matches."""
    nothing = np.zeros(_grid().shape[1], bool)
    return functools.reduce(np.logical_or, (_matched(r.id) for r in rules), nothing)


def _cell(i: int) -> Cell:
    return Cell(*(AXES[name][k] for name, k in zip(NAMES, _grid()[:, i], strict=True)))


@functools.cache
def free() -> np.ndarray:
    """Which cells no rule matches: those that have to be equal to their oracle."""
    return ~_any(RULES)


@functools.cache
def pairs() -> tuple[Cell, ...]:
    """Cells that are equal to their oracle and have every pair of values that can be."""
    index = np.flatnonzero(free())
    rows = _grid()[:, index]
    wanted = {}
    for a, b in PAIRS:
        wanted[a, b] = np.zeros((SHAPE[a], SHAPE[b]), bool)
        wanted[a, b][rows[a], rows[b]] = True
    gain = sum(x[rows[a], rows[b]].astype(np.int16) for (a, b), x in wanted.items())
    chosen = []
    while gain.any():
        best = int(np.argmax(gain))
        for (a, b), x in wanted.items():
            values = rows[a, best], rows[b, best]
            if x[values]:
                x[values] = False
                gain -= (rows[a] == values[0]) & (rows[b] == values[1])
        chosen.append(_cell(index[best]))
    return tuple(chosen)


@functools.cache
def witnesses(rule: Rule) -> tuple[Cell, ...]:
    """For each combination of a rule's values, the plainest cell that it alone matches.

    None where another rule matches whatever has this combination.
    """
    alone = _matched(rule.id) & ~_any(r for r in RULES if r is not rule)
    found = []
    for values in rule.combinations():
        here = alone.copy()
        for axis, value in values.items():
            here &= _grid()[NAMES.index(axis)] == AXES[axis].index(value)
        if here.any():
            found.append(_cell(int(np.argmax(here))))
    return tuple(found)


def cell_of(a: str, x: str, b: str, y: str) -> Cell | None:
    """The first cell of `pairs` with two values; None where no free cell has them."""
    return next((c for c in pairs() if getattr(c, a) == x and getattr(c, b) == y), None)


def test_of(cell: Cell) -> str:
    """The test that has a cell, without its parameters; kernels and meshes have files apart."""
    return f"test_matrix_{part_of(cell)}.py::test_a_cell_is_equal_to_its_oracle"


def test_of_rule(rule: Rule) -> str:
    """The test of a rule, without its parameters."""
    if rule in DEBTS:
        return "test_a_debt_still_fails_as_it_is_known_to"
    return "test_a_cell_is_refused_with_reason_and_remedy"


def part_of(cell: Cell) -> str:
    """Which of the files of slow tests has a cell."""
    if cell.devices == "mesh":
        return "mesh"
    return "kernels" if cell.attention in ("gpu", "tpu") else "pairs"


def part(name: str) -> list[Cell]:
    """The cells of one file of slow tests."""
    return [c for c in pairs() if part_of(c) == name]


def reasons(a: str, x: str, b: str, y: str) -> list[Rule]:
    """Few rules that together forbid every cell with two values; none where one is free."""
    where: list[slice | int] = [slice(None)] * len(NAMES)
    where[NAMES.index(a)], where[NAMES.index(b)] = AXES[a].index(x), AXES[b].index(y)
    here = {r: _cube(r.id)[tuple(where)] for r in RULES}

    def forbid(rules: list[Rule]) -> bool:
        return bool(np.any([here[r] for r in rules], axis=0).all())

    if not forbid(list(RULES)):
        return []
    found = [r for r in RULES if here[r].any()]
    # Those that forbid least go first.
    for rule in sorted(found, key=lambda r: np.count_nonzero(here[r])):
        others = [r for r in found if r is not rule]
        if forbid(others):
            found = others
    return found


def n_free() -> int:
    """Cells that no rule matches."""
    return int(np.count_nonzero(free()))


def free_cell(i: int) -> Cell:
    """One of them, by its number."""
    return _cell(int(np.flatnonzero(free())[i]))


def n_triples() -> int:
    """Combinations of three values that some free cell has."""
    there = _grid()[:, free()]
    by_axes = (there[list(axes)] for axes in itertools.combinations(range(len(NAMES)), 3))
    return sum(np.unique(of, axis=1).shape[1] for of in by_axes)
