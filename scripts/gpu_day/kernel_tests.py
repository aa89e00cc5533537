"""The kernels' tests, compiled for the device of this machine and run there by pytest.

python -m scripts.gpu_day.kernel_tests --platform cuda --file tests/attention/test_pallas_gpu.py
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from absl import flags

from scripts._lib import commands, measure
from scripts.gpu_day.plan import ROOT

_FILE = flags.DEFINE_string("file", "tests/attention/test_pallas_gpu.py", "Of tests.")
_PLATFORM = flags.DEFINE_string("platform", "cuda", "cuda, rocm, tpu or cpu.")
_SELECT = flags.DEFINE_string("select", None, "Pytest's -k.")


def main() -> None:
    if importlib.util.find_spec("pytest") is None:
        found: dict[str, Any] = {"skipped": "pytest is not installed; pip install 'kvrt[test]'"}
    else:
        found = run()
    measure.emit("tests", file=_FILE.value, **found)


def run() -> dict[str, Any]:
    """Outcomes of the file."""
    # As shipped: without XLA flags of the tests, of which libtpu knows none.
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--as-shipped", "-m", ""]
    # Where it is installed it warns of xdist, and warnings end our tests.
    command += ["-p", "no:benchmark"]
    command += ["-k", _SELECT.value] if _SELECT.value else []
    # Callbacks and what tests simulate run on the CPU.
    env = os.environ | {"KVRT_TEST_PLATFORM": f"{_PLATFORM.value},cpu"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command += [f"--junitxml={report}", _FILE.value]
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=sys.stderr, check=False)
        if not report.exists():
            return {"failed": f"pytest ended with {done.returncode} and no report"}
        return outcomes(report.read_text())


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


if __name__ == "__main__":
    commands.run(main)
