"""What every test of the matrix asserts of a cell."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from kvrt.options import compose
from tests.matrix import covering, history
from tests.matrix.axes import Cell
from tests.matrix.drafted import ON_MESH
from tests.matrix.history import Outcome
from tests.matrix.rules import RULES, Rule, traits_of

ROOT = Path(__file__).parents[2]


def assert_equal(cell: Cell) -> None:
    """A cell that no rule matches is equal to its oracle."""
    found = outcome(cell)
    assert found.kind == "equal", f"{cell}: {found.kind}: {found.error} {found.text}"


def assert_ruled(rule: Rule, cell: Cell) -> None:
    """A cell ends as its rule says: strictly, so that what was mended leaves the list."""
    found = outcome(cell)
    assert found.kind != "equal", f"{cell} is equal to its oracle now: delete rule {rule.id}"
    said = f"{cell}: {found.kind}: {found.error} {found.text}; {rule.id} says {rule.kind}"
    missing = "missing" if rule.kind == "absent" else rule.kind
    assert found.kind == missing and re.fullmatch(rule.says, found.text), said
    if rule.kind == "refused":
        reason, _, remedy = found.text.rpartition(";")
        assert reason and remedy and "\n" not in found.text, found.text


def assert_refused(cell: Cell) -> None:
    """A cell beside the pairs is refused when it is made, by a rule of kvrt and in its words."""
    found, wanted = outcome(cell), compose.refusal(traits_of(cell))
    assert wanted is not None and found.kind == "refused", found
    assert (found.text, found.error) == (wanted[1], wanted[0].error.__name__)


def outcome(cell: Cell) -> Outcome:
    """How a cell ends; those of a mesh many at once, elsewhere."""
    if cell.devices != "mesh":
        return history.outcome(cell)
    return _of_mesh(is_free=cell in (*covering.pairs(), *ON_MESH))[str(cell)]


@functools.cache
def _of_mesh(*, is_free: bool) -> dict[str, Outcome]:
    """Cells of a mesh by name: all that are compared, or all that a rule is about.

    They are tests of two files, which two processes of pytest may run.
    """
    ruled = [c for r in RULES for c in covering.witnesses(r)]
    cells = (*covering.pairs(), *ON_MESH) if is_free else ruled
    names = [str(c) for c in cells if c.devices == "mesh"]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "tests.matrix.mesh_cells", *names],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = {k: v for line in done.stdout.splitlines() for k, v in json.loads(line).items()}
    return {name: Outcome(**fields) for name, fields in found.items()}
