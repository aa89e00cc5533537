"""A user's program is accepted by both checkers of types, and runs as a user's process does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "tests" / "typed" / "user_program.py"
CHECKERS = {
    "mypy": [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "models")])


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_program_has_no_error_of_types(checker, tmp_path):
    words = [*CHECKERS[checker], *([str(tmp_path)] if checker == "mypy" else []), str(PROGRAM)]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "MYPYPATH": PATHS}
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_users_program_runs_with_the_defaults_of_the_command(tmp_path):
    env = {**os.environ, "KVRT_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    env |= {"PYTHONPATH": PATHS, "JAX_COMPILATION_CACHE_DIR": ""}
    env |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # each program runs once
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first == "<Runtime of TinyDecoder: 0 of 4096 cells used, f16, chunked> f16"
    assert last.startswith("token id 99 is not in [0, 32)")
    assert any((tmp_path / "cache" / "xla").iterdir())
