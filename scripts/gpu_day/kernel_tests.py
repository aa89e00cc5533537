"""The kernels' tests, compiled for the device of this machine and run there by pytest."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.gpu_day.plan import ROOT, Cell

_LIMIT_S = 600.0


def run(cell: Cell, machine: Mapping[str, Any], out: Path, left_s: float) -> dict[str, Any]:
    """Outcomes of one file of tests."""
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed; pip install 'kvrt[test]'"}
    report = out / f"{Path(cell.what).stem}.xml"
    # As shipped: without XLA flags of the tests, of which libtpu knows none.
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--as-shipped", "-m", ""]
    # Where it is installed it warns of xdist, and warnings end our tests.
    command += ["-p", "no:benchmark"]
    command += ["-k", cell.select] if cell.select else []
    command += [f"--junitxml={report}", cell.what]
    # Callbacks and what tests simulate run on the CPU.
    env = os.environ | {"KVRT_TEST_PLATFORM": f"{platform(machine)},cpu"}
    limit = max(min(_LIMIT_S, left_s), 1.0)
    report.unlink(missing_ok=True)
    with (out / "tests.log").open("a") as log:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=env, stdout=log, stderr=log, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done within {limit:.0f} s"}
    if not report.exists():
        return {"failed": f"pytest ended with {done.returncode} and no report; see tests.log"}
    return outcomes(report.read_text())


def platform(machine: Mapping[str, Any]) -> str:
    """The device's platform as JAX wants it named."""
    if machine["backend"] != "gpu":
        return machine["backend"]
    return "rocm" if "rocm" in machine["platform"].lower() else "cuda"


def outcomes(report: str) -> dict[str, Any]:
    """What pytest's report in JUnit's form says: counts, and what failed."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failures = {
        case.attrib["name"]: " ".join((found.attrib.get("message") or "").split())[:160]
        for case in cases
        for found in case
        if found.tag in ("failure", "error")
    }
    skipped = sum(found.tag == "skipped" for case in cases for found in case)
    line = {"passed": len(cases) - len(failures) - skipped, "n_failed": len(failures)}
    line |= {"n_skipped": skipped, "failures": failures}
    return line if cases else {"failed": "pytest found no test"}
