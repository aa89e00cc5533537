"""The soak: units repeat by seed and name, failures are told, counts go on from a ledger."""

import dataclasses
import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from scripts.soak import courses, grids, kills, machines, matrix, soaking, units
from scripts.soak import ledger as ledgers
from scripts.soak.machines import Budget, Machine
from tests.matrix.axes import Cell

TESTS = Path(__file__).parents[1]
DRAWN = []


class Draws(RuleBasedStateMachine):
    @rule(x=st.integers(0, 10_000))
    def add(self, x):
        DRAWN.append(x)


class Fails(RuleBasedStateMachine):
    @rule(x=st.integers(0, 10_000))
    def add(self, x):
        assert x < 50, "too much"


@pytest.fixture(autouse=True)
def _machines(monkeypatch):
    for name, kind in (("draws", Draws), ("fails", Fails)):
        monkeypatch.setitem(machines.MACHINES, name, Machine(kind, (), on_device=False))
        monkeypatch.setitem(units._SHARES, name, 1.0)
    monkeypatch.setattr(units, "NAMES", (*units.NAMES, "draws", "fails"))
    DRAWN.clear()


def drawn(unit, seed):
    DRAWN.clear()
    task = units.Task(unit, ledgers.Ledger(seed=seed), lambda: False)
    machines.run(machines.MACHINES["draws"], task.seed, Budget(3, 10))
    return list(DRAWN)


def run(capfd, only, **options):
    """Counts, how many failed, and what was printed."""
    wanted = units.Wanted.parse([only])
    n_failed = soaking.run(soaking.Options(wanted=wanted, shipped=False, **options))
    out, err = capfd.readouterr()
    return json.loads(out.splitlines()[-1]), n_failed, out + err


def test_every_state_machine_of_the_tests_has_its_turn():
    made = re.compile(r"^class (\w+)\((?:RuleBasedStateMachine|CacheMachine)\)", re.M)
    files = [p for p in TESTS.rglob("*.py") if p != Path(__file__)]
    found = {name for path in files for name in made.findall(path.read_text())}
    there = {kind.__name__ for m in machines.MACHINES.values() for kind in m.kind.__mro__}
    assert len(found) >= 6 and found <= there


def test_a_unit_draws_by_seed_and_name():
    first = drawn("draws/0", 7)
    assert first and drawn("draws/0", 7) == first
    assert drawn("draws/1", 7) != first != drawn("draws/0", 8)


def test_a_history_that_fails_is_told_in_its_shortest_form():
    counts, wrong = machines.run(machines.MACHINES["fails"], 0, Budget(50, 10))
    assert counts["histories"] and "state.add(x=50)" in wrong and "too much" in wrong


def test_the_time_ends_a_unit_between_two_histories():
    asked = []

    def is_over():
        asked.append(1)
        return len(asked) > 3

    counts, wrong = machines.run(machines.MACHINES["draws"], 0, Budget(200, 10, is_over))
    assert counts["histories"] == 3 and not wrong


def test_counts_go_on_from_a_ledger(capfd, tmp_path):
    some = {"minutes": 0.003, "ledger": tmp_path / "soak.json"}
    first, n_failed, text = run(capfd, "draws", **some, seed=3)
    assert n_failed == 0 and "soak: seed 3" in text
    assert first["on_host"] == first["by_machine"]["draws"] and first["on_device"] == {}
    again, n_failed, text = run(capfd, "draws", **some)
    n, more = (x["by_machine"]["draws"]["histories"] for x in (first, again))
    assert n_failed == 0 and more > n > 0 and "soak: seed 3" in text
    told = re.findall(r'"unit": "draws/(\d+)"', text)
    assert int(told[0]) == ledgers.read(some["ledger"]).n_units["draws"] - len(told) > 0
    with pytest.raises(ValueError, match="is of seed 3, not of 4; leave --seed out"):
        run(capfd, "draws", **some, seed=4)
    some["ledger"].write_text('{"seeds": 1}')
    with pytest.raises(ValueError, match="is no ledger of a soak"):
        run(capfd, "draws", **some)


@pytest.mark.slow
def test_a_failure_says_how_to_repeat_it(capfd, tmp_path):
    some = {"minutes": 0, "ledger": tmp_path / "soak.json"}
    found, n_failed, text = run(capfd, "fails/4", **some, seed=2)
    assert n_failed == 1 and found["failed"] == ["fails/4"]
    assert "state.add(x=50)" in text
    assert "again:\n    python -m scripts.soak --seed 2 --only fails/4 --noshipped\n" in text
    assert "too much" in ledgers.read(some["ledger"]).failures["fails/4"]
    # What failed before is no failure of this run.
    assert run(capfd, "draws/0", **some)[1] == 0


@pytest.mark.parametrize(
    ("only", "told"),
    [
        ("zebra", "--only=zebra; machines are runtime-write, "),
        ("paged/x", "a unit is paged/0, paged/1 and so on"),
        ("matrix/none-zebra", "none-zebra"),
    ],
)
def test_names_that_are_none_are_told(only, told):
    with pytest.raises(ValueError, match=told) as caught:
        units.Wanted.parse([only])
    assert "\n" not in str(caught.value)


def test_grids_are_the_files_that_try_more_and_run_by_name_alone():
    found = grids.files()
    assert "tests/session/test_crash.py" in found and "tests/test_golden.py" in found
    assert units.GRIDS not in units.Wanted.parse([]).names
    assert units.Wanted.parse(["grids", "paged"]) == units.Wanted(("paged",), ("grids",))


@pytest.mark.slow
def test_cells_of_the_matrix_are_those_with_most_new_triples(monkeypatch):
    monkeypatch.setattr(matrix.history, "outcome", lambda cell: matrix.history.Outcome("equal"))
    first, wrong = matrix.run(0, [], False)
    assert not wrong and matrix.run(0, [], False)[0] == first
    assert all(matrix.named(x).devices == "one" for x in first)
    later, _ = matrix.run(1, first, False)
    assert not set(first) & set(later)
    monkeypatch.setattr(
        matrix.history, "outcome", lambda cell: matrix.history.Outcome("different", "by 1")
    )
    assert matrix.run_cell(Cell()).endswith("by_layer: different : by 1")
    assert len(matrix.run(0, [], False)[0]) == 1


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_kills_tell_of_a_loss(tmp_path):
    course = courses.SessionCourse(SimpleNamespace(folder=tmp_path), "run_all")
    log = [(1.0, "read", 100), (2.0, "sampled", 3)]
    end = courses.End(signal.SIGTERM, 40.0, log, 143, b"", b"", 1)
    assert course.check(end) == [
        "100 tokens were read, 0 are saved",
        "3 tokens were sampled, 0 are saved",
    ]
    killed = dataclasses.replace(end, number=signal.SIGKILL, code=-9)
    assert course.check(killed) == ["SIGKILL has cost 39.0 s"] and courses.problems(killed) == []
    unheard = dataclasses.replace(end, code=-15, err=b"Traceback")
    assert courses.problems(unheard) == ["exit code -15", "a traceback"]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_a_few_kills_lose_nothing(tmp_path, monkeypatch, budget):
    """One of the signals that a command hears, and the one that it does not."""
    signals = budget(("SIGTERM", "SIGKILL"), kills.SIGNALS)
    monkeypatch.setattr(kills, "SIGNALS", signals)
    found = kills.kill_all(tmp_path, len(signals), 0, ["run_all"])
    assert found["losses"] == [] and found["signals"] == dict.fromkeys(signals, 1)
