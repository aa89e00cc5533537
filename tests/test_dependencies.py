"""Dependencies have bounds on both sides, and CI installs the oldest and the newest of them."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTS = [Requirement(line) for line in PROJECT["optional-dependencies"]["test"]]
ALL = [Requirement(line) for line in PROJECT["dependencies"]] + TESTS


def versions(name: str) -> dict[str, str]:
    lines = (ROOT / "tests" / f"constraints-{name}.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    return {pin.name.replace("_", "-").lower(): str(pin.specifier)[2:] for pin in pins}


@pytest.mark.parametrize("wanted", ALL, ids=lambda requirement: requirement.name)
def test_bounds_are_those_that_ci_installs(wanted):
    found = {spec.operator: spec.version for spec in wanted.specifier}
    newest = versions("newest")[wanted.name]
    assert wanted.specifier.contains(newest)
    if set(found) == {"=="}:
        return
    assert set(found) == {">=", "<"}
    oldest = Requirement(f"x=={versions('oldest')[wanted.name]}").specifier
    assert oldest.contains(found[">="]) and not wanted.specifier.contains("1000")


def test_ci_installs_both():
    script = (ROOT / ".ci" / "run").read_text()
    for name in ("newest", "oldest"):
        assert f'PIP_CONSTRAINT="$PWD/tests/constraints-{name}.txt"' in script
