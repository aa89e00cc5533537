"""The slow tests that try more with --full: whole grids, and budgets as large as they are meant."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_OF_THEM = re.compile(r"\bbudget\(|mark\.full\b|from tests\.marks import.*\bfull\b")


def files() -> list[str]:
    """Files of tests that ask for a budget, or have the marker `full`."""
    found = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(p.relative_to(ROOT)) for p in found if _OF_THEM.search(p.read_text()))


def run() -> tuple[Counter[str], str]:
    """Runs them with --full; how many passed, and what pytest said if any failed."""
    command = [sys.executable, "-m", "pytest", "--full", "-m", "slow or model", *files()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    passed = re.search(r"(\d+) passed", done.stdout)
    counts = Counter(tests=int(passed[1]) if passed else 0)
    return counts, done.stdout[-8000:] + done.stderr[-2000:] if done.returncode else ""
