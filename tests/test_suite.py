"""What `pytest` alone runs, and that the lines of CI run the rest."""

import re
import shlex
import tomllib
from pathlib import Path

import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation

from kvrt import cells
from kvrt.attention import softmax
from kvrt.cells import slots

ROOT = Path(__file__).parent.parent


def runs(expression: str, *marks: str) -> bool:
    """Whether a test with these marks is run."""
    # Such an expression is one of Python too.
    return eval(expression, {name: name in marks for name in ("slow", "model")})


def test_annotations_are_checked():
    with pytest.raises(BeartypeCallHintViolation, match="n_heads"):
        softmax.empty("two", 1, 8)
    three, two = np.zeros(3, np.int32), np.zeros(2, np.int32)
    with pytest.raises(BeartypeCallHintViolation, match="pos"):
        slots.place(cells.create(4, 1), three, two, two)


@pytest.mark.slow
def test_annotations_of_slow_tests_are_not():
    with pytest.raises(TypeError, match="Shapes must be"):
        softmax.empty("two", 1, 8)


def test_pytest_alone_is_the_default_suite():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    words = shlex.split(settings["ini_options"]["addopts"])
    default = words[words.index("-m") + 1]
    assert runs(default)
    for marks in (["slow"], ["model"], ["slow", "model"]):
        assert not runs(default, *marks)
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"^    pip install -e '\.\[test\]' && pytest +#", readme, re.MULTILINE)


def test_the_lines_of_ci_run_every_test_once():
    script = (ROOT / ".ci" / "run").read_text()
    # With "=", for pytest takes a folder by itself for tests before it knows the option.
    lines = re.findall(r'^pytest -m "" "--programs=\$venv-programs"$', script, re.MULTILINE)
    assert len(lines) == 1


def test_ci_draws_other_histories_each_day_and_waits_for_them():
    script = (ROOT / ".ci" / "run").read_text()
    line = r'^python -m scripts\.soak --minutes 2 --seed "\$\(date -u \+%Y%m%d\)" > .* &$'
    assert re.search(line, script, re.MULTILINE)
    assert re.search(r'^wait "\$soak" \|\| \{ .*; exit 1; \}$', script, re.MULTILINE)
