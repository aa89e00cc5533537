"""Which cells are run: every pair of values that no rule forbids, in few cells; and each rule.

All cells are numbered in the order of the axes, plain ones first, and every choice takes the first
of the best, so that the arrays are the same on every machine.
"""

import functools
import itertools

import numpy as np

from tests.matrix.axes import AXES, Cell
from tests.matrix.rules import DEBTS, RULES, Rule

NAMES = tuple(AXES)
SHAPE = tuple(map(len, AXES.values()))
# Pairs of axes.
PAIRS = tuple(itertools.combinations(range(len(NAMES)), 2))
# Cells that the search looks at before it takes the best of them.
_AT_ONCE = 1 << 12


@functools.cache
def _cube(rule_id: str) -> np.ndarray:
    """Which cells a rule matches, by the indices of their values."""
    (rule,) = (r for r in RULES if r.id == rule_id)
    cube = np.ones((1,) * len(NAMES), bool)
    for need in rule.needs:
        one = np.zeros((1,) * len(NAMES), bool)
        for axis in {axis for axis, _ in need}:
            along = [-1 if name == axis else 1 for name in NAMES]
            one = one | np.isin(AXES[axis], [x for a, x in need if a == axis]).reshape(along)
        cube = cube & one
    return np.broadcast_to(cube, SHAPE)


@functools.cache
def _n_rules() -> np.ndarray:
    """How many rules match each cell, by the indices of its values."""
    counts = np.zeros(SHAPE, np.int8)
    for rule in RULES:
        counts += _cube(rule.id)
    return counts


def _plain_first(cells: np.ndarray) -> np.ndarray:
    """Indices of values [axes, cells] of some cells of a cube; those with fewest wishes first."""
    values = np.stack(np.nonzero(cells)).astype(np.int8)
    return values[:, np.argsort(np.sum(values > 0, axis=0, dtype=np.int8), kind="stable")]


def _cell(values: np.ndarray) -> Cell:
    return Cell(*(AXES[name][k] for name, k in zip(NAMES, values, strict=True)))


@functools.cache
def _free() -> np.ndarray:
    """The cells no rule matches, which have to be equal to their oracle; plain ones first."""
    return _plain_first(_n_rules() == 0)


@functools.cache
def _forbidden_once() -> np.ndarray:
    """The cells that one rule matches and no other."""
    return _plain_first(_n_rules() == 1)


@functools.cache
def pairs() -> tuple[Cell, ...]:
    """Cells that are equal to their oracle and have every pair of values that can be."""
    rows, wanted = _free(), {}
    for a, b in PAIRS:
        wanted[a, b] = np.zeros((SHAPE[a], SHAPE[b]), bool)
        wanted[a, b][rows[a], rows[b]] = True
    # Of each cell no fewer new pairs than it has: a number that only falls, counted when it leads.
    most = np.full(rows.shape[1], len(PAIRS), np.int8)
    chosen = []
    while (best := _first_best(most, rows, wanted)) is not None:
        for (a, b), x in wanted.items():
            x[rows[a, best], rows[b, best]] = False
        chosen.append(_cell(rows[:, best]))
    return tuple(chosen)


def _first_best(most: np.ndarray, rows: np.ndarray, wanted: dict) -> int | None:
    """The first of the cells with most new pairs, whose numbers in `most` are brought up to date.

    None where no cell has a new pair.
    """
    while (leading := most.max()) > 0:
        cells = np.flatnonzero(most == leading)
        for start in range(0, len(cells), _AT_ONCE):
            some = cells[start : start + _AT_ONCE]
            of = rows[:, some].astype(np.intp)
            most[some] = sum(x[of[a], of[b]].astype(np.int8) for (a, b), x in wanted.items())
            if (is_best := most[some] == leading).any():
                return int(some[np.argmax(is_best)])
    return None


@functools.cache
def witnesses(rule: Rule) -> tuple[Cell, ...]:
    """For each combination of a rule's values, the plainest cell that it alone matches.

    None where another rule matches whatever has this combination.
    """
    alone, found = _forbidden_once(), []
    for values in rule.combinations():
        here = np.ones(alone.shape[1], bool)
        for axis, value in values.items():
            here &= alone[NAMES.index(axis)] == AXES[axis].index(value)
        if here.any():
            found.append(_cell(alone[:, np.argmax(here)]))
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
    return _free().shape[1]


def free_cell(i: int) -> Cell:
    """One of them, by its number."""
    return _cell(_free()[:, i])


def n_triples() -> int:
    """Combinations of three values that some free cell has."""
    by_axes = (_free()[list(axes)] for axes in itertools.combinations(range(len(NAMES)), 3))
    return sum(np.unique(of, axis=1).shape[1] for of in by_axes)
